// Time lines: lanes of spans, those of several ranks or settings below each other on one axis of time.

const [LANE, NAME, BEGIN, END, NBYTES, CAUSE, NOTE] = [0, 1, 2, 3, 4, 5, 6];
const LANE_HEIGHT = 26, TITLE_HEIGHT = 22, BETWEEN = 10;
const LANE_COLOURS = {compute: "lane-compute", gathers: "lane-gathers", reductions: "lane-reductions"};
const CAUSES = 6; // colours of --cause-0 and on, in page.css

function laneColour(name, index) {
  return Object.hasOwn(LANE_COLOURS, name) ? colour(LANE_COLOURS[name]) : seriesColour(3 + (index % 4));
}

// Causes, those with the most time first: they get the colours that differ most.
function causesIn(lines) {
  const totals = new Map();
  for (const {spans} of lines) {
    for (const span of spans) {
      if (span[CAUSE]) totals.set(span[CAUSE], (totals.get(span[CAUSE]) || 0) + span[END] - span[BEGIN]);
    }
  }
  return [...totals.entries()].sort(([, a], [, b]) => b - a).map(([name, total], index) => ({name, total, index}));
}

const causeColour = (index) => colour(index < CAUSES ? `cause-${index}` : "series-rest");

// Stripes in a cause's colour; each cause has a slope or a width of its own, for eyes and printers without colours.
function stripes(index) {
  const size = 8, made = element("canvas", {width: size, height: size});
  const pen = made.getContext("2d");
  pen.fillStyle = colour("panel");
  pen.fillRect(0, 0, size, size);
  pen.strokeStyle = causeColour(index);
  pen.lineWidth = 2.5;
  const lines = [
    [[-2, 10, 10, -2], [-6, 6, 6, -6], [2, 14, 14, 2]],
    [[-2, -2, 10, 10], [-6, 2, 6, 14], [2, -6, 14, 6]],
    [[4, 0, 4, 8]],
    [[0, 4, 8, 4]],
    [[4, 0, 4, 8], [0, 4, 8, 4]],
    [[-2, 10, 10, -2], [-2, -2, 10, 10]],
  ][index % 6];
  for (const [x1, y1, x2, y2] of lines) {
    pen.beginPath();
    pen.moveTo(x1, y1);
    pen.lineTo(x2, y2);
    pen.stroke();
  }
  return made;
}

function spanHover(line, span) {
  const rows = [
    [null, "lane", `${line.name}, ${line.lanes[span[LANE]]}`],
    [null, "begins", secondsText(span[BEGIN])],
    [null, "takes", secondsText(span[END] - span[BEGIN])],
  ];
  if (span[NBYTES]) {
    rows.push([null, "bytes", bytesText(span[NBYTES])]);
    if (span[END] > span[BEGIN]) rows.push([null, "rate", `${bytesText(span[NBYTES] / (span[END] - span[BEGIN]))}/s`]);
  }
  if (span[CAUSE]) rows.push([null, "waits for", span[CAUSE]]);
  return hoverBox(span[NAME] || span[CAUSE], rows, span[NOTE]);
}

// A span as a rectangle. What is narrower than a pixel is drawn once for all that share it, so that a long line is fluid.
function spanDrawer(line, looks) {
  let filled = new Map();
  return (params, api) => {
    if (params.dataIndexInside === 0) filled = new Map();
    const span = line.spans[params.dataIndex];
    const {x, width: space} = params.coordSys;
    const [begin, middle] = api.coord([span[BEGIN], span[LANE]]);
    const end = api.coord([span[END], span[LANE]])[0];
    const left = Math.max(begin, x), right = Math.min(Math.max(end, left + 1), x + space);
    if (right <= left) return null;
    const isThin = right - left < 1.5;
    const pixel = `${span[LANE]}:${Math.floor(left)}`;
    if (isThin && filled.has(pixel)) return null;
    if (isThin) filled.set(pixel, true);
    const height = LANE_HEIGHT - 6;
    const look = looks(span);
    const shape = {x: left, y: middle - height / 2, width: right - left, height};
    const rect = {type: "rect", shape, style: {fill: look.fill, stroke: look.stroke, lineWidth: isThin || !look.stroke ? 0 : 1}};
    if (right - left > 34) {
      rect.textContent = {style: {
        text: span[NAME] || span[CAUSE], fill: look.ink, width: right - left - 8, overflow: "truncate", ellipsis: "…", fontSize: 11,
        backgroundColor: span[CAUSE] ? colour("panel") : undefined, padding: span[CAUSE] ? [1, 3] : 0, borderRadius: 2,
      }};
      rect.textConfig = {position: "inside"};
    }
    return rect;
  };
}

