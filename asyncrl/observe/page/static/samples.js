/* What the model said: a list with filters, and one rollout in full, its tokens coloured. */

const PAGE_OF_SAMPLES = 60;
const samples = { all: [], kind: "", step: "", task: "", sort: "newest", words: "", marks: null, num: PAGE_OF_SAMPLES, key: null, branch: 0, colour: "version", shown: null };
const keyOf = sample => `${sample.step}/${sample.group_id}/${sample.sample_index}/${sample.kind}`;
const SORTS = {
  newest: ["newest step first", (a, b) => b.step - a.step],
  oldest: ["oldest step first", (a, b) => a.step - b.step],
  high: ["highest reward first", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || b.step - a.step],
  low: ["lowest reward first", (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity) || b.step - a.step],
  long: ["longest first", (a, b) => b.num_sampled - a.num_sampled],
};

function showSamples(all, run) {
  const box = bodyOf("samples");
  samples.all = all;
  samples.marks = marksOf(all);
  if (!all.length) {
    samples.shown = null;
    box.replaceChildren(nothing(`No samples: ${run.run_dir}/samples.jsonl is not there or empty. A run keeps a few rollouts of each step (observe.samples_per_step; 0 keeps none).`));
    return;
  }
  if (!box.querySelector(".samples")) {
    box.replaceChildren(h("div", { class: "tools", id: "sample-tools" }), h("div", { class: "samples" },
      h("div", { class: "list", id: "sample-list", role: "list", "aria-label": "Samples" }), h("article", { id: "sample", "aria-label": "The chosen sample", tabindex: "-1" })));
  }
  keepingFocus(byId("sample-tools"), drawSampleTools);
  drawSampleList();
}

