/* Elements, numbers in words, colours. Text goes into the page as text nodes alone: what a model wrote is never HTML. */

function h(tag, props, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined).map(child => typeof child === "string" ? written(child) : child));
  return node;
}

/* Control characters written out, but line end and tab: some turn text around, and one would read what the model did not write. */
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;
function written(text) {
  return text.replace(CONTROL, one => { const code = one.charCodeAt(0); return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`; });
}

const byId = id => document.getElementById(id);
const bodyOf = id => document.querySelector(`#${id} > .body`);
const nothing = text => h("p", { class: "empty" }, text);

function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 0) return "−" + duration(-seconds);
  if (seconds === 0) return "0 s";
  if (seconds < 0.9995) return seconds < 0.0009995 ? `${+(seconds * 1e6).toPrecision(2)} µs` : `${+(seconds * 1000).toPrecision(3)} ms`;
  if (seconds < 59.95) return `${seconds < 10 ? seconds.toFixed(2) : seconds.toFixed(1)} s`;
  const all = Math.round(seconds), minutes = Math.floor(all / 60);
  if (minutes < 60) return `${minutes} min ${String(all % 60).padStart(2, "0")} s`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${(minutes / 1440).toFixed(1)} days`;
}

function bytes(value) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (Math.abs(value) >= 1024 && at < units.length - 1) { value /= 1024; at++; }
  return `${at ? +value.toPrecision(3) : value} ${units[at]}`;
}

function plainNumber(value) {
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size && size < 1e-4 ? value.toExponential(2) : String(+value.toPrecision(4));
}

/* A value of a metric with its unit, as run.gauges names it. */
function amount(value, unit) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (unit === "s") return duration(value);
  if (unit === "bytes") return bytes(value);
  if (unit === "0..1") return `${+(100 * value).toPrecision(3)}%`;
  return unit ? `${plainNumber(value)} ${unit}` : plainNumber(value);
}

/* Ticks of an axis as texts that differ: with more digits where amount() rounds two of them to the same. */
function tickTexts(ticks, unit) {
  const texts = ticks.map(tick => amount(tick, ["s", "bytes", "0..1"].includes(unit) ? unit : ""));
  if (new Set(texts).size === texts.length) return texts;
  const [scale, end] = { s: [1, " s"], "0..1": [100, "%"], bytes: [1 / 2 ** 20, " MiB"] }[unit] ?? [1, ""];
  const least = Math.min(...ticks.slice(1).map((tick, at) => Math.abs(tick - ticks[at]) * scale));
  const digits = Math.min(12, Math.max(0, Math.ceil(-Math.log10(least || 1))));
  return ticks.map(tick => `${(tick * scale).toFixed(digits)}${end}`);
}

/* A name that may break after its slashes, dots and underscores. */
const breakable = name => name.split(/(?<=[/._])/).flatMap(piece => [piece, h("wbr")]);

const when = seconds => new Date(1000 * seconds).toISOString().slice(0, 19).replace("T", " ") + " UTC";
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const runColour = index => css(`--run-${index % 8}`);

/* The colours of the shares of time; training and waiting have them in the timeline, too. */
const OF_WORDS = [[/generation/, "--generation"], [/rewards/, "--rewards"], [/teaching/, "--run-3"], [/straggl/, "--stragglers"], [/publish/, "--publishing"], [/handover/, "--turns"], [/train/, "--training"]];

function colourOf(name) {
  const found = OF_WORDS.find(([words]) => words.test(name.toLowerCase()));
  return css(found ? found[1] : "--other");
}

function faded(colour, alpha) {
  const [r, g, b] = [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16));
  return `rgba(${r}, ${g}, ${b}, ${alpha})`;
}

/* A group of radio buttons that look like one switch. */
function choice(legend, options, chosen, onChange) {
  const name = `choice-${legend.replace(/\W+/g, "-")}`;
  const buttons = options.map(([value, text]) => h("label", {},
    h("input", { type: "radio", name, value, checked: value === chosen, onchange: () => onChange(value) }), h("span", {}, text)));
  return h("fieldset", { class: "choice" }, h("legend", {}, legend), ...buttons);
}

function table(heads, rows, kind) {
  const cells = (row, tag) => row.map((cell, at) => {
    const node = h(at === 0 && tag === "td" ? "th" : tag, at === 0 && tag === "td" ? { scope: "row" } : tag === "th" ? { scope: "col" } : {});
    node.append(cell instanceof Node ? cell : written(String(cell)));
    return node;
  });
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${kind || ""} table` },
    h("table", { class: kind }, h("thead", {}, h("tr", {}, cells(heads, "th"))),
      h("tbody", {}, rows.map(row => h("tr", { class: row.className }, cells(row, "td"))))));
}

/* Remembers where the keyboard was, by data-key, over a drawing of a part. */
function keepingFocus(box, draw) {
  const key = box.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  draw();
  if (key !== undefined) [...box.querySelectorAll("[data-key]")].find(node => node.dataset.key === key)?.focus({ preventScroll: true });
}
