/* What the model said: a list with filters, and one rollout in full. */

const PAGE_OF_SAMPLES = 60;
const samples = { all: [], total: 0, packed: null, wanted: null, kind: "", step: "", task: "", sort: "newest", words: "", num: PAGE_OF_SAMPLES, key: null, shown: null, colour: "none" };
const keyOf = sample => `${sample.step}/${sample.group_id}/${sample.sample_index}/${sample.kind}`;
const SORTS = {
  newest: ["newest step first", (a, b) => b.step - a.step],
  oldest: ["oldest step first", (a, b) => a.step - b.step],
  high: ["highest reward first", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || b.step - a.step],
  low: ["lowest reward first", (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity) || b.step - a.step],
  long: ["longest first", (a, b) => b.num_sampled - a.num_sampled],
};

/* The other samples of the run are unpacked after the first drawing: they may be many megabytes. */
async function unpackSamples(run) {
  const bytes = Uint8Array.from(atob(run.packed), one => one.charCodeAt(0));
  const others = JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
  if (run.packed !== samples.packed || !others.length) return;  // meanwhile another run is shown
  samples.all = [...others, ...run.samples].sort((a, b) => a.step - b.step);
  keepingFocus(byId("sample-tools"), drawSampleTools);
  drawSampleList();
  if (samples.wanted) followAddress();
}

function showSamples(all, run) {
  const box = bodyOf("samples");
  Object.assign(samples, { all, total: run.num_samples, packed: run.packed });
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
  unpackSamples(run);
}

const wordsOf = sample => sample.error || sample.parts.filter(part => part.is_sampled).map(part => part.text).join(" … ");
const searched = sample => [sample.prompt_id, sample.answer, wordsOf(sample), ...sample.messages.map(message => message.content)].join("\n").toLowerCase();
const badge = sample => h("span", { class: `badge ${sample.kind}` }, sample.kind);

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
  samples.wanted = sample ? null : key;
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
    pick("Sort", "sort", Object.entries(SORTS).map(([name, [text]]) => [name, text])), h("span", { class: "range", id: "sample-count", role: "status" }),
    ...(samples.all.length < samples.total ? [h("span", { class: "hint", id: "sample-left-out" }, `Search and filters see ${plainNumber(samples.all.length)} of them, spread over the run, since this page has a limit. asyncrl inspect --samples --step N shows all of a step.`)] : []));
}

function drawSampleList() {
  const words = samples.words.trim().toLowerCase();
  const chosen = samples.all.filter(sample => (!words || searched(sample).includes(words)) && (!samples.kind || sample.kind === samples.kind) && (samples.step === "" || sample.step === Number(samples.step)) && (!samples.task || sample.task === samples.task));
  chosen.sort(SORTS[samples.sort][1]);
  const list = byId("sample-list"), left = chosen.length - samples.num;
  byId("sample-count").textContent = `${plainNumber(chosen.length)} of ${plainNumber(samples.total)} samples`;
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
    h("span", { class: "line" }, badge(sample), h("span", { class: "at" }, `step ${sample.step}`), h("span", { class: "reward" }, sample.reward === null ? "no reward" : `reward ${plainNumber(sample.reward)}`)),
    h("span", { class: "words" }, words.trim().slice(0, 160) || "(nothing was sampled)")));
}

function chooseSample(sample) {
  samples.key = keyOf(sample);
  for (const button of byId("sample-list").querySelectorAll("button.sample")) button.setAttribute("aria-pressed", String(button.dataset.key === samples.key));
  showSample(sample);
  history.replaceState(null, "", `#${linkOf(addressName(), sample)}`);
  const article = byId("sample");
  if (article.getBoundingClientRect().top > window.innerHeight * 0.8) article.scrollIntoView({ block: "start" });
}

const linkOf = (name, sample) => `${name}=${encodeURIComponent(keyOf(sample))}`;

