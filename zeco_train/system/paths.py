"""Early checks of user-given paths: unusable ones are refused with a one-line error before any work."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from zeco_train.errors import ConfigError

# Linux allows 4096 bytes; the rest is for the names of files inside.
_MOST_BYTES = 3500
_SHOWN_CHARACTERS = 500


def path_problem(path: str | Path) -> str | None:
    """Why the system cannot look up a path (not that it does not exist); None if it can.

    `Path.exists()` and the like return False for some of these and raise OSError, RuntimeError or ValueError for
    others.
    """
    text = os.fspath(path)
    if not text:
        return "is empty"
    if "\0" in text:
        return "contains a NUL character"
    try:
        length = len(os.fsencode(Path(text).absolute()))
        if length > _MOST_BYTES:
            return f"is too long for a path ({length:,} bytes, at most {_MOST_BYTES:,})"
        Path(text).stat()
    except UnicodeEncodeError:
        return "contains characters that no path can have"
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            return f"cannot be looked up ({error.strerror})"
    return None


def is_within(path: Path, folder: Path) -> bool:
    """Whether a resolved path lies in a resolved folder.

    Or in the blobs of the hub's cache if the folder is a snapshot there, where all files are links to them:
    `models--NAME/snapshots/REVISION/`.
    """
    cache = folder.parent.parent
    is_snapshot = folder.parent.name == "snapshots" and cache.name.startswith(("models--", "datasets--"))
    return path.is_relative_to(folder) or (is_snapshot and path.is_relative_to(cache / "blobs"))


def is_plain_name(name: str) -> bool:
    """Whether `name` is a plain file name, which cannot lead out of its folder or into a subfolder."""
    return 0 < len(name) < 256 and not set(name) & {"/", "\0"} and name not in (".", "..")


def is_utf8(text: str) -> bool:
    """Whether a text from the command line, or a path, was UTF-8; other bytes are surrogates in Python."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def check_path(field: str, path: str | Path) -> None:
    """Raise ConfigError for a path that has a `path_problem`."""
    if (problem := path_problem(path)) is not None:
        raise ConfigError(field, shown(path), problem)


def check_output_file(field: str, path: str | Path) -> None:
    """Raise ConfigError unless a file can be written later, without changing anything; its folder must exist."""
    check_path(field, path)
    file = Path(path)
    if _is_folder(file):
        raise ConfigError(field, path, "is a folder; name a file")
    if not _is_folder(file.parent):
        problem = "its folder does not exist" if _is_folder(file.parent) is None else "its folder is a file"
        raise ConfigError(field, path, problem)
    # An existing file is overwritten, or replaced by a temporary file in its folder.
    for place in (file.parent, file):
        if _is_folder(place) is not None and not os.access(place, os.W_OK):
            raise ConfigError(field, path, f"cannot be written ({_denied(place)})")


def check_output_folder(field: str, path: str | Path, remedy: str = "name another folder") -> None:
    """Raise ConfigError unless a folder is writable, or can be created with its parents; without creating it."""
    check_path(field, path)
    place = Path(path).absolute()
    # Up to the nearest parent that exists; a dangling link stops the search, since no folder can be made there.
    while _is_folder(place) is None and not place.is_symlink():
        place = place.parent
    if not _is_folder(place):
        problem = "is a link to nothing" if _is_folder(place) is None else "is a file"
        raise ConfigError(field, path, f"cannot be written ({place} {problem}); {remedy}")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(field, path, f"cannot be written ({_denied(place)}); {remedy}")


def check_outputs(field: str, folder: str | Path, names: Sequence[str]) -> None:
    """`check_output_folder` for result files of these names, and `warn_of_replacing` for existing ones."""
    check_output_folder(field, folder)
    if _is_folder(Path(folder)):
        files = [Path(folder, name) for name in names]
        for file in files:
            check_output_file(field, file)
        warn_of_replacing(files)


def warn_of_replacing(files: Iterable[str | Path]) -> None:
    """Warn the user on stderr which existing files the results will replace."""
    existing = [str(path) for path in files if _is_folder(Path(path)) is False]
    if existing:
        verb = "exists and is" if len(existing) == 1 else "exist and are"
        print(f"warning: {', '.join(existing)} {verb} replaced in the end", file=sys.stderr, flush=True)


def shown(path: str | Path) -> str:
    """A path for a message: NUL characters escaped, and truncated if very long."""
    text = str(path).replace("\0", "\\0")
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _is_folder(path: Path) -> bool | None:
    # None if the path does not exist or cannot be looked up.
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError:
        return None


def _denied(place: Path) -> str:
    # The system's reason why `place` is not writable.
    flags = os.statvfs(place).f_flag
    return f"{place}: {os.strerror(errno.EROFS if flags & os.ST_RDONLY else errno.EACCES)}"
