for (const table of document.querySelectorAll("table")) {
  const headings = [...table.tHead.rows[0].cells];
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.sort === undefined ? cell.textContent : Number(cell.dataset.sort);
  };
  const compare = (a, b) => {
    // Empty cells last, whichever way it goes; numbers before text.
    if (a === b) return 0;
    if (typeof a === "number" && typeof b === "number") return a - b;
    if (typeof a === "number") return -1;
    if (typeof b === "number") return 1;
    return a.localeCompare(b, undefined, {numeric: true});
  };
  headings.forEach((heading, column) => heading.firstElementChild.addEventListener("click", () => {
    const down = heading.getAttribute("aria-sort") === "ascending";
    headings.forEach(other => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = table.tBodies[0];
    const rows = [...body.rows].map(row => [key(row, column), row]);
    const full = rows.filter(([value]) => value !== ""), empty = rows.filter(([value]) => value === "");
    full.sort(([a], [b]) => down ? compare(b, a) : compare(a, b));
    body.append(...[...full, ...empty].map(([, row]) => row));
  }));
}
