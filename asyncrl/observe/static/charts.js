/* Curves of one or several runs, drawn by uPlot: zoom by dragging or by keys, values under the pointer. */

const charts = new Map();  // id of its box -> {plot, isZoomed, spec}

/* The table that uPlot draws. `lines`: {label, x, y, unit, ...} each with an x of its own; `bands`: pairs of labels. */
function joined(lines) {
  const tables = lines.map(line => [line.x, line.y.map(value => value === undefined ? null : value)]);
  if (!tables.length) return [[]];
  return tables.every(([x]) => x === tables[0][0]) ? [tables[0][0], ...tables.map(([, y]) => y)] : uPlot.join(tables);
}

function secondsText(ticks) {
  const most = Math.max(...ticks.map(Math.abs), 0);
  const [scale, unit] = most >= 3 * 3600 ? [3600, "h"] : most >= 240 ? [60, "min"] : [1, "s"];
  return ticks.map(tick => `${+(tick / scale).toFixed(2)} ${unit}`);
}

const INCREMENTS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600,
  7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000];

function axesOf(spec) {
  const look = { stroke: css("--muted"), font: `${spec.isSmall ? 11 : 12}px system-ui, sans-serif`, grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid"), width: 1 } };
  const x = spec.isTime
    ? { ...look, size: 32, values: (_, ticks) => secondsText(ticks), incrs: INCREMENTS, space: 70 }
    : { ...look, size: 32, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6], values: (_, ticks) => ticks.map(tick => tick.toLocaleString("en")), space: 60 };
  const wide = (least, digit) => (_, texts) => Math.max(least, 16 + digit * Math.max(0, ...(texts ?? []).map(text => text.length)));
  const y = { ...look, size: wide(66, 6.8), values: (_, ticks) => tickTexts(ticks, spec.unit) };
  if (!spec.isSmall) return [x, y];
  const share = { ...y, scale: "share", side: 1, size: 40, space: 26, grid: { show: false }, ticks: { show: false }, values: (_, ticks) => tickTexts(ticks, "0..1") };
  return [{ ...x, size: 30 }, { ...y, size: wide(54, 6.2), space: 26, ticks: { show: false } }, ...(spec.lines.some(line => line.scale === "share") ? [share] : [])];
}

function optionsOf(spec, width) {
  const series = [{ label: spec.isTime ? "time" : "step", value: (_, v) => v === null || v === undefined ? "–" : spec.isTime ? duration(v) : plainNumber(v) }];
  for (const line of spec.lines) {
    series.push({
      label: line.label, scale: line.scale || "y", class: line.isQuiet ? "quiet" : undefined, stroke: line.stroke, width: line.width ?? 2, fill: line.fill,
      dash: line.dash, spanGaps: Boolean(line.spansGaps),
      points: line.isPoints ? { show: true, size: 8, fill: line.stroke } : line.width === 0 || line.fill || line.dash || line.isEdge ? { show: false } : { size: 5 },
      value: (_, v, at, row) => amount(v, spec.unit),
    });
  }
  const labels = spec.lines.map(line => line.label);
  return {
    width, height: spec.isSmall ? 120 : spec.height || 260, series, axes: axesOf(spec), legend: { show: !spec.isSmall, live: true, markers: { width: 0, fill: (plot, at) => plot.series[at].stroke?.(plot, at) || "transparent" } },
    bands: (spec.bands || []).map(([high, low, fill]) => ({ series: [labels.indexOf(high) + 1, labels.indexOf(low) + 1], fill })),
    scales: { x: { time: false }, y: { range: (_, low, high) => spec.range ? spec.range(low, high) : uPlot.rangeNum(low ?? 0, high || (low ? 0 : 1), 0.08, true) }, share: { range: [0, 1.05] } },
    cursor: { drag: { x: true, y: false }, points: { size: 7 }, focus: { prox: -1 } },
  };
}

