"""Safe output of the commands, on terminals and in files of any encoding."""

from __future__ import annotations

import errno
import io
import os
import re
import select
import sys

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
