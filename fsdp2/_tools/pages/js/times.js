// Time lines: lanes of spans, stacked for several ranks or settings on one time axis.

const [LANE, NAME, BEGIN, END, NBYTES, CAUSE, NOTE] = [0, 1, 2, 3, 4, 5, 6];
const LANE_HEIGHT = 26, TITLE_HEIGHT = 22, ROW_HEIGHT = 16, BETWEEN = 10; // pixels, like the next line
const NARROW = 6, WORDS = 14, LETTER = 6.2, SMALL_LETTER = 5.8, NEAR = 3;
const LANE_COLOURS = {compute: "lane-compute", gathers: "lane-gathers", reductions: "lane-reductions", late: "cause-0"};
const CAUSES = 6; // the number of colours --cause-0, --cause-1, ... in page.css

function laneColour(name, index) {
  return Object.hasOwn(LANE_COLOURS, name) ? colour(LANE_COLOURS[name]) : seriesColour(3 + (index % 4));
}

// The cause of a wait without the unit: a model of a hundred units has a hundred causes of three kinds. If another
// rank was late, the part before the comma names it.
const kindOfCause = (span) => span[CAUSE].split(span[CAUSE].includes(", ") ? ", " : " ", 1)[0];
const isOfARank = (name) => name.startsWith("rank ");

// Kinds of causes, by decreasing time: the first ones get the most distinct colours.
function causesIn(lines) {
  const totals = new Map();
  for (const {spans} of lines) {
    for (const span of spans) {
      if (!span[CAUSE]) continue;
      totals.set(kindOfCause(span), (totals.get(kindOfCause(span)) || 0) + span[END] - span[BEGIN]);
    }
  }
  const found = [...totals.entries()].sort(([, a], [, b]) => b - a).map(([name, total]) => ({name, total}));
  let next = 1;
  // A late rank has a strong colour in a separate lane; waits for it have muted colours.
  return found.map((cause) => ({...cause, index: isOfARank(cause.name) ? CAUSES : found.some(({name}) => isOfARank(name)) ? next++ : next++ - 1}));
}

const causeColour = (index) => colour(index < CAUSES ? `cause-${index}` : "series-rest");

// Stripes in a cause's colour; each cause also has a distinct slope or width, for colour-blind readers and printers.
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

// The visible spans of a line, as rectangles. Spans too narrow for a border, stripes or text are merged into one shape
// per colour, and those that begin in the same pixel into one rectangle. This bounds the drawn elements by the width, so
// lines with thousands of spans stay responsive.
function spansDrawer(line, looks) {
  const height = LANE_HEIGHT - 6;
  return (params, api) => {
    const {x: least, width: space} = params.coordSys, most = least + space;
    const children = [], narrow = new Map(), filled = new Set();
    const [origin] = api.coord([0, 0]), scale = api.size([1, 0])[0]; // computed once: thousands of calls would be slow
    const tops = line.lanes.map((_, lane) => api.coord([0, lane])[1] - height / 2);
    for (const span of line.spans) {
      const begin = origin + span[BEGIN] * scale, end = origin + span[END] * scale;
      if (end < least || begin > most) continue;
      const x = Math.max(begin, least), width = Math.max(1, Math.min(end, most) - x), y = tops[span[LANE]];
      const look = looks(span);
      if (width >= NARROW) children.push(wideSpan({x, y, width, height}, look, span));
      else {
        const pixel = `${span[LANE]} ${look.plain} ${Math.floor(x)}`;
        if (width <= 1 && filled.has(pixel)) continue;
        filled.add(pixel);
        narrow.set(look.plain, `${narrow.get(look.plain) || ""}M${x.toFixed(1)} ${y}h${width.toFixed(1)}v${height}h-${width.toFixed(1)}z`);
      }
    }
    for (const [fill, pathData] of narrow) children.push({type: "path", shape: {pathData}, style: {fill}, silent: true});
    return {type: "group", children};
  };
}

// The part of `all_gather blocks.3` that fits: all of it, the unit (the lane implies the kind), or its last part.
function wordsFor(name, width) {
  const unit = name.slice(name.lastIndexOf(" ") + 1);
  const shorter = [name, unit, unit.slice(unit.lastIndexOf(".") + 1)];
  return shorter.find((words) => words.length * LETTER <= width) || "";
}

function wideSpan(shape, look, span) {
  const rect = {type: "rect", shape, silent: true, style: {fill: look.fill, stroke: look.stroke, lineWidth: 1}};
  if (shape.width > (span[CAUSE] ? 7 * WORDS : WORDS)) { // a short wait shows only its stripes
    rect.textConfig = {position: "inside"};
    rect.textContent = {style: {
      text: wordsFor(span[NAME] || span[CAUSE], shape.width - 6), fill: look.ink, width: shape.width - 4, overflow: "truncate", ellipsis: "…", fontSize: 11, fontFamily: FONT,
      ...(span[CAUSE] ? {backgroundColor: colour("panel"), padding: [1, 3]} : {}),
    }};
  }
  return rect;
}

