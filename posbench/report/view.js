// Shows the rows that have all typed words. Without this script the table is whole.
(() => {
  "use strict";
  const filter = document.querySelector(".filter");
  const field = filter.querySelector("input");
  const rows = [...document.querySelectorAll("tbody tr")];
  function apply() {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
    const shown = rows.filter(row => !row.hidden).length;
    filter.querySelector("[role=status]").textContent = words.length ? `${shown} of ${rows.length}` : "";
  }
  field.addEventListener("input", apply);
  filter.hidden = false;
  apply();
})();
