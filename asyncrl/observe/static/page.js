/* The page: which part needs which data, and when it is drawn anew. */

const shown = { page: null, run: 0, isTime: false, step: null, filter: "", inSight: new Set(), drawn: new Map(), errors: [] };
const PARTS = [["verdict", "Verdict"], ["curves", "Learning"], ["samples", "Samples"], ["time", "Time"], ["timeline", "Timeline"], ["metrics", "Metrics"], ["config", "Config"]];

/* Draws a part if something that it shows is another value than at the last time; unchanged data keep their identity. */
function part(name, needs, draw) {
  const before = shown.drawn.get(name);
  if (before && before.length === needs.length && needs.every((need, at) => need === before[at])) return;
  shown.drawn.set(name, needs);
  draw();
}

function drawPage() {
  const { page } = shown, run = page.runs[shown.run];
  document.body.classList.toggle("without-runs", !run);
  byId("foot").textContent = `asyncrl ${page.asyncrl}, ${when(page.made_s)}${page.is_live ? "" : ". This file asks nothing of any network."}`;
  if (!run) {
    document.title = "asyncrl";
    byId("title").textContent = "No run yet";
    return byId("notes").childNodes.length || byId("notes").append(h("p", { class: "note warn" }, page.is_live ? "There is nothing to show yet: the page follows as soon as the run begins." : "There is no run in this page."));
  }
  byId("notes").replaceChildren();
  const { runs } = page, { isTime } = shown, theme = css("--paper"), wide = window.innerWidth;
  const curves = runs.flatMap(each => [each.curves, each.step, each.time_s, each.evaluations]);
  part("head", [run.name, run.state, runs.length], () => {
    const title = runs.length > 1 ? `${runs.length} runs` : run.name;
    document.title = `${title} · asyncrl`;
    byId("title").textContent = title;
    byId("state").replaceChildren(runs.length > 1 ? "" : statePill(run.state));
  });
  part("runs", [shown.run, theme, ...runs.flatMap(each => [each.name, each.state])], () => showRuns(page, shown.run, index => { shown.run = index; drawPage(); }));
  part("verdict", [run.verdict, run.progress, run.state], () => showVerdict(run, runs.length > 1 ? ` (${run.name})` : ""));
  part("warnings", [run.warnings, run.problems], () => showWarnings(run));
  part("reward", [isTime, theme, wide, run.marks, ...curves], () => drawChart("reward", rewardSpec(runs, isTime)));
  part("staleness", [isTime, theme, wide, ...curves], () => drawChart("staleness", stalenessSpec(runs, isTime)));
  part("differences", runs.flatMap(each => [each.settings, each.progress, each.state]), () => showDifferences(runs));
  part("shares", [run.verdict, theme], () => showShares(run));
  part("timeline", [run.timeline, theme, wide], () => showTimeline(withEngines(run.timeline, run)));
  part("samples", [run.samples, run.packed, run.run_dir], () => showSamples(run.samples, run));
  part("failures", [run.failures], () => showFailures(run));
  part("evaluations", [run.evaluations], () => showEvaluations(run));
  FIXED.forEach((names, at) => part(`fixed-${at}`, [shown.run, isTime, theme, wide, ...curves], () => drawChart(`fixed-${at}`, smallSpec(runs, namesOf(names, runs), isTime, true))));
  part("marks", [run.marks], () => showMarks(run));
  part("metric-names", [metricNames().join(" "), constantNames().join(" "), shown.filter], drawMetricGrid);
  for (const id of shown.inSight) part(id, [shown.run, isTime, theme, wide, ...curves], () => drawChart(id, smallSpec(runs, [id.slice(METRIC.length)], isTime)));
  part("step", [shown.step, run], drawStepTools);
  part("config", [run.settings], () => showConfig(run));
}

