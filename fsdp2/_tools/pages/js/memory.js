// Memory over a step: stacked areas, a tab for each setting or rank.

const KIND_ORDER = ["parameters", "optimizer state", "gradients", "gathered parameters", "communication", "activations", "logits"];
const HIGH_LIMIT = 2.5; // limits above this multiple of the peak do not extend the scale

function kindColour(name, index) {
  const known = KIND_ORDER.indexOf(name);
  return seriesColour(known >= 0 ? known : KIND_ORDER.length + index);
}

const totalAt = (moment) => moment[2].reduce((sum, nbytes) => sum + nbytes, 0);
const peakOf = (tab) => tab.moments.reduce((a, b) => (a === null || totalAt(b) > totalAt(a) ? b : a), null);

function highest(tabs) {
  const all = tabs.flatMap((tab) => [...tab.moments.map(totalAt), ...tab.measured.map((m) => m[2])]);
  return all.reduce((a, b) => Math.max(a, b), 0);
}

// One scale for all tabs, so that they can be compared.
function scaleOf(tabs) {
  const most = highest(tabs);
  const limits = tabs.map((tab) => tab.limit || 0).filter((limit) => limit <= most * HIGH_LIMIT);
  return byteSteps(Math.max(most, ...limits) * 1.04);
}

// A peak of unknown duration would have no width, so it begins at the midpoint after the previous moment.
function spread(moments, sizeOf) {
  moments.forEach((moment, at) => {
    const [before, after] = [moments[at - 1], moments[at + 1]];
    const isPeak = before && after && after[0] === moment[0] && sizeOf(moment) > Math.max(sizeOf(before), sizeOf(after));
    moment.drawn = isPeak ? (before.drawn + moment[0]) / 2 : moment[0];
  });
}

// The last moment at or before a time: memory is constant between moments.
function lastUpTo(moments, time) {
  let low = 0, high = moments.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (moments[middle].drawn <= time) low = middle + 1; else high = middle;
  }
  return low ? moments[low - 1] : null;
}

const when = (tab, time) => (tab.isTimed ? secondsText(time) : `event ${whole.format(time)}`);

function memoryHover(tab, moment) {
  const rows = tab.kinds.map((kind, at) => [swatch(kindColour(kind, at)), kind, bytesText(moment[2][at])]).reverse();
  rows.push([null, "all", bytesText(totalAt(moment))]);
  const other = lastUpTo(tab.measured, moment.drawn);
  if (other) rows.push([swatch(colour("measured")), tab.measuredName, bytesText(other[2])]);
  if (tab.limit != null) rows.push([swatch(colour("limit")), "limit", bytesText(tab.limit)]);
  return hoverBox(`${when(tab, moment[0])}: ${moment[1]}`, rows);
}

function memorySeries(tab, scale) {
  const areas = tab.kinds.map((kind, at) => ({
    type: "line", name: kind, stack: "all", step: "end", symbol: "none", color: kindColour(kind, at),
    lineStyle: {width: 0}, areaStyle: {opacity: 0.85}, emphasis: {disabled: true},
    data: tab.moments.map((moment) => [moment.drawn, moment[2][at]]),
  }));
  if (tab.measured.length) {
    areas.push({
      type: "line", name: tab.measuredName, step: "end", symbol: "none", color: colour("measured"),
      lineStyle: {width: 2}, emphasis: {disabled: true}, z: 4, data: tab.measured.map((moment) => [moment.drawn, moment[2]]),
    });
  }
  const marks = tab.limit != null && tab.limit <= scale.max ? limitLine(tab) : {};
  const peak = peakOf(tab);
  const point = peak && {
    symbol: "circle", symbolSize: 7, itemStyle: {color: colour("ink")},
    label: {show: true, position: "top", align: sideOf(tab, peak), formatter: `peak ${bytesText(totalAt(peak))}`, ...plate("ink")},
    data: [{coord: [peak.drawn, totalAt(peak)]}],
  };
  areas.push({type: "line", name: "marks", data: [], symbol: "none", markLine: marks, markPoint: point || {}, silent: true, z: 5});
  return areas;
}

// The anchor of a label: near an edge it extends inwards.
function sideOf(tab, moment) {
  const [first] = tab.moments[0], [last] = tab.moments[tab.moments.length - 1];
  const share = (moment[0] - first) / (last - first || 1);
  return share < 0.1 ? "left" : share > 0.9 ? "right" : "center";
}

// Labels on a picture must be readable on any background.
const plate = (ink) => ({
  color: colour(ink), fontWeight: 600, backgroundColor: colour("panel"), padding: [2, 5], borderRadius: 3, distance: 6,
});

function limitLine(tab) {
  return {
    silent: true, symbol: "none", lineStyle: {color: colour("limit"), width: 2, type: "dashed"},
    label: {position: "insideStartTop", formatter: `limit ${bytesText(tab.limit)}`, ...plate("limit")},
    data: [{yAxis: tab.limit}],
  };
}

