/* What ran when: a canvas with a row for each lane. */

const ROW = 24, AXIS = 24, GAP = 4;
const timeline = { data: null, from: 0, to: 1, first: 0, last: 1, lanes: [], rows: [], kinds: [], off: new Set(), drag: null, at: null };

/* What a reader tells apart: six groups of kinds, each with a colour and a pattern. All other kinds are grey; a fold lists every kind. */
const GROUPS = [
  { name: "train", kinds: /^train/, colour: "--training", lines: [], meaning: "the trainer trains on batches" },
  { name: "wait", kinds: /^(wait|held)/, colour: "--generation", lines: [[0, 8, 8, 0]], meaning: "the trainer or new weights wait for something" },
  { name: "generate", kinds: /^(decode|generate|score)$/, colour: "--run-2", lines: [[0, 4, 2, 4]], meaning: "engines sample, or another server on their devices answers" },
  { name: "weights", kinds: /^(export|prepare|chunks|commit|pause|to |sleep|wake)/, colour: "--commit", lines: [[4, 0, 4, 8]], meaning: "new weights go to the engines; colocated: the devices change hands" },
  { name: "checkpoint", kinds: /^(checkpoint|copy|save)$/, colour: "--checkpoint", lines: [[0, 0, 8, 8], [0, 8, 8, 0]], meaning: "a checkpoint or the final weights are written" },
  { name: "evaluate", kinds: /^evaluation$/, colour: "--run-3", lines: [[0, 4, 8, 4]], meaning: "a version is evaluated" },
];
const OTHER = { name: "other", colour: "--other", lines: [], meaning: "everything else" };
const groupOf = kind => GROUPS.find(group => group.kinds.test(kind.name)) ?? OTHER;
const isOff = kind => timeline.off.has(kind.name) || timeline.off.has(`all ${groupOf(kind).name}`);

/* One period of a group's pattern, 8 pixels wide and high. */
function tileOf(group) {
  const tile = h("canvas", { width: "8", height: "8" }), pen = tile.getContext("2d"), colour = css(group.colour);
  pen.fillStyle = colour;
  pen.fillRect(0, 0, 8, 8);
  pen.strokeStyle = faded(inkOn(colour), 0.5);
  pen.lineWidth = 1.5;
  // Also a period to both sides, so that slanted lines have no gap at the edges.
  for (const [x, y, toX, toY] of group.lines) for (const by of [-8, 0, 8]) {
    const slant = x !== toX && y !== toY ? by : 0;
    pen.beginPath();
    pen.moveTo(x + slant, y);
    pen.lineTo(toX + slant, toY);
    pen.stroke();
  }
  return tile;
}

function showTimeline(data) {
  const box = bodyOf("timeline");
  if (!data.spans.length) {
    timeline.data = null;
    box.replaceChildren(nothing("Nothing is known of when what ran. A run writes it as it goes: the first step brings the first spans."));
    return;
  }
  const wasWhole = !timeline.data || (timeline.from <= timeline.first && timeline.to >= timeline.last);
  timeline.data = data;
  indexSpans(data);
  if (wasWhole) [timeline.from, timeline.to] = [timeline.first, timeline.last];
  if (!box.querySelector("canvas")) buildTimeline(box);
  const seen = data.kinds.filter((_, at) => data.spans.some(span => span[1] === at)), groups = [...GROUPS, OTHER];
  const legend = box.querySelector(".legend"), fold = box.querySelector(".kinds");
  keepingFocus(legend, () => legend.replaceChildren(...GROUPS.filter(group => seen.some(kind => groupOf(kind) === group)).map(group => keyButton(group.name, `all ${group.name}`, group))));
  fold.querySelector("summary").textContent = `Each of the ${seen.length} kinds`;
  const sorted = groups.flatMap(group => seen.filter(kind => groupOf(kind) === group));
  keepingFocus(fold, () => fold.querySelector(".legend").replaceChildren(...sorted.map(kind => keyButton(kind.name, kind.name, { ...groupOf(kind), meaning: kind.meaning }))));
  drawTimeline();
}

