// The tree of units as a treemap of bytes.

const MOST_TILES = 400; // more would be unreadable: the tree opens at the greatest depth with at most this many

// A tree of dotted names. A node with both parameters and children gets a leaf for its own parameters.
function unitTree(units) {
  const root = {word: "", path: "", parts: new Map(), own: []};
  for (const unit of units) {
    let node = root;
    for (const word of unit.name ? unit.name.split(".") : []) {
      const path = node.path ? `${node.path}.${word}` : word;
      if (!node.parts.has(word)) node.parts.set(word, {word, path, parts: new Map(), own: []});
      node = node.parts.get(word);
    }
    node.own.push(unit);
  }
  return joined(root, true);
}

// A `model` whose only child is `layers` is merged into one level, `model.layers`.
function joined(node, isRoot = false) {
  let {word, path, parts, own} = node;
  while (!isRoot && own.length === 0 && parts.size === 1) {
    const [only] = parts.values();
    ({path, parts, own} = only);
    word = `${word}.${only.word}`;
  }
  return {word, path, own, parts: [...parts.values()].map((part) => joined(part))};
}

const likeness = (unit) => [unit.parameters, unit.numel, unit.dtypes, unit.whole, unit.shard].join();

// Units that look equal in every drawn value share a colour, so that a different unit stands out.
function kindsOfUnits(units) {
  const kinds = new Map();
  for (const unit of units) {
    const key = likeness(unit);
    if (!kinds.has(key)) kinds.set(key, {first: unit, times: 0});
    kinds.get(key).times += 1;
  }
  const order = [...kinds.entries()].sort(([, a], [, b]) => b.times * b.first.whole - a.times * a.first.whole);
  return new Map(order.map(([key, kind], index) => [key, {...kind, index}]));
}

// The share of padding in all ranks' shards, or in the unsharded parameters with their padding.
function paddingShare(unit, measure) {
  const all = measure === "shard" ? unit.shard * unit.ranks : unit.whole + unit.padding;
  return all > 0 ? Math.min(1, unit.padding / all) : 0;
}

// Consecutive equal parts, such as the layers of a model, are merged into one: `0 to 79, x 80`.
function runsOf(parts) {
  const runs = [];
  for (const part of parts) {
    const before = runs.at(-1);
    if (before && isAlone(part) && isAlone(before[0]) && likeness(part.own[0]) === likeness(before[0].own[0])) {
      before.push(part);
    } else runs.push([part]);
  }
  return runs;
}

const isAlone = (part) => part.parts.length === 0 && part.own.length === 1;

function runTile(run, measure, kinds) {
  const [first, last] = [run[0], run.at(-1)];
  const made = tile(`${first.word} to ${last.word}, × ${run.length}`, first.own[0], measure, kinds);
  const path = `${first.own[0].name} to ${last.word}`;
  return {...made, path, value: made.value * run.length, run: run.map((part) => part.own[0])};
}

const areaOf = (unit, measure) => (measure === "shard" ? unit.shard : unit.whole + unit.padding);

function tile(word, unit, measure, kinds) {
  const base = seriesColour(kinds.get(likeness(unit)).index);
  const share = paddingShare(unit, measure);
  const pad = colour("padding");
  const stops = [[0, base], [1 - share, base], [1 - share, pad], [1, pad]].map(([offset, color]) => ({offset, color}));
  return {
    name: word,
    value: areaOf(unit, measure),
    unit,
    itemStyle: {color: share > 0 ? {type: "linear", x: 0, y: 0, x2: 0, y2: 1, colorStops: stops} : base},
    label: {color: inkOn(base)},
  };
}

function tiles(node, measure, kinds) {
  const own = node.own.map((unit) => tile(node.parts.length ? "(own)" : node.word, unit, measure, kinds));
  if (!node.parts.length && own.length === 1) return own[0];
  // The library reverses the order of equal tiles, but blocks should start with 0.
  const parts = runsOf(node.parts).map((run) =>
    run.length > 1 ? runTile(run, measure, kinds) : tiles(run[0], measure, kinds));
  const children = [...own, ...parts].reverse();
  return {name: node.word, path: node.path, children, ...unlikeTiles(children)};
}

// A collapsed part has the colour of its largest content.
function unlikeTiles(children) {
  const most = children.reduce((a, b) => (sizeOf(b) > sizeOf(a) ? b : a));
  return {itemStyle: {color: most.itemStyle.color}, label: most.label};
}

const sizeOf = (node) => (node.children ? node.children.reduce((sum, child) => sum + sizeOf(child), 0) : node.value);
const leavesOf = (node) => (node.children ? node.children.flatMap(leavesOf) : [node]);

