/* The filter of the reference pages: rows, and in the list of sections keys, that contain all words. */

function fillFilter(box) {
  const tables = [...box.parentElement.querySelectorAll("table")];
  const input = Object.assign(document.createElement("input"), { type: "search", placeholder: "Filter: max_tokens, staleness ...", ariaLabel: "Filter" });
  const count = Object.assign(document.createElement("span"), { role: "status" });
  const isList = tables.some(table => table.querySelector("td > a > code"));
  const apply = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean), has = node => words.every(word => node.textContent.toLowerCase().includes(word));
    let shown = 0, all = 0;
    for (const row of tables.flatMap(table => [...table.tBodies[0].rows])) {
      const keys = isList ? [...row.cells[1].querySelectorAll("a")] : [row];
      keys.forEach(key => { key.hidden = !has(key); });
      const left = keys.filter(key => !key.hidden).length;
      row.hidden = !left;
      shown += left;
      all += keys.length;
    }
    for (const table of tables) table.hidden = [...table.tBodies[0].rows].every(row => row.hidden);
    count.textContent = `${shown} of ${all}`;
  };
  input.addEventListener("input", apply);
  box.append(input, count);
  apply();
}

document.querySelectorAll(".key-filter").forEach(fillFilter);