const METRIC = "metric ";
const metricNames = () => [...new Set(shown.page.runs.flatMap(run => Object.keys(run.curves)))].sort();
/* Metrics that have one value in all steps of each run. */
const constantNames = () => metricNames().filter(name => shown.page.runs.every(run => {
  const values = (run.curves[name] ?? []).filter(value => value !== null);
  return run.step.length > 1 && values.every(value => value === values[0]);
}));
const sight = new IntersectionObserver(entries => {
  for (const entry of entries) shown.inSight[entry.isIntersecting ? "add" : "delete"](entry.target.id);
  drawPage();
}, { rootMargin: "300px" });

/* A small chart for each metric that fits the filter; drawn when it comes into sight, as there are many. */
function drawMetricGrid() {
  const all = metricNames(), names = all.filter(name => name.toLowerCase().includes(shown.filter.trim().toLowerCase())), grid = byId("metric-grid");
  if (!byId("metric-filter")) byId("metric-tools").replaceChildren(
    h("label", { class: "pick" }, "Filter", h("input", { type: "search", id: "metric-filter", placeholder: "reward, perf/ …", spellcheck: "false", oninput: event => { shown.filter = event.target.value; drawPage(); } })),
    h("span", { class: "range", role: "status" }));
  byId("metric-tools").querySelector(".range").textContent = `${names.length} of ${all.length} metrics`;
  const constant = new Set(constantNames()), fixed = names.filter(name => constant.has(name)), moving = names.filter(name => !constant.has(name));
  showConstant(fixed);
  sight.disconnect();
  dropCharts(METRIC);
  grid.replaceChildren(...moving.map(name => h("div", { class: "chart small", id: METRIC + name })), ...(names.length ? [] : [nothing(all.length ? "No metric fits." : "No step has ended yet.")]));
  grid.childNodes.forEach(node => node.id && sight.observe(node));
}

function showConstant(names) {
  const { runs } = shown.page, box = byId("metric-constant"), gaugeOf = name => runs.map(run => run.gauges[name]).find(Boolean) ?? { unit: "", meaning: "" };
  const valueOf = (run, name) => amount((run.curves[name] ?? []).find(value => value !== null), gaugeOf(name).unit);
  const rows = names.map(name => [h("code", {}, breakable(name)), ...runs.map(run => valueOf(run, name)), gaugeOf(name).meaning]);
  const isOpen = box.querySelector("details")?.open;
  box.replaceChildren(...(names.length ? [h("details", { open: isOpen }, h("summary", {}, `${names.length} did not change`),
    table(["Metric", ...(runs.length > 1 ? runs.map(run => run.name) : ["Value"]), "Meaning"], rows, "constant"))] : []));
}

function showMarks(run) {
  byId("marks").replaceChildren(...run.marks.slice(-MAX_MARKS).map(([step, text]) => h("li", {}, h("strong", {}, `After step ${step}: `), text)));
}

function dropCharts(prefix) {
  for (const id of [...charts.keys(), ...shown.drawn.keys()].filter(id => id.startsWith(prefix))) {
    charts.get(id)?.plot.destroy();
    charts.delete(id);
    shown.drawn.delete(id);
    shown.inSight.delete(id);
  }
}

/* A step that was clicked in a chart, or named in the address: a line in all charts, and where to look further. */
function chooseStep(step) {
  shown.step = step;
  history.replaceState(null, "", step === null ? location.href.split("#")[0] : `#step=${step}`);
  charts.forEach(({ plot }) => plot.redraw(false));
  drawPage();
}

function drawStepTools() {
  const run = shown.page.runs[shown.run], { step } = shown, box = byId("step-tools");
  if (step === null) return box.replaceChildren(h("span", { class: "hint" }, "Click a chart to pick a step."));
  const reward = run.curves["reward/mean"]?.[nearest(run.step, step)], button = (text, act) => h("button", { type: "button", class: "small", onclick: act }, text);
  box.replaceChildren(h("strong", {}, `Step ${step}`), ...(reward === undefined ? [] : [h("span", { class: "range" }, `reward ${amount(reward, "")}`)]),
    ...(samples.all.length ? [button("Its samples", () => samplesOfStep(step))] : []), button("Its timeline", () => timelineOfStep(step)),
    copyButton(() => linkTo(`step=${step}`), "Copy link"), button("Clear", () => chooseStep(null)));
}

