"""Atomic, durable writes of files and folders, file locks, one-line errors for system failures, and values for JSON."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import resource
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zeco_train.errors import DataError, check_open_files

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


BYTE_ORDER_MARK = "\ufeff"
# As file systems without an operation answer: FUSE, FAT, and network ones.
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EPERM, errno.EBADF)
# Open at once without sockets to peers: shards of token stores, and as many others. The usual soft limit is 1,024.
OPEN_SHARDS = 256
FILES_OF_A_PROCESS = 2 * OPEN_SHARDS


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
    """Raise this process's soft limit of open files to `needed`, or as far as the hard one allows.

    Returns:
        The hard limit; < 0: none.
    """
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
    """Let everybody read a file, on file systems with permissions."""
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
    """Open and lock a file, creating it if needed; the lock is held until the descriptor closes or the process exits.

    Returns:
        The descriptor; and the reason why the file system cannot lock, None if it can.

    Raises:
        BlockingIOError: another process holds it.
        OSError: it cannot be opened, or is a link, which could lead to any file of the user.
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
    """Make `content` that of a file of `take_lock`, on disk. Not by a rename, which would lose the lock."""
    if os.pread(lock, 1 + len(content), 0) != content:
        os.ftruncate(lock, 0)
        os.pwrite(lock, content, 0)
        os.fsync(lock)


@contextmanager
def read_errors(path: Path, remedy: str = "") -> Iterator[None]:
    """Convert an `OSError` in the block to a `DataError`: `path` cannot be read."""
    try:
        yield
    except OSError as error:
        check_open_files(error)
        raise DataError(path, f"cannot be read ({error.strerror or error})", remedy) from error


@contextmanager
def write_errors(path: Path, remedy: str = "") -> Iterator[None]:
    """Convert an `OSError` in the block to a `DataError`: `path` cannot be written."""
    try:
        yield
    except OSError as error:
        check_open_files(error)
        raise DataError(path, f"cannot be written ({error.strerror or error})", remedy) from error


def write_result(path: Path, text: str) -> None:
    """Write a results file for the user, creating its folder.

    Raises:
        DataError: it cannot be written.
    """
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def write_json_result(path: Path, value: Any) -> None:
    """`write_result` of a value as JSON, with NaN and infinities as text."""
    write_result(path, json.dumps(jsonable(value), indent=1, allow_nan=False) + "\n")