/* Draws `spec` into the box: {title, what, lines, bands, unit, isTime, isSmall, range, height, isEmpty: text}. */
function drawChart(id, spec) {
  const box = byId(id), known = charts.get(id);
  const head = h("div", { class: "chart-head" }, h("h3", {}, breakable(spec.title)), h("p", {}, spec.what || ""));
  if (spec.isEmpty || !spec.lines.some(line => line.y.some(value => value !== null && value !== undefined))) {
    known?.plot.destroy();
    charts.delete(id);
    box.replaceChildren(head, nothing(spec.isEmpty || "No step has this number yet."));
    return;
  }
  const data = joined(spec.lines), shape = JSON.stringify([spec.title, spec.what, spec.isTime, spec.lines.map(line => [line.label, line.stroke])]);
  if (known && known.shape === shape) {  // a live change: where the reader has zoomed to stays
    known.lines.splice(0, known.lines.length, ...spec.lines);
    known.plot.setData(data, !known.isZoomed);
    if (known.isZoomed) known.plot.redraw();
    box.querySelector(".plot").setAttribute("aria-label", spoken(spec));
    return;
  }
  const zoomWas = known?.isZoomed && known.spec.isTime === spec.isTime && known.spec.title === spec.title ? { ...known.plot.scales.x } : null;
  known?.plot.destroy();
  const reset = h("button", { type: "button", class: "small", hidden: true, onclick: () => unzoom(id) }, "Whole range");
  const holder = h("div", { class: "plot", tabindex: "0", role: "application", "aria-roledescription": "chart", "aria-label": spoken(spec), onkeydown: event => chartKey(id, event) });
  const now = h("span", { class: "now" });
  head.append(reset, ...(spec.isSmall ? [now] : []));
  box.replaceChildren(head, holder);
  const entry = { spec, shape, reset, isZoomed: false, lines: spec.lines };
  const options = optionsOf(spec, Math.max(spec.isSmall ? 120 : 240, box.clientWidth));
  options.series.slice(1).forEach((line, at) => {
    line.value = (_, v, __, row) => amount(v, spec.unit);
  });
  const newest = plot => {
    const last = plot.data.map(line => line.findLastIndex(value => value !== null && value !== undefined)), isOut = !(plot.cursor.left >= 0);
    if (isOut && !spec.isSmall) plot.setLegend({ idxs: last }, false);
    now.textContent = entry.lines.map((line, at) => line.isQuiet ? null : amount(plot.data[at + 1][isOut ? last[at + 1] : plot.cursor.idx], line.unit ?? spec.unit)).filter(Boolean).join(" · ");
  };
  options.hooks = { ready: [newest], setCursor: [newest], setData: [newest], draw: [plot => { markStep(plot, spec); drawMarks(plot, spec); }], setSelect: [plot => { if (plot.select.width > 0) markZoom(entry, true); }] };
  entry.plot = new uPlot(options, data, holder);
  entry.plot.over.addEventListener("dblclick", () => markZoom(entry, false));
  entry.plot.over.addEventListener("mousedown", event => { entry.pressed = event.clientX; });
  entry.plot.over.addEventListener("click", event => { if (Math.abs(event.clientX - entry.pressed) < 4) pickStep(entry); });
  charts.set(id, entry);
  if (zoomWas) zoomTo(entry, zoomWas.min, zoomWas.max);
}

function spoken(spec) {
  const told = spec.lines.filter(line => !line.isQuiet).slice(0, 6).map(line => {
    const there = line.y.filter(value => value !== null && value !== undefined);
    return there.length ? `${line.label}: ${amount(there[0], spec.unit)} at first, ${amount(there[there.length - 1], spec.unit)} at last` : `${line.label}: nothing`;
  });
  return `${spec.title}. ${told.join("; ")}. Arrow keys read values, plus and minus zoom, 0 shows the whole range.`;
}

/* The index of the value in the rising list that is nearest. */
const nearest = (values, value) => values.reduce((best, each, at) => Math.abs(each - value) < Math.abs(values[best] - value) ? at : best, 0);

function markStep(plot, spec) {
  const run = shown.page.runs[shown.run];
  if (shown.step === null || !run?.step.length) return;
  const x = Math.round(plot.valToPos(spec.isTime ? run.time_s[nearest(run.step, shown.step)] : shown.step, "x", true)), { left, top, width, height } = plot.bbox;
  if (x < left || x > left + width) return;
  plot.ctx.fillStyle = css("--accent");
  plot.ctx.fillRect(x, top, window.devicePixelRatio || 1, height);
}

const MAX_MARKS = 50;

