"""Atomic, durable writes of files and folders, file locks, one-line errors for system failures, and values for JSON."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import hashlib
import json
import logging
import math
import os
import resource
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from zeco_train.errors import DataError, system_errors

METRICS_FILE = "metrics.jsonl"
# Present in every run's folder: the settings that its starts share.
IDENTITY_FILE = "identity.json"


def jsonable(value: Any, replace: Callable[[float], Any] = str) -> Any:
    """Replace each non-finite float x by `replace(x)`, by default text, recursively in mappings and lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else replace(value)
    if isinstance(value, Mapping):
        return {key: jsonable(item, replace) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item, replace) for item in value]
    return value


logger = logging.getLogger(__name__)

BYTE_ORDER_MARK = "\ufeff"
# As file systems without an operation answer: FUSE, FAT, and network ones.
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EPERM, errno.EBADF)
# Open at once without sockets to peers: shards of token stores, and as many others. The usual soft limit is 1,024.
OPEN_SHARDS = 256
FILES_OF_A_PROCESS = 2 * OPEN_SHARDS
_LOCK_SUFFIX = ".lock"
_OLD_SUFFIX = ".old"
# Linux's constants for renameat2, which `os` does not offer.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Write `path` atomically: yields a temporary path beside it, which replaces `path` after the block.

    The file is flushed to disk. If the block raises, or the process is killed, `path` is unchanged.
    """
    # The pid alone is not unique: processes of several nodes may share the folder.
    partial = path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield partial
        sync_file(partial)
        partial.replace(path)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def write_durably(path: Path, text: str) -> None:
    """Write a file atomically and flush it to disk."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def decode_text(contents: bytes) -> str:
    """Decode UTF-8; a byte-order mark at the start is no text. Raises UnicodeDecodeError."""
    return contents.decode("utf-8").removeprefix(BYTE_ORDER_MARK)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's contents, in hexadecimal."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def allow_open_files(needed: int) -> int:
    """Raise this process's soft limit of open files to `needed`, at most to the hard one; returns that (< 0: none)."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # "Unlimited" is a negative number.
    if 0 <= allowed < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if most < 0 else min(needed, most), most))
    return most


def sync_file(path: Path) -> None:
    """Flush a file's contents to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk, on file systems that can; some network ones neither support nor need it."""
    with _if_supported():
        sync_file(path)


def make_readable(path: Path) -> None:
    """Let all users read a file, on file systems with permissions."""
    with _if_supported():
        path.chmod(0o644)


@contextmanager
def _if_supported() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def take_lock(path: Path) -> tuple[int, str | None]:
    """Open and lock a file, creating it if needed, until the descriptor closes or the process exits.

    Returns the descriptor; and why the file system cannot lock, None if it can. Raises BlockingIOError if another
    process holds it, OSError if it cannot be opened, or is a link, which could lead to any file of the user.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        problem: str | None = None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError as error:
            problem = error.strerror or str(error)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor, problem
        # The last owner has removed the file between the open and the lock.
        os.close(descriptor)


def write_locked(lock: int, content: bytes) -> None:
    """Make `content` the contents of a file of `take_lock`, on disk. Not by a rename, which would lose the lock."""
    if os.pread(lock, 1 + len(content), 0) != content:
        os.ftruncate(lock, 0)
        os.pwrite(lock, content, 0)
        os.fsync(lock)


@contextmanager
def atomic_folder(
    out: Path, *, replace: Callable[[Path], None] | None = None, remedy: str = "choose another folder"
) -> Iterator[Path]:
    """Context manager: a new, empty folder beside `out`, renamed to `out` if the block ends without an exception.

    The caller must fsync its files. If the block raises or the process is killed, `out` is unchanged, and the next one
    removes the leftovers: a temporary folder is in use as long as the lock file beside it is locked. `replace`:
    exchange an existing folder for the new one and delete the old one, unless this raises for it; `remedy`: advice to
    the user. Raises DataError if `out` exists, is not empty, and may not be replaced, or the system refuses to write.
    """
    with write_errors(out, remedy):
        make_parent(out, remedy)
        remove_leftovers(out)
        temporary, lock = _claim(out)
        try:
            # Only after the lock exists: a folder without one would never be recognised as a leftover.
            temporary.mkdir()
            yield temporary
            move_into_place(temporary, out, replace)
            # A rename is durable only once its folder is synced.
            sync_folder(out.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            lock_path(temporary).unlink(missing_ok=True)
            os.close(lock)


def make_parent(out: Path, remedy: str) -> None:
    """Create the parent folder of `out`. Raises DataError if it is a file."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise DataError(out, f"cannot be written ({out.parent} is a file)", remedy) from error


