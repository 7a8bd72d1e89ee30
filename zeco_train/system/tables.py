"""Tables of commands, as text for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# By field of a row: heading and style, ALIGN WIDTH : FORMAT, as in `>8:.3f`.
Columns = Mapping[str, tuple[str, str]]
Row = Mapping[str, Any]


def format_table(rows: Iterable[Row], columns: Columns, *, heading: bool = True, gap: str = "  ") -> str:
    """Rows under headings, with `gap` between columns."""
    lines = [format_heading(columns, gap)] if heading else []
    return "\n".join([*lines, *(format_row(row, columns, gap) for row in rows)])


def format_heading(columns: Columns, gap: str = "  ") -> str:
    """The line of headings."""
    return gap.join(_cell(title, style) for title, style in columns.values())


def format_row(row: Row, columns: Columns, gap: str = "  ") -> str:
    """A line; `-` for a missing field, text as it is; the row's `note` comes last."""
    cells = []
    for name, (_, style) in columns.items():
        value = row.get(name)
        text = "-" if value is None else value if isinstance(value, str) else format(value, style.partition(":")[2])
        cells.append(_cell(text, style))
    return gap.join(cells).rstrip() + (f"  {row['note']}" if row.get("note") else "")


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[object]], align: Sequence[str] = ()) -> str:
    """A Markdown table of cells as text; `align` has `---` or `---:` for each column, left by default."""
    rule = "|" + "|".join(align or ["---"] * len(headings)) + "|"
    first, *rest = ("| " + " | ".join(map(str, cells)) + " |" for cells in (headings, *rows))
    return "\n".join([first, rule, *rest]) + "\n"


def _cell(text: str, style: str) -> str:
    return format(text, style.partition(":")[0])