/* Resumes, lost processes and changed sources of the chosen run: a dotted line each, and its words where there is room. */
function drawMarks(plot, spec) {
  const run = shown.page.runs[shown.run], { left, top, width, height } = plot.bbox, pen = plot.ctx, scale = window.devicePixelRatio || 1;
  if (!spec.hasMarks || !run?.step.length) return;
  pen.save();
  pen.font = `${11 * scale}px system-ui, sans-serif`;
  pen.textBaseline = "top";
  pen.textAlign = "left";
  pen.setLineDash([2 * scale, 3 * scale]);
  let free = left;  // of words to the left
  for (const [step, text] of run.marks.slice(-MAX_MARKS)) {
    const at = Math.min(Math.max(step, run.step[0]), run.step[run.step.length - 1]);
    const x = Math.round(plot.valToPos(spec.isTime ? run.time_s[nearest(run.step, at)] : at, "x", true));
    if (x < left || x > left + width) continue;
    pen.strokeStyle = pen.fillStyle = css("--muted");
    pen.beginPath();
    pen.moveTo(x, top);
    pen.lineTo(x, top + height);
    pen.stroke();
    const words = written(text.split(/[:,]/)[0]), room = pen.measureText(words).width + 4 * scale, from = x + room > left + width ? x - room : x + 4 * scale;
    if (from < free) continue;
    pen.fillText(words, from, top + 2 * scale);
    free = Math.max(x, from + room);
  }
  pen.restore();
}

function pickStep({ plot, spec }) {
  const run = shown.page.runs[shown.run], { idx } = plot.cursor;
  if (idx === null || idx === undefined) return;
  const x = plot.data[0][idx];
  chooseStep(Math.round(spec.isTime ? run.step[nearest(run.time_s, x)] : x));
}

function markZoom(entry, isZoomed) {
  entry.isZoomed = isZoomed;
  entry.reset.hidden = !isZoomed;
}

function zoomTo(entry, min, max) {
  entry.plot.setScale("x", { min, max });
  markZoom(entry, true);
}

function unzoom(id) {
  const entry = charts.get(id), x = entry.plot.data[0];
  entry.plot.setData(entry.plot.data, true);
  if (x.length) markZoom(entry, false);
}

function chartKey(id, event) {
  const entry = charts.get(id), { plot } = entry, { min, max } = plot.scales.x, x = plot.data[0];
  const at = plot.cursor.idx ?? 0, middle = plot.cursor.idx === null ? (min + max) / 2 : x[at];
  const moved = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
  if (moved) {
    const to = Math.min(x.length - 1, Math.max(0, at + moved));
    plot.setCursor({ left: plot.valToPos(x[to], "x"), top: plot.over.clientHeight / 2 });
  } else if (event.key === "+" || event.key === "=") zoomTo(entry, middle - (middle - min) / 2, middle + (max - middle) / 2);
  else if (event.key === "-") {
    const wide = [Math.max(x[0], middle - (middle - min) * 2), Math.min(x[x.length - 1], middle + (max - middle) * 2)];
    if (wide[0] === x[0] && wide[1] === x[x.length - 1]) unzoom(id);
    else zoomTo(entry, ...wide);
  } else if (event.key === "0" || event.key === "Escape") unzoom(id);
  else if (event.key === "Enter") pickStep(entry);
  else return;
  event.preventDefault();
}

/* Mean of the values around each place, so that it does not lag behind a rise; at both ends of those that are there. */
function runningMean(values, window) {
  const sums = [0], counts = [0], half = Math.floor(window / 2);
  for (const value of values) {
    const isThere = value !== null && value !== undefined;
    sums.push(sums[sums.length - 1] + (isThere ? value : 0));
    counts.push(counts[counts.length - 1] + (isThere ? 1 : 0));
  }
  return values.map((_, at) => {
    const from = Math.max(0, at - half), to = Math.min(values.length, at + half + 1), num = counts[to] - counts[from];
    return num ? (sums[to] - sums[from]) / num : null;
  });
}

const xOf = (run, isTime) => isTime ? run.time_s : run.step;

/* The curve to look at first: the reward, or of supervised fine-tuning the loss. */
function rewardSpec(runs, isTime) {
  const lines = [], isAlone = runs.length === 1, isLoss = runs.every(run => !run.curves["reward/mean"]) && runs.some(run => run.curves["policy/loss"]);
  const [main, heldOut] = isLoss ? ["policy/loss", "eval/loss"] : ["reward/mean", "eval/reward_mean"];
  runs.forEach((run, index) => {
    const curve = run.curves[main], colour = runColour(index), x = xOf(run, isTime), name = isAlone ? "" : `${run.name} `;
    if (!curve) return;
    const isSmooth = run.window > 1 && curve.length > 2 * run.window;
    lines.push({ label: `${name}each step`, x, y: curve, stroke: isSmooth ? faded(colour, 0.4) : colour, width: isSmooth ? 1 : 2, isQuiet: !isAlone && isSmooth });
    if (isSmooth) lines.push({ label: isAlone ? `mean of ${run.num_recent} steps around it` : run.name, x, y: runningMean(curve, run.window), stroke: colour, width: 2.5 });
    const evaluated = run.evaluations.filter(line => line[heldOut] !== undefined);
    for (const one of new Set(evaluated.map(line => line.name ?? ""))) {
      const told = evaluated.filter(line => (line.name ?? "") === one), at = told.map(line => isTime ? line.time_s : line.policy_version);
      lines.push({ label: `${name}held out ${one}`.trim(), x: at, y: told.map(line => line[heldOut]), stroke: isAlone ? css("--evaluation") : colour, width: 0, isPoints: true, isQuiet: !isAlone });
    }
  });
  const what = runs.some(run => run.evaluations.length) ? `mean of each batch, and on held-out ${isLoss ? "rows" : "prompts"}` : "mean of each batch";
  return { title: isLoss ? "Loss" : "Reward", what, lines, unit: "", isTime, height: window.innerWidth > 1000 ? 480 : 380, hasMarks: true, isEmpty: withoutSteps(runs) };
}