def lock_path(temporary: Path) -> Path:
    """The lock file of `temporary`: locked while its owner is alive."""
    return temporary.with_name(temporary.name + _LOCK_SUFFIX)


def remove_leftovers(out: Path) -> None:
    """Delete the temporary folders of `out` left by interrupted runs; keep those of live processes."""
    for lock_file in sorted(out.parent.glob(glob.escape(f".{out.name}.tmp-") + "*" + _LOCK_SUFFIX)):
        # OSError: another user's folder, or a file system without locks. Skip it; nothing ever loads it.
        with contextlib.suppress(OSError), lock_file.open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary = lock_file.with_name(lock_file.name.removesuffix(_LOCK_SUFFIX))
            old = temporary.with_name(temporary.name + _OLD_SUFFIX)
            if old.exists() and not out.exists():
                old.rename(out)  # killed between the two renames of a replacement: the old store is the valid one
            shutil.rmtree(old, ignore_errors=True)
            shutil.rmtree(temporary, ignore_errors=True)
            lock_file.unlink()


def _claim(out: Path) -> tuple[Path, int]:
    # A temporary name (of a not yet existing folder), and the descriptor of its lock.
    while True:
        temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
        # Without locks (some network file systems) leftovers stay until the user deletes them; nothing else changes.
        # Between open and lock another process may lock the file as a leftover; then retry with a new name.
        with contextlib.suppress(BlockingIOError):
            return temporary, take_lock(lock_path(temporary))[0]


def move_into_place(temporary: Path, out: Path, replace: Callable[[Path], None] | None) -> None:
    """Rename a folder to `out`, atomically where supported. A replaced folder is left at `temporary`, or deleted.

    Raises DataError if `out` exists, is not empty, and `replace` is None or raises for it.
    """
    # The rename is the check: it replaces an empty folder only. Looking first would race with other processes.
    try:
        temporary.rename(out)
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        if replace is None:
            raise DataError(out, "exists already", "nothing was changed") from error
    replace(out)
    try:
        _exchange(temporary, out)  # the old folder now has the temporary name, and is deleted with it
    except (OSError, AttributeError) as error:
        logger.warning("%s: this file system cannot exchange folders (%s); using two renames", out, error)
        old = temporary.with_name(temporary.name + _OLD_SUFFIX)
        out.rename(old)
        try:
            temporary.rename(out)
        except OSError:
            old.rename(out)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> None:
    # Swap two folders atomically (Linux `renameat2`). AttributeError if the C library lacks it.
    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(second))


def read_errors(path: Path, remedy: str = "") -> AbstractContextManager[None]:
    """Convert an `OSError` in the block to a `DataError`: `path` cannot be read."""
    return system_errors(lambda reason: DataError(path, f"cannot be read ({reason})", remedy))


def write_errors(path: Path, remedy: str = "") -> AbstractContextManager[None]:
    """Convert an `OSError` in the block to a `DataError`: `path` cannot be written."""
    return system_errors(lambda reason: DataError(path, f"cannot be written ({reason})", remedy))


def write_result(path: Path, text: str) -> None:
    """Write a results file for the user, creating its folder. Raises DataError if it cannot be written."""
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def write_json_result(path: Path, value: Any) -> None:
    """`write_result` of a value as JSON, with NaN and infinities as text."""
    write_result(path, json.dumps(jsonable(value), indent=1, allow_nan=False) + "\n")
