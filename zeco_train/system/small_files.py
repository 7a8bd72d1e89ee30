"""Reads small untrusted files: regular files of bounded size, and JSON of bounded depth.

A store, a run or an export may come from someone else, and any file in it may link to anything: reading `/dev/zero` or
a FIFO would never end. Callers treat an `OSError` of this module like one of the system.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from zeco_train.errors import check_open_files

# Far more than this project writes: 100,000 shards of a token store, or tensors of an index, are about 15 MB of JSON.
LARGEST_BYTES = 64 << 20
# This project's files have four levels. Beyond Python's own limit, parsing raises RecursionError, not ValueError.
DEEPEST = 32

_READ_BYTES = 1 << 20
# A tokenizer's model_max_length has 31. Python raises wherever an integer of more than 4300 digits is printed.
_MOST_DIGITS = 400


def read_small(path: str | Path, largest: int = LARGEST_BYTES) -> bytes:
    """The contents of a regular file, or a link to one, of at most `largest` bytes.

    Raises OSError (`strerror` has the reason) if it is not, or cannot be read; OpenFilesError if too many are open.
    """
    check_regular(path)
    # Not blocking, and checked again: the path may name another file by now.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        check_open_files(error)
        raise
    with os.fdopen(descriptor, "rb") as file:
        _check_regular(os.fstat(file.fileno()), path)
        contents = bytearray()
        # Does not use st_size, which is 0 for files of /proc.
        while len(contents) <= largest and (part := file.read(_READ_BYTES)):
            contents += part
    if len(contents) > largest:
        raise OSError(errno.EFBIG, f"larger than {largest:,} bytes", str(path))
    return bytes(contents)


def check_regular(path: str | Path) -> None:
    """Raise OSError unless `path` is a regular file or a link to one; before it is opened.

    Opening a FIFO waits for a writer, and opening a device may have side effects.
    """
    _check_regular(Path(path).stat(), path)


def read_json(path: str | Path) -> Any:
    """The value in a small JSON file. Raises as `read_small` and `parse_json`."""
    return parse_json(read_small(path))


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError if it is none, is nested too deeply, or has huge integers."""
    try:
        value = json.loads(text, parse_int=_integer)
    except RecursionError as error:
        raise ValueError(f"nested deeper than {DEEPEST} levels") from error
    level = [value]
    for _ in range(DEEPEST):
        values = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [part for each in values for part in each]
    if level:
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    return value


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _check_regular(status: os.stat_result, path: str | Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def shown_value(value: object) -> str:
    """A value from a file, for a message: in ASCII, truncated if it is long."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
