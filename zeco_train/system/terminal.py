"""Output of the commands, on terminals and in files of any encoding: safe text, and tables."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
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


def report_to_launcher(text: str) -> None:
    """Leave the reason of this rank's end to torchrun, whose report ends with the first failed rank's.

    In the format of `torch.distributed.elastic`'s `record`, which writes tracebacks only. Without torchrun: nothing.
    """
    if (name := os.environ.get("TORCHELASTIC_ERROR_FILE")) is None:
        return
    details = {"py_callstack": text, "timestamp": str(int(time.time()))}
    # torchrun cannot end properly with half a file, as one of a rank that is killed meanwhile.
    partial = Path(f"{name}.{os.getpid()}")
    with suppress(OSError):
        partial.write_text(json.dumps({"message": {"message": text, "extraInfo": details}}))
        partial.replace(name)


# Waits for the end of the process that is its first argument, and prints the second one.
_REPEAT = """
import os, select, sys
try:
    poll = select.poll()
    poll.register(os.pidfd_open(int(sys.argv[1])), select.POLLIN)
    has_ended = bool(poll.poll(60_000))
except OSError as error:
    has_ended = isinstance(error, ProcessLookupError)
if has_ended:
    os.write(2, os.fsencode(sys.argv[2]))
"""


def repeat_below_launcher(line: str) -> None:
    """Print a line again on stderr as soon as torchrun has ended, which prints a traceback of its own after its ranks.

    By a process that survives the ranks' session, for a minute at most. Under other launchers, or none: nothing.
    """
    if is_below_torchrun():
        command = [sys.executable, "-I", "-S", "-c", _REPEAT, str(os.getppid()), f"{line}\n"]
        with suppress(OSError):
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)


def is_below_torchrun() -> bool:
    """Whether torchrun itself, not a launcher built on its agent, has started this process as a rank."""
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    # `python torchrun …`, `python -m torch.distributed.run …`.
    names = {b"torchrun", b"torchrun.py", b"torch.distributed.run", b"run.py"}
    return "TORCHELASTIC_RUN_ID" in os.environ and any(part.rpartition(b"/")[2] in names for part in command[:4])