/* The timeline with a lane of the engines' work: their busy slots in each step, which end with its training. */
function withEngines(data, run) {
  const busy = run.curves["engine/busy_slots"] ?? [], most = Math.max(...busy), train = data.kinds.findIndex(kind => kind.name === "train");
  const pause = data.kinds.findIndex(kind => kind.name === "pause"), isPaused = lane => data.spans.every(span => span[0] !== lane || span[1] === pause);
  const lanes = data.lanes.map((name, lane) => name.startsWith("engine") && isPaused(lane) ? `${name} pauses` : name);
  if (!(most > 0) || train < 0) return { ...data, lanes };
  const ends = new Map(data.spans.filter(span => span[1] === train).map(span => [span[4], span[3]]));
  const work = run.step.flatMap((step, at) => {
    const from = ends.get(`step ${step - 1}`), to = ends.get(`step ${step}`);
    return busy[at] > 0 && to > from ? [[lanes.length, data.kinds.length, from, to, `step ${step}: ${plainNumber(+busy[at].toPrecision(3))} busy slots`, busy[at] / most]] : [];
  });
  return { lanes: [...lanes, "engines at work"], kinds: [...data.kinds, { name: "decode", meaning: "engines decode: the stronger the color, the more busy slots, mean over the step" }], spans: [...data.spans, ...work] };
}

/* Spans of each lane by their start, and the latest end up to each: what is in sight is found by bisection. */
function indexSpans(data) {
  const lanes = data.lanes.map(() => []);
  let last = 0, first = Infinity;
  for (const span of data.spans) {
    lanes[span[0]]?.push(span);
    first = Math.min(first, span[2]);
    last = Math.max(last, span[3]);
  }
  timeline.lanes = lanes.map(spans => {
    spans.sort((a, b) => a[2] - b[2] || b[3] - a[3]);
    let end = -Infinity;
    return { spans, ends: spans.map(span => (end = Math.max(end, span[3]))) };
  });
  timeline.first = Math.min(first, 0);
  timeline.last = Math.max(last, timeline.first + 0.001);
  let top = GAP;
  timeline.rows = data.lanes.map((name, lane) => {
    const placed = { name, lane, height: ROW, top };
    top += ROW + GAP;
    return placed;
  });
  timeline.height = top + AXIS;
  timeline.kinds = data.kinds;
}

/* A button that hides what `key` names, and shows it again. */
function keyButton(text, key, group) {
  return h("button", { type: "button", class: "key", "data-key": key, "aria-pressed": String(!timeline.off.has(key)), title: group.meaning,
    onclick: () => { if (!timeline.off.delete(key)) timeline.off.add(key); showTimeline(timeline.data); } },
  h("span", { class: "swatch", style: { background: `url(${tileOf(group).toDataURL()}) center` } }), text);
}

function buildTimeline(box) {
  const button = (text, label, act) => h("button", { type: "button", class: "small", "aria-label": label, title: label, onclick: act }, text);
  const canvas = h("canvas", { tabindex: "0", role: "application", "aria-roledescription": "time line", "aria-describedby": "timeline-keys",
    "aria-label": "Time line of the run", onkeydown: timelineKey, onpointerdown: timelineDown, onpointermove: timelineMove,
    onpointerup: timelineUp, onpointercancel: () => { timeline.drag = null; drawTimeline(); }, onpointerleave: () => tellSpan(null),
    ondblclick: wholeTimeline });
  canvas.addEventListener("wheel", timelineWheel, { passive: false });
  box.replaceChildren(
    h("div", { class: "tools" },
      button("−", "Zoom out", () => zoomTimeline(2)), button("+", "Zoom in", () => zoomTimeline(0.5)),
      button("◀", "Earlier", () => panTimeline(-0.4)), button("▶", "Later", () => panTimeline(0.4)),
      button("Whole run", "Show the whole run", wholeTimeline),
      h("span", { class: "range", id: "timeline-range" })),
    h("div", { class: "canvas" }, canvas, h("div", { class: "tip", hidden: true })),
    h("div", { class: "legend", role: "group", "aria-label": "Spans that are drawn" }),
    h("details", { class: "kinds" }, h("summary", {}), h("div", { class: "legend", role: "group", "aria-label": "Kinds of spans that are drawn" })),
    h("p", { class: "hint", id: "timeline-keys" }, "Drag over a stretch to zoom into it; a wheel zooms with Ctrl, or after a click. Shift and drag, or the arrow keys, move. Keys + − 0 zoom; , and . step through the spans."),
    h("p", { class: "sr", role: "status", id: "timeline-told" }));
}

