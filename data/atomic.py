"""Atomic creation of a folder: written beside its final path, then renamed.

The next run removes the leftovers of a killed one. A temporary folder is in use as long as the lock file beside it is
locked; the system releases the lock when the process ends, for whatever reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.store import is_store
from zeco_train.errors import DataError
from zeco_train.system.files import sync_folder, take_lock, write_errors

logger = logging.getLogger(__name__)

LOCK_SUFFIX = ".lock"
OLD_SUFFIX = ".old"
# Linux's constants for renameat2, which `os` does not offer.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def atomic_folder(out: Path, *, replace: bool = False, remedy: str = "choose another folder") -> Iterator[Path]:
    """Context manager: a new, empty folder beside `out`, renamed to `out` if the block ends without an exception.

    The caller must fsync its files. If the block raises or the process is killed, `out` is unchanged.

    Args:
        out: the final path; parents are created. Must be missing or an empty folder, unless `replace`.
        replace: exchange an existing token store for the new folder and delete the old one.
        remedy: advice to the user if the system refuses to write.

    Raises:
        DataError: `out` exists (with `replace`: and is not a token store), or the system refuses to write there.
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
    return temporary.with_name(temporary.name + LOCK_SUFFIX)


def remove_leftovers(out: Path) -> None:
    """Delete the temporary folders of `out` left by interrupted runs; keep those of live processes."""
    for lock_file in sorted(out.parent.glob(glob.escape(f".{out.name}.tmp-") + "*" + LOCK_SUFFIX)):
        # OSError: another user's folder, or a file system without locks. Skip it; nothing ever loads it.
        with contextlib.suppress(OSError), lock_file.open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary = lock_file.with_name(lock_file.name.removesuffix(LOCK_SUFFIX))
            old = temporary.with_name(temporary.name + OLD_SUFFIX)
            if old.exists() and not out.exists():
                old.rename(out)  # killed between the two renames of a replacement: the old store is the valid one
            shutil.rmtree(old, ignore_errors=True)
            shutil.rmtree(temporary, ignore_errors=True)
            lock_file.unlink()


def _claim(out: Path) -> tuple[Path, int]:
    """Choose a temporary name and lock it. Returns the (not yet existing) folder and the lock's descriptor."""
    while True:
        temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
        # Without locks (some network file systems) leftovers stay until the user deletes them; nothing else changes.
        # Between open and lock another process may lock the file as a leftover; then retry with a new name.
        with contextlib.suppress(BlockingIOError):
            return temporary, take_lock(lock_path(temporary))[0]


def move_into_place(temporary: Path, out: Path, replace: bool) -> None:
    """Rename a folder to `out`, atomically where supported. A replaced store is left at `temporary`, or deleted.

    Raises:
        DataError: `out` exists, is not empty, and `replace` is false; or it is no token store, or a link to one.
    """
    # The rename is the check: it replaces an empty folder only. Looking first would race with other processes.
    try:
        temporary.rename(out)
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        if not replace:
            raise DataError(out, "exists already", "nothing was changed") from error
    check_replaceable(out)
    try:
        _exchange(temporary, out)  # the old folder now has the temporary name, and is deleted with it
    except (OSError, AttributeError) as error:
        logger.warning("%s: this file system cannot exchange folders (%s); using two renames", out, error)
        old = temporary.with_name(temporary.name + OLD_SUFFIX)
        out.rename(old)
        try:
            temporary.rename(out)
        except OSError:
            old.rename(out)
            raise
        shutil.rmtree(old, ignore_errors=True)


def check_replaceable(out: Path) -> None:
    """Raise DataError unless `out` is the folder of a token store, the only kind that is ever replaced."""
    if out.is_symlink() or not is_store(out):
        problem = "exists and is a link" if out.is_symlink() else "exists and is not a token store"
        raise DataError(out, problem, "choose another folder; nothing was changed")


def _exchange(first: Path, second: Path) -> None:
    """Swap two folders atomically (Linux `renameat2`). AttributeError if the C library lacks it."""
    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(second))
