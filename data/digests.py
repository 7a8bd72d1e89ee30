"""Digests of files, and their verification against recorded ones."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator
from pathlib import Path

from zeco_train.errors import DataError
from zeco_train.system.files import read_errors, sha256_of

COPY_AGAIN = "copy the store again or prepare it again"
# Bytes read and hashed at a time.
_PART_BYTES = 1 << 22

Version = tuple[int, int, int]


def file_version(stat: os.stat_result) -> Version:
    """Detects replacement and writes: (inode number, size, modification time in ns)."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def verify_file(path: Path, expected: str) -> None:
    """Read a file whole and compare its sha256 with `expected`.

    Raises:
        DataError: it cannot be read, or its contents differ.
    """
    with read_errors(path, COPY_AGAIN):
        digest = sha256_of(path)
    if digest != expected:
        raise DataError(path, "its contents differ from what was prepared", COPY_AGAIN)


def hash_in_parts(path: Path, version: Version | None = None) -> Generator[int, None, str]:
    """Compute the sha256 of a file incrementally: yields the size of each part read, returns the digest.

    Args:
        path: the file.
        version: the expected `file_version`, checked at the end.

    Raises:
        DataError: the file cannot be read, or was changed.
    """
    digest = hashlib.sha256()
    with read_errors(path, COPY_AGAIN), path.open("rb", buffering=0) as file:
        while part := file.read(_PART_BYTES):
            digest.update(part)
            yield len(part)
        # Of the descriptor: what was hashed, even if the path leads to another file by now.
        now = file_version(os.fstat(file.fileno()))
    if version is not None and now != version:
        raise DataError(path, "was changed or replaced since it was opened", "leave a store alone while a run uses it")
    return digest.hexdigest()
