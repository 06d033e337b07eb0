/* The live page asks for newer data every two seconds, while it is seen. */

const LIVE_MS = 2000;

/* Parts of `now` that are equal to those of `old` keep their identity, so that only what changed is drawn. */
function merged(old, now) {
  if (JSON.stringify(old) === JSON.stringify(now)) return old;
  if (!old || !now || typeof old !== "object" || typeof now !== "object" || Array.isArray(old) !== Array.isArray(now)) return now;
  if (Array.isArray(now)) return now.length > 64 ? now : now.map((each, at) => merged(old[at], each));
  return Object.fromEntries(Object.entries(now).map(([key, each]) => [key, key in old ? merged(old[key], each) : each]));
}

/* An ended run may be resumed, so the page keeps asking. */
function startLive(madeOf, hasEnded, onPage) {
  const key = new URLSearchParams(location.search).get("key");
  const tell = (text, kind) => { const box = byId("live"); box.hidden = false; box.textContent = text; box.className = `pill ${kind}`; };
  const ask = async () => {
    try {
      if (!document.hidden) {
        const answer = await fetch(`page.json?since=${madeOf()}${key ? `&key=${encodeURIComponent(key)}` : ""}`);
        if (answer.status === 200) { const now = await answer.json(); onPage(old => merged(old, now)); }
        if (answer.ok) tell(...(hasEnded() ? ["ended", ""] : ["live", "is-live"]));
        else tell(`error ${answer.status}`, "is-cut");
      }
    } catch { tell("not connected: trying again", "is-cut"); }
    setTimeout(ask, LIVE_MS);
  };
  ask();
}
