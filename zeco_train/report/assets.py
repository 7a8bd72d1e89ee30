"""The page's styles and script."""

STYLE = """
:root { --paper: #ffffff; --ink: #1c2733; --quiet: #56616c; --line: #d5dbe1; --band: #f4f6f8; --link: #1d5fa8; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181d; --ink: #d7dde4; --quiet: #98a4b0; --line: #36404a; --band: #1c2229; --link: #6cb6ff; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 112rem; padding: 1.5rem clamp(1rem, 3vw, 3rem); background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .75rem; }
header p { color: var(--quiet); margin: 0; max-width: 70rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .5rem .75rem; color: var(--quiet); }
th, td { padding: .35rem .75rem; text-align: left; white-space: nowrap; border-top: 1px solid var(--line); }
tbody tr:nth-child(odd) { background: var(--band); }
tbody th { font-weight: 600; position: sticky; left: 0; background: inherit; }
tbody tr:nth-child(even) { background: var(--paper); }
.number { text-align: right; }
thead button { all: unset; cursor: pointer; font-weight: 600; color: var(--link); }
thead button:focus-visible, .scroll:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
section { display: block; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 32rem), 1fr)); gap: 1.25rem; }
figure { margin: 0; max-width: 60rem; }
figure.wide { max-width: 88rem; margin-bottom: 1.25rem; }
figure img { width: 100%; height: auto; border: 1px solid var(--line); border-radius: 6px; }
img.paper { background: #ffffff; }
figcaption { color: var(--quiet); overflow-wrap: anywhere; }
@media print { thead button { color: inherit; } .scroll { overflow: visible; } }
"""

# Without it the tables are in the order in which the runs were given.
SCRIPT = """
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
"""
