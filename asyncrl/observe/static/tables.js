/* What a run says in words and rows: verdict, shares, failures, evaluations, settings, commands, differences. */

const BAD_ENDS = ["failed", "crashed", "interrupted"];

function showVerdict(run, whose) {
  const ended = BAD_ENDS.includes(run.state) ? `The run has state ${run.state}: ${run.why}` : "";
  const told = run.verdict ?? { headline: "No step has ended yet.", health: null, speed: [], reward: null }, sentences = texts => texts.map(text => h("p", {}, text));
  const row = (label, ...content) => h("div", { class: "row" }, h("h2", {}, label), h("div", {}, ...content));
  byId("headline").replaceChildren(written((ended || told.headline) + whose));
  const health = told.health === null ? nothing("No step has ended yet.") : told.health.length
    ? h("ul", { class: "flags" }, told.health.map(text => h("li", {}, text))) : h("p", { class: "fine" }, "Nothing unusual.");
  bodyOf("verdict").replaceChildren(
    h("div", { class: "row learned" }, h("h2", {}, "Learning"), h("div", {}, ...sentences(ended ? [told.headline] : []), told.reward === null ? nothing("No step has a reward yet.") : bigReward(told.reward, run.num_recent))),
    row("Health", health), row("Speed", ...(told.speed.length ? sentences(told.speed) : [nothing("No step has ended yet.")])),
    h("p", { class: "why" }, `${run.run_dir}: ${run.progress}`),
    // Relative: they open where the page lies in the run directory.
    ...(run.profiles.length ? [h("p", { class: "why" }, "Profiles: ", ...run.profiles.flatMap(name => [h("a", { href: `profile/${encodeURIComponent(name)}`, download: "" }, name), " "]))] : []));
}

function bigReward(reward, num) {
  const number = value => value === null ? "–" : value.toFixed(3);
  return h("p", { class: "big" }, h("span", { class: "label" }, "reward"), h("span", { class: "from" }, number(reward.first)), h("span", { class: "from" }, "→"),
    h("strong", {}, number(reward.last)), h("span", { class: "from" }, `± ${reward.noise ? Number(reward.noise.toPrecision(reward.noise < 0.001 ? 1 : 3)).toFixed(reward.noise < 0.0005 ? 5 : 3) : 0}`),
    h("span", { class: "hint" }, `from the start to the mean of the last ${num === 1 ? "step" : `${num} steps`}`));
}

function showWarnings(run) {
  const list = (kind, title, texts) => texts.length ? [h("details", { class: `note ${kind}`, open: texts.length <= 4 },
    h("summary", {}, `${title} (${texts.length})`), h("ul", {}, texts.map(text => h("li", {}, text))))] : [];
  byId("warnings").replaceChildren(...list("warn", "Warnings", run.warnings), ...list("bad", "Could not be read or believed", run.problems));
}

const SHARES = { training: "training", generation: "waiting for generation", rewards: "waiting for rewards", teaching: "waiting for teaching", stragglers: "waiting for stragglers", publishing: "waiting for publishing", handovers: "handovers", other: "other" };

function showShares(run) {
  const shares = Object.entries(run.verdict?.shares ?? {}).filter(([, fraction]) => fraction > 0).map(([name, fraction]) => ({ name: SHARES[name], fraction, seconds: fraction * run.verdict.wall_s }));
  if (!shares.length) return bodyOf("time").replaceChildren(nothing("No step has ended yet, so no time was shared out."));
  bodyOf("time").replaceChildren(
    h("div", { class: "shares", role: "img", "aria-label": shares.map(share => `${share.name} ${amount(share.fraction, "0..1")}`).join(", ") },
      shares.map(share => h("span", { title: share.name, style: { background: colourOf(share.name), flexGrow: String(share.seconds) } }))),
    h("ul", { class: "parts" }, shares.map(share => h("li", {}, h("span", { class: "swatch", style: { background: colourOf(share.name) } }),
      h("span", { class: "name" }, share.name), h("span", { class: "num" }, `${Math.round(100 * share.fraction)}%`), h("span", { class: "num hint" }, duration(share.seconds))))));
}

function showFailures(run) {
  byId("failures").hidden = !run.failures.length;
  bodyOf("failures").replaceChildren(table(["Cause", "Rollouts", "An example"],
    run.failures.map(failure => [failure.cause, plainNumber(failure.count), h("code", { class: "wrap" }, failure.example)]), "failures"));
}