function looksOf(line, causes) {
  const byCause = new Map(causes.map(({name, index}) => [name, {
    fill: {image: stripes(index), repeat: "repeat"}, plain: causeColour(index), stroke: causeColour(index), ink: colour("ink"),
  }]));
  const byLane = line.lanes.map((name, index) => {
    const fill = laneColour(name, index);
    return {fill, plain: fill, stroke: colour("paper"), ink: inkOn(fill)};
  });
  return (span) => (span[CAUSE] ? byCause.get(kindOfCause(span)) : byLane[span[LANE]]);
}

// A line's name, and the waiting times of its lanes by cause: on the right, or below the name if there is no space.
function titlesOf(line, top, width) {
  const waits = causesIn([line]).map(({name, total}) => `${secondsText(total)} for ${name}`);
  const text = waits.length ? `waits ${waits.join(", ")}` : "";
  const fits = text.length * SMALL_LETTER < width * 0.55;
  const rows = fits ? 0 : Math.ceil(text.length * SMALL_LETTER / (width - 14));
  const title = (more, textStyle) => ({padding: 0, ...more, textStyle});
  return {
    height: TITLE_HEIGHT + rows * ROW_HEIGHT,
    titles: [
      title({text: line.name, top, left: 0},
        {fontSize: 13, color: colour("ink"), width: width * (text && fits ? 0.4 : 0.95), overflow: "truncate", ellipsis: "…"}),
      title({text, ...(fits ? {top, right: 14} : {top: top + ROW_HEIGHT, left: 0})},
        {fontSize: 12, lineHeight: ROW_HEIGHT, fontWeight: "normal", color: colour("soft"), ...(fits ? {} : {width: width - 14, overflow: "break"})}),
    ],
  };
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
    const {titles, height: above} = titlesOf(line, top, width);
    option.title.push(...titles);
    option.grid.push({left, right, top: top + above, height});
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
      renderItem: spansDrawer(line, looksOf(line, causes)), encode: {x: [0, 1]}, data: [[begin, end]], silent: true,
    });
    top += above + height + BETWEEN;
  });
  return {
    ...option,
    height: top + 50,
    axisPointer: {link: [{xAxisIndex: "all"}]},
    dataZoom: zoomStyle(lines.map((_, at) => at), {left, right, bottom: 6}),
  };
}

// The span at a position: the shortest of several, or the nearest if the pointer just misses one.
function spanAt(chart, lines, x, y) {
  for (const [at, line] of lines.entries()) {
    if (!chart.containPixel({gridIndex: at}, [x, y])) continue;
    const [time, lane] = chart.convertFromPixel({gridIndex: at}, [x, y]);
    const near = chart.convertFromPixel({xAxisIndex: at}, x + NEAR) - time;
    const missed = (span) => Math.max(span[BEGIN] - time, time - span[END], 0);
    const found = line.spans.filter((span) => span[LANE] === Math.round(lane) && missed(span) <= near);
    if (!found.length) return null;
    const better = (a, b) => missed(b) - missed(a) || (b[END] - b[BEGIN]) - (a[END] - a[BEGIN]);
    return {line, span: found.reduce((a, b) => (better(a, b) < 0 ? b : a))};
  }
  return null;
}

function timesLegend(lines) {
  const lanes = [...new Set(lines.flatMap((line) => line.lanes))];
  const causes = causesIn(lines);
  return element("div", {class: "legend"},
    ...lanes.map((name, at) => element("span", {}, swatch(laneColour(name, at)), name)),
    ...causes.map(({name, index}) => {
      const mark = stripes(index);
      mark.className = "swatch";
      return element("span", {}, mark, `waits for ${name}`);
    }));
}

function showTimes(section, lines) {
  const host = element("div");
  const legend = element("div");
  section.querySelector(".hint").textContent = ZOOM_HINT;
  section.querySelector(".place").append(legend, host);
  let picture = null;
  picture = new Picture(host, `Time lines of ${lines.map((line) => line.name).join(", ")}`, (width) => {
    legend.replaceChildren(timesLegend(lines));
    return timesOption(lines, width, () => picture.chart);
  }, (chart) => {
    answerZoom(chart, host, (x, y) => lines.some((_, at) => chart.containPixel({gridIndex: at}, [x, y])));
    answerHover(chart, host, (x, y) => {
      const found = spanAt(chart, lines, x, y);
      return found && spanHover(found.line, found.span);
    });
  });
  answerKeys(picture);
}
