"""What our commands print, on terminals and in files of any encoding."""

from __future__ import annotations

import io
import sys


def show_any_text() -> None:
    """Have stdout show a question mark for what its encoding lacks; by itself it would end the command.

    A locale without UTF-8 has no Greek letters, arrows or dots of ours; and no encoding has the bytes of a path that
    is not text. stderr shows such as escapes by itself.
    """
    # A test, or a notebook, may have put something else in its place.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
