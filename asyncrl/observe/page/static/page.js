/* The page: which part needs which data, and when it is drawn anew. */

const shown = { page: null, run: 0, isTime: false, metric: null, drawn: new Map(), errors: [] };
const PARTS = [["verdict", "Verdict"], ["curves", "Learning"], ["time", "Time"], ["timeline", "Time line"], ["samples", "Samples"], ["failures", "Failures"], ["evaluations", "Evaluations"], ["metrics", "Metrics"], ["config", "Config"], ["commands", "Commands"]];

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
  const { runs } = page, { isTime } = shown, theme = css("--paper"), wide = window.innerWidth;
  const curves = runs.flatMap(each => [each.curves, each.step, each.time_s, each.evaluations]);
  part("head", [run.name, run.state, runs.length], () => {
    const title = runs.length > 1 ? `${runs.length} runs` : run.name;
    document.title = `${title} · asyncrl`;
    byId("title").textContent = title;
    byId("state").replaceChildren(runs.length > 1 ? "" : statePill(run.state));
  });
  part("runs", [shown.run, theme, ...runs.flatMap(each => [each.name, each.state])], () => showRuns(page, shown.run, index => { shown.run = index; drawPage(); }));
  part("verdict", [run.verdict, run.tiles, run.why], () => showVerdict(run));
  part("warnings", [run.warnings, run.problems], () => showWarnings(run));
  part("reward", [isTime, theme, wide, ...curves], () => drawChart("reward", rewardSpec(runs, isTime)));
  part("staleness", [isTime, theme, wide, ...curves], () => drawChart("staleness", stalenessSpec(runs, isTime)));
  part("differences", [page.differences], () => showDifferences(page));
  part("shares", [run.shares, theme], () => showShares(run));
  part("step-times", [isTime, theme, wide, run.step_times, run.step], () => drawChart("step-times", stepTimesSpec(run, isTime)));
  part("timeline", [run.timeline, theme, wide], () => showTimeline(run.timeline));
  part("samples", [run.samples, run.run_dir], () => showSamples(run.samples, run));
  part("failures", [run.failures], () => showFailures(run));
  part("evaluations", [run.evaluations], () => showEvaluations(run));
  part("metric-names", [Object.keys(Object.assign({}, ...runs.map(each => each.curves))).sort().join(" ")], drawMetricPicker);
  part("metric", [isTime, theme, wide, shown.metric, ...curves], () => shown.metric ? drawChart("metric", metricSpec(runs, shown.metric, isTime)) : byId("metric").replaceChildren(nothing("No step has ended yet, so there is no metric.")));
  part("config", [run.settings], () => showConfig(run));
  part("commands", [run.commands], () => showCommands(run));
}

/* All metrics in one list, by the part of the name before the slash. */
function drawMetricPicker() {
  const names = [...new Set(shown.page.runs.flatMap(run => Object.keys(run.curves)))].sort(), groups = new Map();
  for (const name of names) {
    const group = name.includes("/") ? name.split("/")[0] : "other";
    groups.set(group, [...(groups.get(group) || []), name]);
  }
  if (!names.includes(shown.metric)) shown.metric = names.find(name => name === "policy/entropy") || names[0] || null;
  const step = by => { shown.metric = names[(names.indexOf(shown.metric) + by + names.length) % names.length]; byId("metric-name").value = shown.metric; drawPage(); };
  byId("metric-tools").replaceChildren(...(names.length ? [
    h("label", { class: "pick" }, "Metric", h("select", { id: "metric-name", onchange: event => { shown.metric = event.target.value; drawPage(); } },
      [...groups].map(([group, each]) => h("optgroup", { label: group }, each.map(name => h("option", { value: name, selected: name === shown.metric }, name)))))),
    h("button", { type: "button", class: "small", onclick: () => step(-1) }, "Previous"), h("button", { type: "button", class: "small", onclick: () => step(1) }, "Next"),
    h("span", { class: "range" }, `${names.length} metrics`)] : []));
}

function showNotes(notes) {
  byId("notes").replaceChildren(...notes.map(note => h("p", { class: "note warn" }, note)));
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
  byId("axis").append(choice("Horizontal axis", [["step", "Steps"], ["time", "Seconds"]], "step", value => { shown.isTime = value === "time"; drawPage(); }));
  drawPage();
  let waits = 0;
  addEventListener("resize", () => { clearTimeout(waits); waits = setTimeout(redrawAll, 120); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  for (const [name, isPrint] of [["beforeprint", true], ["afterprint", false]]) {
    addEventListener(name, () => { document.documentElement.toggleAttribute("data-print", isPrint); redrawAll(); });
  }
  if (page.is_live) startLive(() => shown.page.made_s, change => { shown.page = change(shown.page); shown.run = Math.min(shown.run, Math.max(0, shown.page.runs.length - 1)); drawPage(); }, showNotes);
}

/* For tests: what is drawn, as values that can be read and not changed. */
window.asyncrlPage = Object.freeze({
  errors: () => [...shown.errors],
  charts: () => [...charts].map(([id, { plot, isZoomed }]) => ({ id, isZoomed, from: plot.scales.x.min, to: plot.scales.x.max,
    points: plot.data.slice(1).map(line => line.filter(value => value !== null && value !== undefined).length) })),
  timeline: () => ({ from: timeline.from, to: timeline.to, lanes: timeline.rows.map(row => row.name), spans: timeline.data?.spans.length ?? 0 }),
  sample: () => samples.key,
  runs: () => shown.page.runs.map(run => ({ name: run.name, state: run.state, steps: run.step.length, last: run.step[run.step.length - 1] ?? null })),
});

addEventListener("DOMContentLoaded", start);