function looksOf(line, causes) {
  const byCause = new Map(causes.map(({name, index}) => [name, {
    fill: {image: stripes(index), repeat: "repeat"}, stroke: causeColour(index), ink: colour("ink"),
  }]));
  const byLane = line.lanes.map((name, index) => {
    const fill = laneColour(name, index);
    return {fill, stroke: colour("paper"), ink: inkOn(fill)};
  });
  return (span) => (span[CAUSE] ? byCause.get(span[CAUSE]) : byLane[span[LANE]]);
}

function timesOption(lines, width, chartOf) {
  const left = width < 640 ? 78 : 96, right = 14;
  const end = lines.flatMap(({spans}) => spans).reduce((most, span) => Math.max(most, span[END]), 0) || 1;
  const begin = lines.flatMap(({spans}) => spans).reduce((least, span) => Math.min(least, span[BEGIN]), 0);
  const causes = causesIn(lines);
  let top = 4;
  const option = {title: [], grid: [], xAxis: [], yAxis: [], series: []};
  const ticks = (value) => {
    const zoom = chartOf() && chartOf().getOption().dataZoom;
    const range = zoom && zoom.length ? zoom[0].endValue - zoom[0].startValue : end - begin;
    return timeTicks(range || end - begin)(value);
  };
  lines.forEach((line, at) => {
    const height = line.lanes.length * LANE_HEIGHT, isLast = at === lines.length - 1;
    option.title.push({text: line.name, left: 0, top, padding: 0, textStyle: {fontSize: 13, color: colour("ink"), width: width - 20, overflow: "truncate"}});
    option.grid.push({left, right, top: top + TITLE_HEIGHT, height});
    option.xAxis.push({
      type: "value", gridIndex: at, min: begin, max: end, ...axisStyle(), axisTick: {show: false},
      axisLabel: {show: isLast, color: colour("soft"), formatter: ticks, hideOverlap: true, showMaxLabel: false},
      axisPointer: {show: true, snap: false, triggerTooltip: false, lineStyle: {color: colour("soft"), type: "dashed"},
        label: {show: isLast, formatter: ({value}) => secondsText(value), backgroundColor: colour("ink"), color: colour("paper")}},
    });
    option.yAxis.push({
      type: "category", gridIndex: at, inverse: true, data: line.lanes, ...axisStyle(), axisTick: {show: false},
      splitLine: {show: true, lineStyle: {color: colour("faint")}}, axisLabel: {color: colour("soft"), width: left - 12, overflow: "truncate"},
      axisPointer: {show: false},
    });
    option.series.push({
      type: "custom", name: line.name, xAxisIndex: at, yAxisIndex: at, progressive: 0, clip: true,
      renderItem: spanDrawer(line, looksOf(line, causes)), dimensions: ["lane", "begin", "end"],
      encode: {x: [1, 2], y: 0}, data: line.spans.map((span) => [span[LANE], span[BEGIN], span[END]]),
    });
    top += TITLE_HEIGHT + height + BETWEEN;
  });
  return {
    ...option,
    height: top + 50,
    axisPointer: {link: [{xAxisIndex: "all"}]},
    tooltip: {...hoverStyle(), trigger: "item", formatter: ({seriesIndex, dataIndex}) => spanHover(lines[seriesIndex], lines[seriesIndex].spans[dataIndex])},
    dataZoom: zoomStyle(lines.map((_, at) => at), {left, right, bottom: 6}),
  };
}

function timesLegend(lines) {
  const lanes = [...new Set(lines.flatMap((line) => line.lanes))];
  const causes = causesIn(lines);
  return element("div", {class: "legend"},
    ...lanes.map((name, at) => element("span", {}, swatch(laneColour(name, at)), name)),
    ...causes.map(({name, total, index}) => {
      const mark = stripes(index);
      mark.className = "swatch";
      return element("span", {}, mark, `waits for ${name}: ${secondsText(total)}`);
    }));
}

function showTimes(section, lines) {
  const host = element("div");
  const legend = element("div");
  section.querySelector(".hint").textContent = ZOOM_HINT;
  section.querySelector(".place").append(legend, host);
  let picture = null;
  const inLanes = (chart) => (x, y) => lines.some((_, at) => chart.containPixel({gridIndex: at}, [x, y]));
  picture = new Picture(host, `Time lines of ${lines.map((line) => line.name).join(", ")}`, (width) => {
    legend.replaceChildren(timesLegend(lines));
    return timesOption(lines, width, () => picture.chart);
  }, (chart) => answerZoom(chart, host, inLanes(chart)));
  answerKeys(picture);
}