const linkTo = fragment => `${location.href.split("#")[0]}#${fragment}`;

/* #step=42, #sample=KEY, and #rollout=KEY (with nothing else on the page) lead to what they name. */
function followAddress() {
  const [name, value] = decodeURIComponent(location.hash.slice(1)).split("=");
  if (name === "step" && Number.isFinite(Number(value))) {
    chooseStep(Number(value));
    byId("curves").scrollIntoView();
  }
  const hasSample = (name === "sample" || name === "rollout") && showSampleOf(value);
  document.body.classList.toggle("one-rollout", name === "rollout" && hasSample);
  if (hasSample) byId("samples").scrollIntoView();
}

function redrawAll() {
  charts.forEach(chart => { chart.shape = null; });
  drawPage();
}

function start() {
  addEventListener("error", event => shown.errors.push(String(event.message)));
  addEventListener("unhandledrejection", event => shown.errors.push(String(event.reason)));
  const page = shown.page = JSON.parse(byId("data").textContent);
  byId("nav").append(...PARTS.map(([id, text]) => h("a", { href: `#${id}` }, text)));
  const nav = byId("nav"), signRest = () => nav.classList.toggle("has-more", nav.scrollLeft + nav.clientWidth < nav.scrollWidth - 4);
  nav.addEventListener("scroll", signRest, { passive: true });
  addEventListener("resize", signRest);
  signRest();
  byId("axis").append(choice("Horizontal axis", [["step", "Steps"], ["time", "Seconds"]], "step", value => { shown.isTime = value === "time"; drawPage(); }));
  byId("fixed").append(...FIXED.map((_, at) => h("div", { class: "chart small", id: `fixed-${at}` })));
  drawPage();
  followAddress();
  addEventListener("hashchange", followAddress);
  let waits = 0;
  addEventListener("resize", () => { clearTimeout(waits); waits = setTimeout(redrawAll, 120); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  for (const [name, isPrint] of [["beforeprint", true], ["afterprint", false]]) {
    addEventListener(name, () => { document.documentElement.toggleAttribute("data-print", isPrint); if (isPrint) metricNames().filter(name => byId(METRIC + name)).forEach(name => shown.inSight.add(METRIC + name)); redrawAll(); });
  }
  if (page.is_live) startLive(() => shown.page.made_s, () => shown.page.runs.length > 0 && shown.page.runs.every(run => ["done", ...BAD_ENDS].includes(run.state)), change => { shown.page = change(shown.page); shown.run = Math.min(shown.run, Math.max(0, shown.page.runs.length - 1)); drawPage(); });
}

/* For tests: what is drawn, as values that can be read and not changed. */
window.asyncrlPage = Object.freeze({
  errors: () => [...shown.errors],
  charts: () => [...charts].map(([id, { plot, isZoomed }]) => ({ id, isZoomed, from: plot.scales.x.min, to: plot.scales.x.max,
    points: plot.data.slice(1).map(line => line.filter(value => value !== null && value !== undefined).length) })),
  timeline: () => ({ from: timeline.from, to: timeline.to, lanes: timeline.rows.map(row => row.name), spans: timeline.data?.spans.length ?? 0 }),
  sample: () => samples.key,
  numSamples: () => samples.all.length,
  step: () => shown.step,
  runs: () => shown.page.runs.map(run => ({ name: run.name, state: run.state, steps: run.step.length, last: run.step[run.step.length - 1] ?? null })),
});

addEventListener("DOMContentLoaded", start);