function stalenessSpec(runs, isTime) {
  const lines = [], bands = [], isAlone = runs.length === 1, bounds = new Set(runs.map(run => run.max_staleness));
  runs.forEach((run, index) => {
    const mean = run.curves["sample/staleness_mean"], max = run.curves["sample/staleness_max"], x = xOf(run, isTime), colour = runColour(index);
    if (!mean || !max) return;
    const name = isAlone ? "" : `${run.name} `;
    lines.push({ label: `${name}max`, x, y: max, stroke: faded(colour, 0.55), width: 1, isQuiet: !isAlone, isEdge: true }, { label: isAlone ? "mean" : run.name, x, y: mean, stroke: colour });
    bands.push([`${name}max`, isAlone ? "mean" : run.name, faded(colour, 0.18)]);
    if (index === 0 || bounds.size > 1) {
      lines.push({ label: `${bounds.size > 1 ? name : ""}bound`, x, y: x.map(() => run.max_staleness), stroke: bounds.size > 1 ? colour : css("--bound"), dash: [6, 4], width: 1.5, isQuiet: bounds.size > 1 });
    }
  });
  const top = Math.max(1, ...bounds);
  return { title: "Staleness", what: "versions between sampling and training: mean to max, and the bound", lines, bands, unit: "", isTime, isEmpty: withoutSteps(runs), range: (_, high) => [0, Math.max(top, high || 0) * 1.12] };
}

/* What shows at a glance whether a run is healthy; of two metrics the second is a share, with a scale of its own. */
const FIXED = [["policy/entropy"], ["policy/grad_norm"], ["sample/length_mean", "sample/truncated_fraction"], ["reward/std"], ["policy/logprob_gap_mean"], ["policy/clip_fraction"]];
/* The gap needs tokens of the newest version, which a run far ahead has in few batches: then the KL divergence says more. */
const STAND_INS = { "policy/logprob_gap_mean": "policy/kl_behaviour" };
const numOf = (run, name) => (run.curves[name] ?? []).filter(value => value !== null).length;
const namesOf = (names, runs) => STAND_INS[names[0]] && runs.every(run => numOf(run, names[0]) < Math.max(3, run.step.length / 10)) && runs.some(run => numOf(run, STAND_INS[names[0]])) ? [STAND_INS[names[0]]] : names;
const TITLES = { "policy/kl_behaviour": "KL to the sampling policy",  "policy/entropy": "Entropy", "policy/grad_norm": "Gradient norm", "sample/length_mean": "Length · truncated", "reward/std": "Reward std", "policy/logprob_gap_mean": "Logprob gap", "policy/clip_fraction": "Clip fraction" };

function smallSpec(runs, names, isTime, isFixed = false) {
  const lines = [], [name] = names, gaugeOf = each => runs.map(run => run.gauges[each]).find(Boolean) || { unit: "", meaning: "" };
  runs.forEach((run, index) => names.forEach((each, at) => {
    const curve = run.curves[each], colour = runColour(index), x = xOf(run, isTime), label = names.length > 1 ? `${run.name} ${each}` : run.name;
    if (!curve) return;
    lines.push({ label, x, y: curve, stroke: colour, width: 1.5, spansGaps: true, isQuiet: index !== shown.run, unit: gaugeOf(each).unit, ...(at && { scale: "share", dash: [4, 3], stroke: faded(colour, 0.75) }) });
  }));
  return { title: isFixed ? TITLES[name] : name, what: names.map(each => gaugeOf(each).meaning).join(" Dashed: "), lines, unit: gaugeOf(name).unit, isTime, isSmall: true, isEmpty: withoutSteps(runs) };
}

function withoutSteps(runs) {
  return runs.some(run => run.step.length) ? "" : "No step has ended yet: curves begin with the first one.";
}