function showEvaluations(run) {
  if (!run.evaluations.length) return bodyOf("evaluations").replaceChildren(h("p", { class: "empty" }, "No evaluations. To test held-out prompts, add a section to the config: ", h("code", {}, "eval: {task: {files: [held_out.jsonl], reward: math}, every: 20}")));
  const number = (line, name, unit) => line[name] === undefined || line[name] === null ? "–" : amount(line[name], unit);
  if (run.evaluations.every(line => line["eval/loss"] !== undefined)) {
    return bodyOf("evaluations").replaceChildren(h("h3", {}, "Evaluations"), table(["Version", "Loss", "Tokens", "At"], [...run.evaluations].reverse().map(line => [
      `v${line.policy_version}`, line["eval/loss"].toPrecision(4), number(line, "eval/tokens", ""), number(line, "time_s", "s")]), "evaluations"));
  }
  bodyOf("evaluations").replaceChildren(h("h3", {}, "Evaluations"), table(["Version", "Reward", "Tokens", "Truncated", "Took", "At"], [...run.evaluations].reverse().map(line => [
    `v${line.policy_version} ${line.name ?? ""}`.trim(), line["eval/standard_error"] === undefined ? number(line, "eval/reward_mean", "") : `${number(line, "eval/reward_mean", "")} ± ${line["eval/standard_error"].toFixed(3)}`,
    number(line, "eval/length_mean", ""), number(line, "eval/truncated_fraction", "0..1"), number(line, "eval/seconds", "s"), number(line, "time_s", "s")]), "evaluations"));
}

const config = { onlyDiffers: true, filter: "" };

function showConfig(run) {
  const box = bodyOf("config");
  if (!run.settings.length) return box.replaceChildren(nothing(`The config of ${run.run_dir} could not be read.`));
  if (!box.querySelector(".tools")) {
    box.replaceChildren(h("div", { class: "tools" },
      h("label", { class: "pick" }, "Filter", h("input", { type: "search", placeholder: "buffer, max_tokens …", spellcheck: "false", oninput: event => { config.filter = event.target.value; drawConfig(); } })),
      h("label", { class: "tick" }, h("input", { type: "checkbox", checked: config.onlyDiffers, onchange: event => { config.onlyDiffers = event.target.checked; drawConfig(); } }), "only what differs from the defaults"),
      h("span", { class: "range", role: "status" })), h("div", { class: "rows" }));
  }
  config.settings = run.settings;
  drawConfig();
}

function drawConfig() {
  const words = config.filter.toLowerCase(), box = bodyOf("config");
  const shown = config.settings.filter(each => (each.differs || !config.onlyDiffers) && `${each.key} ${each.value}`.toLowerCase().includes(words));
  box.querySelector(".range").textContent = `${shown.length} of ${config.settings.length} settings`;
  const rows = shown.map(each => {
    const row = [h("code", {}, breakable(each.key)), h("code", { class: "wrap" }, each.value), each.default === null ? h("span", { class: "hint" }, "required") : h("code", { class: "wrap hint" }, each.default)];
    row.className = each.differs && !config.onlyDiffers ? "differs" : "";
    return row;
  });
  box.querySelector(".rows").replaceChildren(rows.length ? table(["Setting", "Value", "Default"], rows, "settings") : nothing("No setting fits."));
}

function copyButton(textOf, label, spoken = label) {
  const button = h("button", { type: "button", class: "small", "aria-label": spoken, onclick: () => copyText(textOf(), button, label) }, label);
  return button;
}

async function copyText(text, button, label) {
  let isDone = false;
  try {
    await navigator.clipboard.writeText(text);
    isDone = true;
  } catch {  // no secure context, or no permission: the old way
    const area = h("textarea", { class: "sr" });
    area.value = text;
    document.body.append(area);
    area.select();
    isDone = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = isDone ? "Copied" : "Select it by hand";
  setTimeout(() => { button.textContent = label; }, 1500);
}

/* Settings and results in which the runs differ. */
function differencesOf(runs) {
  const values = runs.map(run => ({
    ...Object.fromEntries(run.settings.map(each => [each.key, each.value])), state: run.state, progress: run.progress,
    ...(run.verdict?.reward && { "reward at the end": `${run.verdict.reward.last.toFixed(3)} ± ${run.verdict.reward.noise.toFixed(3)}` }),
  }));
  const keys = [...new Set(values.flatMap(Object.keys))];
  return keys.map(key => [key, values.map(each => each[key] ?? "-")]).filter(([, row]) => new Set(row).size > 1);
}

function showDifferences(runs) {
  byId("differences").hidden = runs.length < 2;
  if (runs.length < 2) return;
  const rows = differencesOf(runs).map(([key, row]) => [h("code", {}, key), ...row.map(value => h("span", { class: "wrap" }, value))]);
  bodyOf("differences").replaceChildren(rows.length ? table(["Setting or result", ...runs.map(run => run.name)], rows, "differences") : nothing("These runs have the same settings and the same results."));
}

function showRuns(page, chosen, onChoose) {
  byId("runs").hidden = page.runs.length < 2;
  if (page.runs.length < 2) return;
  keepingFocus(bodyOf("runs"), () => bodyOf("runs").replaceChildren(
    h("p", { class: "hint" }, "Curves show all of them. Verdict, timeline, samples and config are of the chosen one."),
    h("div", { class: "runs", role: "group", "aria-label": "Run that is shown in detail" }, page.runs.map((run, index) =>
      h("button", { type: "button", "data-key": run.run_dir, "aria-pressed": String(index === chosen), onclick: () => onChoose(index) },
        h("span", { class: "swatch", style: { background: runColour(index) } }), h("span", { class: "name" }, run.name), statePill(run.state))))));
}

const statePill = state => h("span", { class: `pill state-${state}` }, state);