function showSample(sample) {
  const box = byId("sample");
  samples.shown = sample;
  if (!sample) return box.replaceChildren();
  const fact = (name, value, note) => value === null || value === undefined ? null : h("div", {}, h("dt", {}, name), h("dd", { title: note }, value));
  const flags = [sample.is_truncated && "truncated", sample.num_interruptions > 0 && `interrupted ${sample.num_interruptions}×`].filter(Boolean);
  box.replaceChildren(
    h("h3", {}, `Step ${sample.step}, group ${sample.group_id}, sample ${sample.sample_index} `, badge(sample), ...flags.map(flag => h("span", { class: "badge flag" }, flag)),
      h("a", { class: "to-page", href: `#${linkOf("rollout", sample)}` }, "Open as a page"), h("a", { class: "to-run", href: `#${linkOf("sample", sample)}` }, "Back to the run"),
      copyButton(() => linkTo(linkOf(addressName(), sample)), "Copy link")),
    h("dl", { class: "facts" },
      fact("reward", sample.reward === null ? "none" : plainNumber(sample.reward)), ...Object.entries(sample.rewards ?? {}).map(([name, value]) => fact(name, plainNumber(value), "a part of the reward, before its weight")),
      fact("advantage", sample.advantage === undefined ? null : sample.advantage === null ? "not in the loss" : signed(sample.advantage), "as the trainer computed it, mean over its tokens in the loss"), fact("expected", sample.answer),
      fact("sampled", `${plainNumber(sample.num_sampled)} tokens`), fact("versions", [...new Set(sample.versions)].join("..") || null), fact("staleness", sample.staleness === null ? null : `${sample.staleness} ${sample.staleness === 1 ? "version" : "versions"}`, "of its oldest token in the loss"),
      fact("logprob gap", sample.logprob_gap === null ? null : amount(sample.logprob_gap, "nats"), "mean of |engine − trainer| over its fresh tokens"),
      fact("prompt", sample.prompt_id), fact("task", sample.task), ...Object.entries(sample.metrics).map(([name, value]) => fact(name, plainNumber(value)))),
    ...(sample.error ? [h("p", { class: "note bad" }, h("strong", {}, "Failed: "), sample.error)] : []),
    ...(sample.messages.length ? [h("h4", {}, "Prompt")] : []), ...sample.messages.map(messageBlock),
    ...turnsBlock(sample), ...colourTools(sample),
    ...(sample.parts.length ? sample.parts.map((part, at) => partBlock(part, at === 0, sample)) : [nothing("Nothing was sampled.")]),
    ...groupBlock(sample));
}

const addressName = () => document.body.classList.contains("one-rollout") ? "rollout" : "sample";
const signed = value => `${value > 0 ? "+" : value < 0 ? "−" : ""}${plainNumber(Math.abs(value))}`;

/* The rollouts of the same prompt next to each other, the best first. */
function groupBlock(sample) {
  const { group = [] } = sample, size = shown.page.runs[shown.run].settings.find(each => each.key === "rollout.group_size")?.value;
  if (!group.length) return [];
  return [h("h4", {}, `Its group: ${group.length}${group.length < Number(size) ? ` of ${size}` : ""} rollouts of this prompt, the best first`),
    h("div", { class: "group" }, group.map(([index, reward, advantage, num, text]) => {
      const other = samples.all.find(each => each.step === sample.step && each.group_id === sample.group_id && each.sample_index === index && each !== sample && index !== sample.sample_index);
      return h("div", { class: index === sample.sample_index ? "mate own" : "mate" },
        h("div", { class: "line" }, h("strong", {}, `reward ${plainNumber(reward)}`), h("span", { class: advantage > 0 ? "up" : advantage < 0 ? "down" : "" }, advantage === null ? "not in the loss" : `advantage ${signed(advantage)}`)),
        h("pre", {}, text), h("div", { class: "hint" }, `sample ${index}, ${num} ${num === 1 ? "token" : "tokens"}${index === sample.sample_index ? ", shown above" : ""} `,
          other ? h("button", { type: "button", class: "small", onclick: () => chooseSample(other) }, "Show") : null));
    }))];
}

/* The turns of an agent: what it was asked with, what it wrote, and what came back from its tools. */
function turnsBlock(sample) {
  const { parts } = sample, sampled = parts.filter(part => part.is_sampled);
  if (sampled.length < 2) return [];
  const isWhole = parts.every(part => part.num_tokens !== undefined) && sampled.reduce((sum, part) => sum + part.num_tokens, 0) === sample.num_sampled;
  const hasReward = sampled.some(part => part.reward !== undefined), short = text => { const words = text.trim().replace(/\s+/g, " "); return words.length > 120 ? `${words.slice(0, 120)} [...]` : words; };
  let turn = 0, context = 0, branch = null;
  const rows = parts.flatMap((part, at) => {
    if (part.branch !== branch) [branch, context] = [part.branch, 0];
    const asked = context, next = parts[at + 1];
    context += part.num_tokens ?? 0;
    if (!part.is_sampled) return [];
    const back = next && !next.is_sampled && next.branch === branch ? short(next.text) : "the end";
    return [[`${++turn}${branch ? `, branch ${branch}` : ""}${part.agent ? `, ${part.agent}` : ""}`, isWhole ? `${plainNumber(asked)} tokens` : "–", part.num_tokens === undefined ? "–" : `${plainNumber(part.num_tokens)} tokens`,
      versionsOf(part).map(version => `v${version}`).join(", ") || "–", ...(hasReward ? [part.reward === undefined ? "–" : plainNumber(part.reward)] : []), h("span", { class: "wrap" }, short(part.text)), h("span", { class: "wrap" }, back)]];
  });
  const title = isWhole ? `${turn} turns` : `The last ${turn} turns`;
  return [h("details", { class: "turns", open: true }, h("summary", {}, title), table(["Turn", "Request", "Answer", "Version", ...(hasReward ? ["Reward"] : []), "The model wrote", "Then came"], rows, "turns"))];
}

