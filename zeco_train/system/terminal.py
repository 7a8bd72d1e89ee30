"""What our commands print, on terminals and in files of any encoding."""

from __future__ import annotations

import io
import os
import re
import select
import sys

# What moves the cursor, changes colours, titles or the clipboard, or shows text in another order than it has: C0, C1,
# and the bidirectional embeddings, overrides and isolates. Tabs and ends of lines stay.
_HIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]|\r(?!\n)")


def visible(text: str) -> str:
    """`text` with its control characters as one could write them, "\\x1b": what is named in a stranger's file, or is
    the text of a document, would otherwise be a command to the terminal."""
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)


def show_any_text() -> None:
    """Have stdout show a question mark for what its encoding lacks; by itself it would end the command.

    A locale without UTF-8 has no Greek letters, arrows or dots of ours; and no encoding has the bytes of a path that
    is not text. stderr shows such as escapes by itself.
    """
    # A test, or a notebook, may have put something else in its place.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def nobody_reads() -> bool:
    """Whether stdout leads nowhere any more, as after `| head`; if so, what is written to it from now on is dropped."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