function memoryOption(tab, scale, width) {
  const last = tab.moments.length ? tab.moments[tab.moments.length - 1][0] : 1;
  const end = Math.max(last, ...tab.measured.slice(-1).map((moment) => moment[0]));
  const begin = Math.min(0, ...tab.moments.slice(0, 1).map((moment) => moment[0]));
  return {
    height: isOnPaper() || width < 640 ? 300 : 360,
    grid: {left: 70, right: 16, top: 22, bottom: 60},
    legend: {show: false},
    xAxis: {
      type: "value", min: begin, max: end > begin ? end : begin + 1, ...axisStyle(), splitLine: {show: false},
      axisPointer: {show: true, snap: false, triggerTooltip: false, label: {show: false}, lineStyle: {color: colour("soft"), type: "dashed"}},
      axisLabel: {
        color: colour("soft"), hideOverlap: true, showMaxLabel: false,
        formatter: tab.isTimed ? timeTicks(end - begin || 1) : (value) => (Number.isInteger(value) ? `event ${whole.format(value)}` : ""),
      },
    },
    yAxis: {type: "value", min: 0, ...scale, ...axisStyle(), axisLabel: {color: colour("soft"), formatter: bytesText}},
    dataZoom: zoomStyle([0], {left: 70, right: 16, bottom: 8}),
    series: memorySeries(tab, scale),
  };
}

// A click on a kind hides it, so that the areas above it start at the baseline.
function memoryLegend(tab, picture) {
  const kinds = tab.kinds.map((kind, at) => [kind, kindColour(kind, at)]).reverse();
  if (tab.measured.length) kinds.push([tab.measuredName, colour("measured")]);
  return element("div", {class: "legend"}, ...kinds.map(([name, ink]) => element("button", {
    type: "button", "aria-pressed": "true", onclick: (event) => {
      const button = event.currentTarget;
      button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
      picture().chart.dispatchAction({type: "legendToggleSelect", name});
    },
  }, swatch(ink), name)));
}

function memoryCaption(tab, scale) {
  const peak = peakOf(tab);
  if (!peak) return "No data.";
  const words = [`Peak ${bytesText(totalAt(peak))} at ${when(tab, peak[0])} (${peak[1]}).`];
  if (tab.limit != null) {
    const left = tab.limit - totalAt(peak);
    words.push(`${bytesText(Math.abs(left))} ${left >= 0 ? "below" : "above"} the limit of ${bytesText(tab.limit)}.`);
    if (tab.limit > scale.max) words.push("The limit is outside the picture.");
  }
  if (tab.measured.length) {
    const most = Math.max(...tab.measured.map((moment) => moment[2]));
    words.push(`Peak ${tab.measuredName}: ${bytesText(most)}.`);
  }
  return words.join(" ");
}

const isOver = (tab) => tab.limit != null && tab.moments.some((moment) => totalAt(moment) > tab.limit);

function memoryPanel(tab, scale, number, isOnly) {
  const host = element("div");
  let picture = null;
  const legend = element("div");
  const panel = element("div", {class: "panel", id: `memory-panel-${number}`},
    element("h3", {class: isOnly ? "" : "paper-only"}, tab.name),
    element("p", {class: isOver(tab) ? "caption over" : "caption"}, memoryCaption(tab, scale)), legend, host);
  picture = new Picture(host, `Memory over a step, ${tab.name}. ${memoryCaption(tab, scale)}`, (width) => {
    legend.replaceChildren(memoryLegend(tab, () => picture));
    return memoryOption(tab, scale, width);
  }, (chart) => {
    const isInside = (x, y) => chart.containPixel({gridIndex: 0}, [x, y]);
    answerZoom(chart, host, isInside);
    answerHover(chart, host, (x, y) => {
      const moment = isInside(x, y) ? lastUpTo(tab.moments, chart.convertFromPixel({xAxisIndex: 0}, x)) : null;
      return moment && memoryHover(tab, moment);
    });
  });
  answerKeys(picture);
  return {panel, picture};
}

function showMemory(section, tabs) {
  const scale = scaleOf(tabs);
  for (const tab of tabs) {
    spread(tab.moments, totalAt);
    spread(tab.measured, (moment) => moment[2]);
  }
  section.querySelector(".hint").textContent = ZOOM_HINT;
  const made = tabs.map((tab, at) => memoryPanel(tab, scale, at, tabs.length === 1));
  const place = section.querySelector(".place");
  if (tabs.length > 1) place.append(tabList(tabs.map((tab) => tab.name), made));
  place.append(...made.map(({panel}) => panel));
}

// Tabs as specified by WAI-ARIA: one of them is in the tab order, and arrow keys move between them.
function tabList(names, made) {
  const tabs = names.map((name, at) => element("button", {
    type: "button", role: "tab", id: `memory-tab-${at}`, "aria-controls": `memory-panel-${at}`, onclick: () => choose(at),
  }, name));
  const choose = (chosen) => {
    tabs.forEach((tab, at) => {
      tab.setAttribute("aria-selected", String(at === chosen));
      tab.tabIndex = at === chosen ? 0 : -1;
      made[at].panel.hidden = at !== chosen;
    });
    if (made[chosen].panel.isConnected) made[chosen].picture.draw();
  };
  made.forEach(({panel}, at) => {
    panel.setAttribute("role", "tabpanel");
    panel.setAttribute("aria-labelledby", `memory-tab-${at}`);
  });
  const list = element("div", {role: "tablist", class: "tabs", "aria-label": "Settings or ranks"}, ...tabs);
  list.addEventListener("keydown", (event) => {
    const at = tabs.indexOf(document.activeElement);
    const to = {ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1}[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    const next = (to + tabs.length) % tabs.length;
    choose(next);
    tabs[next].focus();
  });
  choose(0);
  return list;
}