const versionsOf = part => [...new Set((part.versions ?? []).map(([, version]) => version))];

/* Colours for the tokens: none, by probability, or by the version of the weights that sampled them. */
function colourTools(sample) {
  if (!sample.parts.some(part => part.tokens)) return [];
  const versions = [...new Set(sample.parts.flatMap(versionsOf))].sort((a, b) => a - b);
  const keys = { none: [], probability: [100, 75, 50, 25, 0].map(percent => [`${percent}%`, tokenColour("probability", { percent }, versions)]), version: versions.map(version => [`version ${version}`, tokenColour("version", { version }, versions)]) };
  return [h("div", { class: "tools colours" }, choice("Color tokens by", [["none", "Nothing"], ["probability", "Probability"], ["version", "Version"]], samples.colour, value => { samples.colour = value; showSample(sample); byId("sample").querySelector(`input[value=${value}]`)?.focus(); }),
    h("span", { class: "legend" }, keys[samples.colour].map(([text, colour]) => h("span", { class: "key" }, h("span", { class: "swatch", style: { background: colour } }), text))))];
}

function tokenColour(kind, { percent, version }, versions) {
  if (kind === "probability") return percent === undefined ? "" : faded(css("--bad"), +(0.6 * (1 - percent / 100)).toFixed(2));
  return version === undefined ? "" : faded(runColour(versions.indexOf(version)), 0.3);
}

/* A sampled text in tokens {text, percent, version}; a part that is not known token by token is one piece. */
function piecesOf(part) {
  const letters = Array.from(part.text), pieces = [], marks = part.text.includes("(hidden)") ? "" : part.tokens ?? "";
  let end = 0;
  for (let at = 0; at + 3 <= marks.length; at += 3) {
    const start = end, version = (part.versions ?? []).findLast(([first]) => first <= at / 3)?.[1];
    end += marks.charCodeAt(at) - 48;
    if (end > start) pieces.push({ text: letters.slice(start, end).join(""), percent: Number(marks.slice(at + 1, at + 3)), version });
  }
  if (end > letters.length) return [{ text: part.text }];
  return end < letters.length ? [...pieces, { text: letters.slice(end).join("") }] : pieces;
}

function messageBlock(message) {
  const { role, content, ...rest } = message;
  const other = Object.keys(rest).length ? JSON.stringify(rest, null, 2) : "";
  return h("div", { class: "turn given" }, h("span", { class: "role" }, role ?? "?"), h("pre", {}, [content, other].filter(Boolean).join("\n")));
}

function partBlock(part, isPrompt, sample) {
  const branch = part.branch ? `, branch ${part.branch}` : "", size = part.num_tokens === undefined ? "" : `, ${plainNumber(part.num_tokens)} ${part.num_tokens === 1 ? "token" : "tokens"}`;
  const reward = part.reward === undefined ? "" : `, reward ${plainNumber(part.reward)}`;
  if (!part.is_sampled) {
    const text = h("pre", {}, part.text);
    if (isPrompt) return h("details", { class: "turn given" }, h("summary", {}, `the prompt as the model saw it${size}`), text);
    return h("div", { class: "turn given" }, h("span", { class: "role" }, `not sampled: template or tools${branch}${size}`), text);
  }
  const versions = [...new Set(sample.parts.flatMap(versionsOf))].sort((a, b) => a - b);
  const pieces = samples.colour === "none" ? [{ text: part.text }] : piecesOf(part);
  const spans = pieces.map(piece => piece.percent === undefined ? piece.text : h("span", { title: `probability ${piece.percent}%, version ${piece.version}`, style: { background: tokenColour(samples.colour, piece, versions) } }, piece.text));
  return h("div", { class: "turn model" }, h("span", { class: "role" }, `model${branch}${size}${reward}`), h("pre", {}, spans));
}