/* What finds the special tokens that were sampled in texts that come without token by token; null if none was. */
function marksOf(all) {
  const stretches = all.flatMap(sample => sample.branches).flatMap(branch => branch.stretches);
  const texts = new Set(stretches.flatMap(part => (part.special || []).map(at => part.pieces[at])).filter(Boolean));
  const escaped = [...texts].sort((a, b) => b.length - a.length).map(text => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  return escaped.length ? new RegExp(`(${escaped.join("|")})`) : null;
}

/* The text with its special tokens marked: split() puts them at the odd places. */
const marked = text => samples.marks ? text.split(samples.marks).map((part, at) => at % 2 ? h("mark", { class: "special" }, part) : part) : [text];
const wordsOf = sample => sample.error || sample.branches.flatMap(branch => branch.stretches).filter(part => part.is_sampled).map(part => part.text).join(" … ");
const searched = sample => [sample.prompt_id, sample.answer, wordsOf(sample), ...sample.messages.map(message => message.content)].join("\n").toLowerCase();
const badge = sample => h("span", { class: `badge ${sample.kind}${sample.num_stray ? " stray" : ""}` }, sample.kind);

function samplesOfStep(step) {
  const steps = samples.all.map(sample => sample.step), at = steps.reduce((best, each) => Math.abs(each - step) < Math.abs(best - step) ? each : best);
  Object.assign(samples, { kind: "", task: "", words: "", step: String(at) });
  drawSampleTools();
  drawSampleList();
  byId("samples").scrollIntoView();
}

/* Whether the sample of this key is there; then it is shown, whatever the filters were. */
function showSampleOf(key) {
  const sample = samples.all.find(each => keyOf(each) === key);
  if (!sample) return false;
  Object.assign(samples, { kind: "", task: "", words: "", step: String(sample.step), key });
  drawSampleTools();
  drawSampleList();
  return true;
}

function drawSampleTools() {
  const steps = [...new Set(samples.all.map(sample => sample.step))].sort((a, b) => b - a);
  const tasks = [...new Set(samples.all.map(sample => sample.task).filter(Boolean))].sort();
  const kinds = ["best", "worst", "random", "failed"].filter(kind => samples.all.some(sample => sample.kind === kind));
  const pick = (label, name, options) => h("label", { class: "pick" }, label, h("select", { "data-key": name, onchange: event => { samples[name] = event.target.value; samples.num = PAGE_OF_SAMPLES; drawSampleList(); } },
    options.map(([value, text]) => h("option", { value, selected: String(samples[name]) === String(value) }, text))));
  byId("sample-tools").replaceChildren(
    h("label", { class: "pick" }, "Search", h("input", { type: "search", "data-key": "words", value: samples.words, placeholder: "text, answer, prompt id", spellcheck: "false", oninput: event => { samples.words = event.target.value; samples.num = PAGE_OF_SAMPLES; drawSampleList(); } })),
    pick("Kind", "kind", [["", "all"], ...kinds.map(kind => [kind, kind])]), pick("Step", "step", [["", "all"], ...steps.map(step => [step, step])]),
    ...(tasks.length > 1 ? [pick("Task", "task", [["", "all"], ...tasks.map(task => [task, task])])] : []),
    pick("Sort", "sort", Object.entries(SORTS).map(([name, [text]]) => [name, text])), h("span", { class: "range", id: "sample-count", role: "status" }));
}

function drawSampleList() {
  const words = samples.words.trim().toLowerCase();
  const chosen = samples.all.filter(sample => (!words || searched(sample).includes(words)) && (!samples.kind || sample.kind === samples.kind) && (samples.step === "" || sample.step === Number(samples.step)) && (!samples.task || sample.task === samples.task));
  chosen.sort(SORTS[samples.sort][1]);
  const list = byId("sample-list"), left = chosen.length - samples.num;
  byId("sample-count").textContent = `${chosen.length} of ${samples.all.length}`;
  if (!chosen.some(sample => keyOf(sample) === samples.key)) samples.key = chosen.length ? keyOf(chosen[0]) : null;
  keepingFocus(list, () => list.replaceChildren(...chosen.slice(0, samples.num).map(sampleButton),
    ...(left > 0 ? [h("button", { type: "button", class: "more", onclick: () => { samples.num += PAGE_OF_SAMPLES; drawSampleList(); } }, `${left} more`)] : []),
    ...(chosen.length ? [] : [nothing("No sample fits these filters.")])));
  const sample = chosen.find(each => keyOf(each) === samples.key);
  if (sample !== samples.shown) showSample(sample);
}

function sampleButton(sample) {
  const key = keyOf(sample), words = wordsOf(sample);
  return h("div", { role: "listitem" }, h("button", { type: "button", class: `sample ${sample.kind}`, "data-key": key, "aria-pressed": String(key === samples.key), onclick: () => chooseSample(sample) },
    h("span", { class: "line" }, badge(sample), h("span", { class: "at" }, `step ${sample.step}`), ...(sample.num_stray ? [h("span", { class: "badge stray", title: "special tokens in the answer" }, "special")] : []), h("span", { class: "reward" }, sample.reward === null ? "no reward" : `reward ${plainNumber(sample.reward)}`)),
    h("span", { class: "words" }, marked(words.trim().slice(0, 160) || "(nothing was sampled)"))));
}

function chooseSample(sample) {
  samples.key = keyOf(sample);
  for (const button of byId("sample-list").querySelectorAll("button.sample")) button.setAttribute("aria-pressed", String(button.dataset.key === samples.key));
  showSample(sample);
  history.replaceState(null, "", `#sample=${encodeURIComponent(samples.key)}`);
  const article = byId("sample");
  if (article.getBoundingClientRect().top > window.innerHeight * 0.8) article.scrollIntoView({ block: "start" });
}

function showSample(sample) {
  const box = byId("sample");
  samples.shown = sample;
  samples.branch = 0;
  if (!sample) return box.replaceChildren();
  const fact = (name, value, note) => value === null || value === undefined ? null : h("div", {}, h("dt", {}, name), h("dd", { title: note }, value));
  const flags = [sample.num_stray && `${sample.num_stray} special ${sample.num_stray === 1 ? "token" : "tokens"} in the answer`, sample.is_truncated && "truncated", sample.num_interruptions > 0 && `interrupted ${sample.num_interruptions}×`, sample.branches.length > 1 && `${sample.branches.length} branches`].filter(Boolean);
  box.replaceChildren(
    h("h3", {}, `Step ${sample.step}, group ${sample.group_id}, sample ${sample.sample_index} `, badge(sample), ...flags.map(flag => h("span", { class: `badge flag${/special/.test(flag) ? " stray" : ""}` }, flag)),
      copyButton(() => linkTo(`sample=${encodeURIComponent(keyOf(sample))}`), "Copy link")),
    h("dl", { class: "facts" },
      fact("reward", sample.reward === null ? "none" : plainNumber(sample.reward)), fact("expected", sample.answer),
      fact("sampled", `${plainNumber(sample.num_sampled)} tokens`), fact("staleness", sample.staleness === null ? null : `${sample.staleness} ${sample.staleness === 1 ? "version" : "versions"}`, "of its oldest token in the loss"),
      fact("logprob gap", sample.logprob_gap === null ? null : amount(sample.logprob_gap, "nats"), "mean of |engine − trainer| over its fresh tokens"),
      fact("prompt", sample.prompt_id), fact("task", sample.task), ...Object.entries(sample.metrics).map(([name, value]) => fact(name, plainNumber(value)))),
    ...(sample.error ? [h("p", { class: "note bad" }, h("strong", {}, "Failed: "), sample.error)] : []),
    ...(sample.messages.length ? [h("h4", {}, "Prompt")] : []), ...sample.messages.map(messageBlock),
    h("div", { id: "branch" }), ...(sample.group ? [groupOf(sample)] : []));
  if (sample.branches.length) drawBranch();
  else byId("branch").append(nothing("No tokens: they are kept of rollouts that ended with a reward."));
}

/* The rollouts of a group beside each other: what was better than what, and by how much. */
function groupOf(sample) {
  return h("div", { id: "group" }, h("h4", {}, `The ${sample.group.length} rollouts of this group, best first`),
    h("div", { class: "group", role: "list" }, [...sample.group].sort((a, b) => b.reward - a.reward).map(each =>
      h("div", { class: "member", role: "listitem", "aria-current": each.sample_index === sample.sample_index ? "true" : null },
        h("div", { class: "line" }, h("strong", {}, `reward ${plainNumber(each.reward)}`), ...(each.advantage === null ? [] : [h("span", { class: each.advantage < 0 ? "down" : "up" }, `advantage ${each.advantage < 0 ? "−" : "+"}${Math.abs(each.advantage).toFixed(2)}`)])),
        h("pre", {}, marked(each.text || "(nothing was sampled)")),
        h("div", { class: "hint" }, `sample ${each.sample_index}, ${plainNumber(each.num_sampled)} tokens${each.is_truncated ? ", truncated" : ""}`)))));
}

function messageBlock(message) {
  const { role, content, ...rest } = message;
  const parts = typeof content === "string" ? content : Array.isArray(content) ? content.map(part => part?.text ?? JSON.stringify(part)).join("\n") : content === null || content === undefined ? "" : JSON.stringify(content, null, 2);
  const other = Object.keys(rest).length ? JSON.stringify(rest, null, 2) : "";
  return h("div", { class: "turn given" }, h("span", { class: "role" }, String(role ?? "?")), h("pre", {}, marked([parts, other].filter(Boolean).join("\n"))));
}

/* The tokens of a branch: prompt and replies as they stand, what was sampled token by token. */
function drawBranch() {
  const sample = samples.shown, branch = sample.branches[samples.branch], box = byId("branch");
  const versions = [...new Set(sample.branches.flatMap(each => each.stretches).flatMap(part => part.versions || []))].sort((a, b) => b - a);
  const tabs = sample.branches.length > 1 ? h("div", { class: "branches", role: "group", "aria-label": "Branches" }, sample.branches.map((each, at) =>
    h("button", { type: "button", class: "small", "data-key": `branch-${at}`, "aria-pressed": String(at === samples.branch), style: { marginLeft: `${Math.min(6, depthOf(sample, each)) * 14}px` }, onclick: () => { samples.branch = at; drawBranch(); } },
      each.parent === null ? `branch ${each.branch}` : `branch ${each.branch}: forks from ${each.parent} after ${each.num_shared} tokens`))) : null;
  const said = h("p", { class: "token-told", role: "status", "aria-live": "off" }, "Point at a token, or step through a turn with the arrow keys.");
  let number = 0;
  const turns = branch.stretches.map((part, at) => {
    if (!part.is_sampled) return givenStretch(part, at === 0 && sample.messages.length > 0);
    const first = number;
    number += part.pieces ? part.pieces.length : 0;
    return sampledStretch(part, first, versions, sample.step - 1, said);
  });
  keepingFocus(box, () => box.replaceChildren(
    h("div", { class: "tools tokens" }, choice("Colour tokens by", [["version", "Version"], ["logprob", "Probability"], ["loss", "In the loss"]], samples.colour, value => { samples.colour = value; drawBranch(); byId("branch").querySelector(`input[value=${value}]`)?.focus(); }), tokenLegend(versions, sample.step - 1)),
    ...(tabs ? [tabs] : []), said, h("div", { class: `said by-${samples.colour}` }, turns)));
}

function depthOf(sample, branch) {
  const above = sample.branches.find(each => each.branch === branch.parent);
  return above && above !== branch && above.branch < branch.branch ? 1 + depthOf(sample, above) : 0;
}

function givenStretch(part, isPrompt) {
  const text = h("pre", {}, marked(part.text)), rest = part.cut ? [h("span", { class: "cut" }, `… ${plainNumber(part.cut)} tokens left out`)] : [];
  if (isPrompt) return h("details", { class: "turn given" }, h("summary", {}, "the prompt as the model saw it"), text, ...rest);
  return h("div", { class: "turn given" }, h("span", { class: "role" }, "not sampled here: template, tools, or another branch"), text, ...rest);
}

const CHANCES = [[0.9, "≥ 90%"], [0.5, "50–90%"], [0.1, "10–50%"], [0.01, "1–10%"], [0, "< 1%"]];
const bucketOf = logprob => CHANCES.findIndex(([least]) => Math.exp(logprob) >= least);

function sampledStretch(part, first, versions, trained, said) {
  const pieces = part.pieces || [part.text], special = new Set(part.special), last = { version: null };
  const tokens = pieces.map((piece, at) => {
    const version = part.versions?.[at], isNew = samples.colour === "version" && version !== last.version;
    last.version = version;
    return h("span", { class: `tok ver-${Math.min(5, versions.indexOf(version))} chance-${bucketOf(part.logprobs?.[at] ?? 0)}${part.in_loss?.[at] === false ? " masked" : ""}${special.has(at) ? " special" : ""}`, "data-at": at, "data-v": isNew && version !== undefined ? `v${version}` : null }, piece);
  });
  const tell = at => {
    const logprob = part.logprobs?.[at], version = part.versions?.[at];
    tokens.forEach((token, other) => token.classList.toggle("here", other === at));
    said.textContent = [`token ${first + at} ${written(JSON.stringify(pieces[at]))}`, version !== undefined && `version ${version} (${trained - version} behind)`, logprob !== undefined && `logprob ${logprob.toFixed(3)} nats (${amount(Math.exp(logprob), "0..1")})`, part.in_loss && (part.in_loss[at] ? "in the loss" : "masked: too old"), special.has(at) && "special token"].filter(Boolean).join(" · ");
  };
  let here = -1;
  const block = h("pre", { class: "tokens", tabindex: "0", "aria-label": "Sampled tokens; arrow keys step through them",
    onmouseover: event => { if (event.target.dataset.at !== undefined) tell((here = Number(event.target.dataset.at))); },
    onkeydown: event => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      said.setAttribute("aria-live", "polite");
      tell((here = Math.max(0, Math.min(tokens.length - 1, here + by))));
    } }, tokens);
  return h("div", { class: "turn model" }, h("span", { class: "role" }, "model"), block, ...(part.cut ? [h("span", { class: "cut" }, `… ${plainNumber(part.cut)} tokens left out`)] : []));
}

function tokenLegend(versions, trained) {
  const key = (name, text) => h("span", { class: "key" }, h("span", { class: `tok ${name}` }, "abc"), text);
  const told = { version: () => versions.slice(0, 6).map((version, at) => key(`ver-${at}`, `v${version}${at === 5 && versions.length > 6 ? " and older" : ""}, ${trained - version} behind`)),
    logprob: () => CHANCES.map(([, text], at) => key(`chance-${at}`, text)),
    loss: () => [key("", "trained on"), key("masked", "masked: older than the bound")] }[samples.colour]();
  return h("div", { class: `legend by-${samples.colour}`, "aria-label": "Legend" }, told);
}
