/* The live page: changes come as server-sent events. A hidden tab holds no connection: it asks again when it is seen. */

const live = { source: null };

/* What watch.py made of two pages: ["=", value], ["{", changes, gone keys], ["@", changes by index],
   ["[", left out at the front, kept, added]. */
function changed(old, patch) {
  const [kind, ...rest] = patch;
  if (kind === "=") return rest[0];
  if (kind === "[") return [...old.slice(rest[0], rest[0] + rest[1]), ...rest[2]];
  if (kind === "@") return old.map((each, at) => at in rest[0] ? changed(each, rest[0][at]) : each);
  const now = { ...old };
  for (const [key, each] of Object.entries(rest[0])) now[key] = changed(old[key], each);
  for (const key of rest[1]) delete now[key];
  return now;
}

/* `madeOf` says when the page that is shown was made: the server sends what has changed since. */
function startLive(madeOf, onPage, onNotes) {
  const connect = () => {
    if (live.source || document.hidden) return;
    live.source = new EventSource(`events?since=${madeOf()}`);
    const tell = (text, kind) => { const box = byId("live"); box.hidden = false; box.textContent = text; box.className = `pill ${kind}`; };
    live.source.onopen = () => tell("live", "is-live");
    live.source.onerror = () => {
      tell("not connected: trying again", "is-cut");
      const isShut = live.source.readyState === EventSource.CLOSED;
      live.source.close();
      live.source = null;
      setTimeout(connect, isShut ? 5000 : 1500);  // with the version that is shown now, not that of the first connection
    };
    live.source.addEventListener("page", event => onPage(() => JSON.parse(event.data)));
    live.source.addEventListener("change", event => onPage(page => changed(page, JSON.parse(event.data))));
    live.source.addEventListener("notes", event => onNotes(JSON.parse(event.data)));
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { live.source?.close(); live.source = null; } else connect();
  });
  addEventListener("pagehide", () => live.source?.close());
  connect();
}
