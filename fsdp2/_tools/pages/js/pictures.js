// Code shared by all pictures: colours of the theme, redrawing, printing, and zoom along time.

// The active value of `light-dark(one, other)` in page.css.
function colour(name) {
  const root = document.documentElement;
  const [, light, dark] = /light-dark\((\S+), (\S+)\)/.exec(getComputedStyle(root).getPropertyValue(`--${name}`));
  return isDark() ? dark : light;
}

const asks = window.matchMedia("(prefers-color-scheme: dark)");

const isOnPaper = () => document.documentElement.classList.contains("on-paper");

function isDark() {
  const root = document.documentElement;
  if (isOnPaper()) return false;
  return root.dataset.theme ? root.dataset.theme === "dark" : asks.matches;
}

const SERIES = 7; // the number of colours --series-0, --series-1, ... in page.css
const seriesColour = (index) => colour(index < SERIES ? `series-${index}` : "series-rest");

// Black or white, whichever has more contrast on a colour (WCAG's relative luminance).
function inkOn(hex) {
  const parts = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255);
  const [r, g, b] = parts.map((p) => (p <= 0.03928 ? p / 12.92 : ((p + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.2 ? "#111111" : "#ffffff";
}

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

// A picture, redrawn when the theme changes and for printing: `option(width)` is its content, `after(chart)` adds handlers.
class Picture {
  constructor(host, label, option, after = () => {}) {
    Object.assign(this, {host, option, after, chart: null, width: 0});
    host.classList.add("picture");
    host.setAttribute("role", "img");
    host.setAttribute("aria-label", label);
    Picture.all.push(this);
  }

  draw({width = this.host.clientWidth, ratio = window.devicePixelRatio} = {}) {
    if (!width) return; // a hidden tab is drawn when it is shown
    const [kept] = (this.chart && this.chart.getOption().dataZoom) || [];
    if (this.chart) this.chart.dispose();
    this.host.replaceChildren(); // removes tooltips
    const option = this.option(width);
    if (isOnPaper()) withoutSlider(option);
    for (const zoom of option.dataZoom || []) if (kept) Object.assign(zoom, {start: kept.start, end: kept.end});
    this.width = width;
    this.host.style.height = `${option.height}px`;
    this.chart = echarts.init(this.host, null, {renderer: "canvas", width, height: option.height, devicePixelRatio: ratio});
    delete option.height;
    this.chart.setOption({
      animation: false,
      textStyle: {fontFamily: FONT, fontSize: 12, color: colour("ink")},
      ...option,
    });
    this.after(this.chart);
    this.chart.getZr().flush();
  }
}
Picture.all = [];

// Removes the slider and its space, for printing.
function withoutSlider(option) {
  if (!option.dataZoom) return;
  option.dataZoom = option.dataZoom.filter((zoom) => zoom.type !== "slider");
  option.height -= SLIDER_ROOM;
  if (!Array.isArray(option.grid)) option.grid.bottom -= SLIDER_ROOM;
}
const SLIDER_ROOM = 30;

function hoverStyle() {
  return {
    backgroundColor: colour("panel"),
    borderColor: colour("line"),
    borderWidth: 1,
    padding: [8, 10],
    confine: true,
    transitionDuration: 0,
    textStyle: {color: colour("ink"), fontSize: 12, fontFamily: FONT},
    extraCssText: "box-shadow: 0 2px 10px rgb(0 0 0 / .25); max-width: 420px; white-space: normal;",
  };
}

function axisStyle() {
  return {
    axisLine: {lineStyle: {color: colour("line")}},
    axisTick: {lineStyle: {color: colour("line")}},
    axisLabel: {color: colour("soft"), hideOverlap: true},
    splitLine: {lineStyle: {color: colour("faint")}},
    nameTextStyle: {color: colour("soft")},
  };
}

// Zoom with Ctrl and the wheel, or with the slider below. The wheel alone scrolls the page.
function zoomStyle(axes, slider) {
  const common = {xAxisIndex: axes, filterMode: "none", minSpan: 0.001};
  return [
    {type: "inside", ...common, zoomOnMouseWheel: "ctrl", moveOnMouseMove: false, moveOnMouseWheel: "shift"},
    {
      type: "slider", ...common, ...slider, height: 16, showDetail: false, showDataShadow: false, brushSelect: false,
      borderColor: colour("line"), fillerColor: colour("filler"), backgroundColor: colour("faint"),
      handleStyle: {color: colour("soft"), borderColor: colour("soft")}, moveHandleSize: 0,
    },
  ];
}

const zoomOf = (chart) => {
  const {start, end} = chart.getOption().dataZoom[0];
  return {start, end};
};

function setZoom(chart, start, end) {
  const length = Math.min(100, Math.max(0.001, end - start));
  const from = Math.min(100 - length, Math.max(0, start));
  chart.dispatchAction({type: "dataZoom", start: from, end: from + length});
}

// Shows a tooltip next to the pointer: `find(x, y)` creates its contents, or returns null for none.
function answerHover(chart, host, find) {
  const zr = chart.getZr();
  let shown = null;
  const hide = () => { if (shown) shown.remove(); shown = null; };
  zr.on("mousemove", ({offsetX, offsetY}) => {
    hide();
    shown = find(offsetX, offsetY);
    if (!shown) return;
    shown.classList.add("floating");
    host.append(shown);
    const right = offsetX + 16 + shown.offsetWidth <= host.clientWidth;
    shown.style.left = `${right ? offsetX + 16 : Math.max(0, offsetX - 16 - shown.offsetWidth)}px`;
    shown.style.top = `${Math.max(0, Math.min(offsetY + 12, host.clientHeight - shown.offsetHeight))}px`;
  });
  zr.on("globalout", hide);
}

// Zoom by dragging over a range, reset with a double click; + - 0 and arrows on the keyboard.
function answerZoom(chart, host, isInside) {
  const zr = chart.getZr();
  const band = element("div", {class: "band", hidden: true});
  host.append(band);
  let from = null;
  const place = (to) => {
    band.style.left = `${Math.min(from, to)}px`;
    band.style.width = `${Math.abs(to - from)}px`;
    band.hidden = Math.abs(to - from) < 4;
  };
  zr.on("mousedown", (event) => {
    if (isInside(event.offsetX, event.offsetY)) from = event.offsetX;
  });
  zr.on("mousemove", (event) => from !== null && place(event.offsetX));
  zr.on("globalout", () => { from = null; band.hidden = true; });
  zr.on("mouseup", (event) => {
    if (from !== null && !band.hidden) zoomTo(chart, Math.min(from, event.offsetX), Math.max(from, event.offsetX));
    from = null;
    band.hidden = true;
  });
  zr.on("dblclick", () => setZoom(chart, 0, 100));
}

function zoomTo(chart, left, right) {
  const {startValue, endValue} = chart.getOption().dataZoom[0];
  const {start, end} = zoomOf(chart);
  const share = (pixel) => {
    const value = chart.convertFromPixel({xAxisIndex: 0}, pixel);
    return start + ((value - startValue) / (endValue - startValue)) * (end - start);
  };
  setZoom(chart, share(left), share(right));
}

function answerKeys(picture) {
  picture.host.tabIndex = 0;
  picture.host.addEventListener("keydown", (event) => {
    if (!picture.chart || event.ctrlKey || event.metaKey || event.altKey) return;
    const {start, end} = zoomOf(picture.chart);
    const length = end - start;
    const moves = {
      "+": [start + length / 4, end - length / 4],
      "=": [start + length / 4, end - length / 4],
      "-": [start - length / 2, end + length / 2],
      "0": [0, 100],
      ArrowLeft: [start - length / 5, end - length / 5],
      ArrowRight: [start + length / 5, end + length / 5],
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    setZoom(picture.chart, ...moves[event.key]);
  });
}

const ZOOM_HINT = "Drag over a range to zoom; double-click to reset. Ctrl and the mouse wheel, or + - 0 and arrow keys, also zoom.";
