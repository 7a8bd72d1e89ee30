"""Output of the commands, on terminals and in files of any encoding: safe text, and tables."""

from __future__ import annotations

import errno
import io
import os
import re
import select
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Characters that move the cursor, change colours, titles or the clipboard, or reorder the displayed text: C0, C1, and
# the bidirectional embeddings, overrides and isolates. Tabs and line ends are kept. Surrogates stand for a path's bytes
# that are no UTF-8, which neither files nor pictures take.
_HIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)")


def visible(text: str) -> str:
    r"""Escape control characters, as in "\x1b", and bytes of a path that are no UTF-8, as in "\udcff".

    In names from an untrusted file, or in a document's text, they would be commands to the terminal.
    """
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)


def show_any_text() -> None:
    """Make stdout print a question mark for characters that its encoding lacks, instead of raising.

    A locale without UTF-8 lacks the Greek letters of messages, and no encoding has the bytes of a path that is not
    valid text. stderr already escapes such characters.
    """
    # Tests and notebooks may have replaced sys.stdout.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def is_reader_gone(error: BaseException) -> bool:
    """Whether an error means that the reader of stdout is gone (`| head`, the terminal); stdout is /dev/null then."""
    if not (isinstance(error, BrokenPipeError) or (isinstance(error, OSError) and error.errno == errno.EIO)):
        return False
    poll = select.poll()
    # POLLERR and POLLHUP, by which pipes and terminals report it, are returned without being asked for.
    poll.register(sys.stdout.fileno(), 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


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