function timelinePlace() {
  const canvas = bodyOf("timeline").querySelector("canvas"), width = canvas.clientWidth;
  const left = Math.min(150, Math.max(92, width * 0.13));
  return { canvas, width, left, toX: time => left + (time - timeline.from) / (timeline.to - timeline.from) * (width - left - 8),
    toTime: x => timeline.from + (x - left) / (width - left - 8) * (timeline.to - timeline.from) };
}

function drawTimeline() {
  if (!timeline.data) return;
  const { canvas, left, width, toX } = timelinePlace(), scale = window.devicePixelRatio || 1, pen = canvas.getContext("2d");
  canvas.style.height = `${timeline.height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(timeline.height * scale);
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  drawTicks(pen, left, width, toX);
  for (const row of timeline.rows) {
    pen.fillStyle = css("--ink");
    pen.fillText(clipped(pen, row.name, left - 14), 2, row.top + row.height / 2);
    pen.save();
    pen.beginPath();
    pen.rect(left, row.top - 1, width - left, row.height + 2);
    pen.clip();
    drawLane(pen, row, toX);
    pen.restore();
  }
  if (timeline.drag && !timeline.drag.isPan) {
    const [a, b] = [timeline.drag.x, timeline.drag.to].sort((one, other) => one - other);
    pen.fillStyle = faded(css("--accent"), 0.2);
    pen.fillRect(a, 0, b - a, timeline.height - AXIS);
  }
  byId("timeline-range").textContent = `${duration(Math.max(0, timeline.from))} to ${duration(timeline.to)}: ${duration(timeline.to - timeline.from)}`;
}

function clipped(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let keep = Math.max(1, Math.floor(text.length * room / pen.measureText(text).width) - 1);
  while (keep > 1 && pen.measureText(`${text.slice(0, keep)}…`).width > room) keep--;
  return `${text.slice(0, keep)}…`;
}

function drawTicks(pen, left, width, toX) {
  const span = timeline.to - timeline.from, wanted = Math.max(2, Math.floor((width - left) / 110));
  const step = INCREMENTS.find(each => span / each <= wanted) || span / wanted, ticks = [];
  for (let tick = Math.ceil(timeline.from / step) * step; tick <= timeline.to; tick += step) ticks.push(tick);
  const texts = secondsText(ticks), bottom = timeline.height - AXIS;
  pen.strokeStyle = css("--grid");
  pen.textAlign = "center";
  ticks.forEach((tick, at) => {
    const x = Math.round(toX(tick)) + 0.5;
    pen.beginPath();
    pen.moveTo(x, 0);
    pen.lineTo(x, bottom + 4);
    pen.stroke();
    pen.fillStyle = css("--muted");
    pen.fillText(texts[at], Math.min(x, width - 22), bottom + 14);
  });
  pen.textAlign = "left";
}

function visibleSpans(lane, from, to) {
  const { spans, ends } = timeline.lanes[lane];
  let low = 0, high = ends.length;
  while (low < high) { const middle = (low + high) >> 1; if (ends[middle] < from) low = middle + 1; else high = middle; }
  const found = [];
  for (let at = low; at < spans.length && spans[at][2] <= to; at++) {
    if (spans[at][3] >= from && !isOff(timeline.kinds[spans[at][1]])) found.push(spans[at]);
  }
  return found;
}

function drawLane(pen, row, toX) {
  const groups = timeline.kinds.map(groupOf), colours = groups.map(group => css(group.colour));
  const patterns = new Map([...GROUPS, OTHER].map(group => [group, pen.createPattern(tileOf(group), "repeat")]));
  pen.fillStyle = css("--sunk");
  pen.fillRect(toX(timeline.from), row.top, toX(timeline.to) - toX(timeline.from), row.height);
  let lastX = -Infinity, lastGroup = null;
  for (const span of visibleSpans(row.lane, timeline.from, timeline.to)) {
    const x = Math.round(Math.max(toX(span[2]), -10)), end = Math.round(Math.min(toX(span[3]), 1e5)), wide = Math.max(end - x, 1);
    const group = groups[span[1]];
    if (wide < 2 && x - lastX < 1 && group === lastGroup) continue;  // that pixel has this colour
    [lastX, lastGroup] = [x, group];
    pen.fillStyle = wide < 4 ? colours[span[1]] : patterns.get(group);  // a pattern needs its width
    pen.globalAlpha = Math.max(0.15, span[5] ?? 1);
    const isThin = group === OTHER;  // they overlap spans of other groups, whose words stay readable
    pen.fillRect(x, isThin ? row.top + row.height - 7 : row.top + 1, wide > 4 ? wide - 1 : wide, isThin ? 6 : row.height - 2);
    pen.globalAlpha = 1;
    if (span === timeline.at) {
      pen.strokeStyle = css("--ink");
      pen.lineWidth = 2;
      pen.strokeRect(x, row.top + 1, wide, row.height - 2);
      pen.lineWidth = 1;
    }
    const from = Math.max(x, toX(timeline.from)) + 5, name = timeline.kinds[span[1]]?.name ?? "";
    const words = end - from > 40 && !(isThin && row.name === "trainer") && [`${name} ${span[4]}`, span[4], name].find(each => each && pen.measureText(each).width < end - from - 6);
    if (words) {
      if (group.lines.length) {
        pen.fillStyle = css("--card");
        pen.fillRect(from - 3, row.top + 4, pen.measureText(words).width + 6, row.height - 8);
      }
      pen.fillStyle = group.lines.length || isThin ? css("--ink") : inkOn(colours[span[1]]);
      pen.fillText(words, from, row.top + row.height / 2);
    }
  }
}

function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#111418" : "#ffffff";
}

function setTimelineRange(from, to) {
  const least = 0.002, whole = timeline.last - timeline.first, wide = Math.min(whole, Math.max(least, to - from));
  timeline.from = Math.max(timeline.first, Math.min(from, timeline.last - wide));
  timeline.to = timeline.from + wide;
  drawTimeline();
}

function zoomTimeline(factor, around = (timeline.from + timeline.to) / 2) {
  setTimelineRange(around - (around - timeline.from) * factor, around + (timeline.to - around) * factor);
}

function panTimeline(share) {
  const by = share * (timeline.to - timeline.from);
  setTimelineRange(timeline.from + by, timeline.to + by);
}

const wholeTimeline = () => setTimelineRange(timeline.first, timeline.last);

function timelineOfStep(step) {
  const spans = (timeline.data?.spans || []).filter(span => span[4] === `step ${step}` || span[4].startsWith(`step ${step}:`));
  const from = Math.min(...spans.map(span => span[2])), to = Math.max(...spans.map(span => span[3]));
  if (spans.length) setTimelineRange(from - (to - from), to + (to - from));
  byId("timeline").scrollIntoView();
}

function timelineWheel(event) {
  const { canvas, toTime } = timelinePlace();
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) panTimeline(event.deltaX / 800);
  else if (event.ctrlKey || event.metaKey || document.activeElement === canvas) zoomTimeline(Math.exp(event.deltaY / 400), toTime(event.offsetX));
  else return;  // the page scrolls
  event.preventDefault();
}

function timelineKey(event) {
  const act = { "+": () => zoomTimeline(0.5), "=": () => zoomTimeline(0.5), "-": () => zoomTimeline(2), 0: wholeTimeline, Home: wholeTimeline,
    ArrowLeft: () => panTimeline(-0.2), ArrowRight: () => panTimeline(0.2), ",": () => nextSpan(-1), ".": () => nextSpan(1), Escape: () => tellSpan(null) }[event.key];
  if (!act || event.ctrlKey || event.metaKey) return;
  act();
  event.preventDefault();
}

/* The span after (or before) the one that is told, in order of time over all lanes in sight. */
function nextSpan(by) {
  const seen = timeline.rows.flatMap(row => visibleSpans(row.lane, timeline.from, timeline.to)).sort((a, b) => a[2] - b[2] || a[0] - b[0]);
  if (!seen.length) return;
  const at = seen.indexOf(timeline.at), span = seen[Math.min(seen.length - 1, Math.max(0, at < 0 ? 0 : at + by))];
  const row = timeline.rows.find(each => each.lane === span[0]), { toX } = timelinePlace();
  tellSpan(span, Math.max(toX(span[2]), 0), row.top + row.height);
}

function timelineDown(event) {
  if (event.button) return;
  const isPan = event.shiftKey || event.pointerType === "touch";
  event.currentTarget.setPointerCapture(event.pointerId);
  timeline.drag = { x: event.offsetX, to: event.offsetX, isPan, from: timeline.from, until: timeline.to };
}

function timelineMove(event) {
  const { width, left, toTime, toX } = timelinePlace(), { drag } = timeline;
  if (drag) {
    drag.to = event.offsetX;
    if (drag.isPan) {
      const by = (drag.x - drag.to) / (width - left) * (drag.until - drag.from);
      setTimelineRange(drag.from + by, drag.until + by);
    } else drawTimeline();
    return;
  }
  const row = timeline.rows.find(each => event.offsetY >= each.top && event.offsetY <= each.top + each.height), time = toTime(event.offsetX);
  if (!row || event.offsetX < left) return tellSpan(null);
  const near = (timeline.to - timeline.from) / width * 4;
  const hits = visibleSpans(row.lane, time - near, time + near), inside = hits.filter(span => span[2] <= time && span[3] >= time);
  tellSpan((inside.length ? inside : hits).pop() || null, event.offsetX, row.top + row.height, toX);
}

function timelineUp(event) {
  const { drag } = timeline, { toTime } = timelinePlace();
  timeline.drag = null;
  if (drag && !drag.isPan && Math.abs(drag.to - drag.x) > 4) setTimelineRange(...[toTime(drag.x), toTime(drag.to)].sort((a, b) => a - b));
  else drawTimeline();
  event.currentTarget.focus({ preventScroll: true });
}

function tellSpan(span, x, y) {
  const kind = span && timeline.kinds[span[1]], length = span && span[3] - span[2];
  const text = span && [`${kind?.name ?? "?"}${span[4] ? `: ${span[4]}` : ""}`, length ? `${duration(length)}, from ${duration(span[2])}` : `at ${duration(span[2])}`, kind?.meaning ?? ""];
  if (timeline.at !== span) { timeline.at = span; drawTimeline(); }
  tellText(text, x, y);
}

function tellText(lines, x, y) {
  const box = bodyOf("timeline").querySelector(".canvas"), tip = box?.querySelector(".tip");
  if (!tip) return;
  tip.hidden = !lines;
  byId("timeline-told").textContent = lines ? written(lines.join(". ")) : "";
  if (!lines) return;
  tip.replaceChildren(h("strong", {}, lines[0]), ...lines.slice(1).filter(Boolean).map(line => h("div", {}, line)));
  tip.style.left = `${Math.max(0, Math.min(x + 8, box.clientWidth - tip.offsetWidth - 2))}px`;
  tip.style.top = `${y + 6}px`;
}