function openDepth(nodes) {
  let level = nodes;
  for (let depth = 1; ; depth += 1) {
    const next = level.flatMap((node) => node.children || [node]);
    if (next.length > MOST_TILES || !level.some((node) => node.children)) return depth;
    level = next;
  }
}

function unitHover(node) {
  const leaves = leavesOf(node).flatMap((leaf) => leaf.run || [leaf.unit]);
  const sum = (of) => leaves.reduce((total, unit) => total + of(unit), 0);
  const rows = [
    [null, "parameters", `${whole.format(sum((u) => u.parameters))}, ${countText(sum((u) => u.numel))} elements`],
    [null, "dtypes", [...new Set(leaves.flatMap((u) => u.dtypes))].join(", ")],
    [null, "unsharded", bytesText(sum((u) => u.whole))],
    [null, "shard", bytesText(sum((u) => u.shard))],
    [null, "padding, all ranks", bytesText(sum((u) => u.padding))],
    [null, "gathered", bytesText(sum((u) => u.gather))],
    [null, "reduced", bytesText(sum((u) => u.reduce))],
  ];
  const path = node.path || (node.unit ? node.unit.name || "(root)" : "all units");
  return hoverBox(leaves.length > 1 ? `${path}: ${whole.format(leaves.length)} units` : path, rows);
}

function unitsOption(units, measure, width) {
  const kinds = kindsOfUnits(units);
  const tree = tiles(unitTree(units), measure, kinds);
  const nodes = tree.children || [{...tree, name: "(root)"}];
  const label = ({name, value}) => `${name}\n${bytesText(value)}`;
  return {
    height: Math.max(280, Math.min(440, width * 0.42)),
    tooltip: {...hoverStyle(), formatter: ({data}) => (data && (data.unit || data.children) ? unitHover(data) : "")},
    series: [{
      type: "treemap", name: "all units", data: nodes, left: 0, right: 0, top: 0, bottom: 34, roam: false,
      animation: false, stateAnimation: {duration: 0}, // the page's animation setting does not apply to labels
      nodeClick: "zoomToNode", leafDepth: openDepth(nodes), visibleMin: 0, drillDownIcon: "",
      label: {formatter: label, fontSize: 12, lineHeight: 15, overflow: "truncate", padding: 3},
      upperLabel: {show: true, height: 22, color: colour("ink"), formatter: ({name, value}) => `${name}  ${bytesText(value)}`},
      itemStyle: {borderColor: colour("paper"), borderWidth: 1, gapWidth: 1},
      levels: [
        {itemStyle: {borderWidth: 0, gapWidth: 3}, upperLabel: {show: false}},
        {itemStyle: {borderWidth: 2, gapWidth: 1, borderColor: colour("faint")}},
        {itemStyle: {borderWidth: 1, gapWidth: 1, borderColor: colour("faint")}},
      ],
      breadcrumb: {
        left: 0, bottom: 4, height: 22, itemStyle: {color: colour("faint"), borderColor: colour("line"), textStyle: {color: colour("ink")}},
        emphasis: {itemStyle: {color: colour("filler")}},
      },
    }],
  };
}

function unitsLegend(units) {
  const kinds = [...kindsOfUnits(units).values()];
  const entry = ({first, times, index}) => element("li", {}, swatch(seriesColour(index)),
    `${first.name || "(root)"}${times > 1 ? ` and ${whole.format(times - 1)} like it` : ""}: ${bytesText(first.whole)} whole` +
    `${times > 1 ? " each" : ""}`);
  const shown = kinds.slice(0, SERIES);
  const rest = kinds.length - shown.length;
  return element("ul", {class: "legend"}, ...shown.map(entry),
    rest ? element("li", {}, swatch(colour("series-rest")), `${whole.format(rest)} other sizes`) : null,
    units.some((unit) => unit.padding) ? element("li", {}, swatch(colour("padding")), "padding") : null);
}

function showUnits(section, units) {
  let measure = "shard";
  const place = section.querySelector(".place");
  const host = element("div");
  const legend = element("div");
  const picture = new Picture(host, `Treemap of ${units.length} units, bytes as areas`, (width) => {
    legend.replaceChildren(unitsLegend(units));
    return unitsOption(units, measure, width);
  });
  const names = {shard: "shards of this rank", whole: "whole parameters"};
  const buttons = Object.entries(names).map(([key, name]) => element("button", {
    type: "button", "aria-pressed": String(key === measure), onclick: () => {
      measure = key;
      buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.textContent === names[key])));
      picture.draw();
    },
  }, name));
  place.append(element("div", {class: "switch", role: "group", "aria-label": "Meaning of areas"}, ...buttons), host, legend);
}
