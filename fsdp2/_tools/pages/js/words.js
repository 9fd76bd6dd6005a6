// Formatting of numbers, and creation of text elements. Contains no drawing code.

const number = new Intl.NumberFormat("en-US", {maximumSignificantDigits: 4});
const whole = new Intl.NumberFormat("en-US", {maximumFractionDigits: 0});

function inUnits(value, units) {
  const size = Math.abs(value);
  const [scale, name] = units.find(([scale]) => size >= scale) || units[units.length - 1];
  return `${number.format(value / scale)} ${name}`;
}

const BYTES = [[2 ** 50, "PiB"], [2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];
const SECONDS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
const COUNTS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];

const bytesText = (value) => inUnits(value, BYTES);
const secondsText = (value) => (value === 0 ? "0 s" : inUnits(value, SECONDS));
const countText = (value) => inUnits(value, COUNTS).trim();

// A scale for an axis with round steps in binary units, which a decimal axis would not have.
function byteSteps(most) {
  if (most <= 0) return {max: 1, interval: 1};
  const [scale] = BYTES.find(([scale]) => most >= scale) || [1];
  const rough = most / scale / 4;
  const ten = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * ten).find((one) => one >= rough);
  const interval = Math.max(1, step * scale);
  return {max: Math.ceil(most / interval) * interval, interval};
}

// Ticks of time, in one unit for the entire axis, with the digits that the range needs.
function timeTicks(range) {
  const [scale, name] = SECONDS.find(([scale]) => range >= 2 * scale) || SECONDS[SECONDS.length - 1];
  const digits = Math.max(0, 2 - Math.floor(Math.log10(range / scale)));
  const format = new Intl.NumberFormat("en-US", {maximumFractionDigits: Math.min(digits, 9)});
  return (value) => `${format.format(value / scale)} ${name}`;
}

// An element with attributes and children. Strings become text nodes: see the note in page.py.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

// A coloured square. The style is set through the object, because the policy forbids inline styles.
function swatch(colour) {
  const made = element("i", {class: "swatch", "aria-hidden": "true"});
  made.style.background = colour;
  return made;
}

// The contents of a tooltip: a heading, rows of [swatch or null, name, value], and a final note.
function hoverBox(heading, rows, word = "") {
  const table = element("table");
  for (const [mark, name, value] of rows) {
    table.append(element("tr", {}, element("td", {}, mark || ""), element("td", {}, name), element("td", {}, value)));
  }
  const last = word ? element("p", {}, word) : null;
  return element("div", {class: "hover"}, element("b", {}, heading), table, last);
}
