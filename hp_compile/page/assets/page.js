"use strict";
(() => {
  const table = document.getElementById("parameter-table");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const filter = document.getElementById("filter");
  const changed = document.getElementById("only-changed");
  const count = document.getElementById("count");

  function show() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const differs = !changed || !changed.checked || row.className !== "";
      row.hidden = !(differs && words.every((word) => text.includes(word)));
      shown += row.hidden ? 0 : 1;
    }
    count.textContent = `${shown} of ${rows.length}`;
  }

  function compare(a, b) {
    const [x, y] = [Number(a), Number(b)];
    if (a !== "" && b !== "" && !Number.isNaN(x) && !Number.isNaN(y)) return x - y;
    return a.localeCompare(b, undefined, { numeric: true });
  }

  function sort(column) {
    const heads = [...table.tHead.rows[0].cells];
    const down = heads[column].getAttribute("aria-sort") === "ascending";
    heads.forEach((head) => head.setAttribute("aria-sort", "none"));
    heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
    rows.sort((a, b) => compare(a.cells[column].dataset.key, b.cells[column].dataset.key));
    if (down) rows.reverse();
    body.append(...rows);
  }

  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => sort(column));
  });
  filter.addEventListener("input", show);
  if (changed) changed.addEventListener("change", show);
  for (const [id, open] of [["open-all", true], ["close-all", false]]) {
    document.getElementById(id).addEventListener("click", () => {
      document.querySelectorAll("details").forEach((item) => { item.open = open; });
    });
  }
  show();
})();
