"""Text files as streams of documents, cut into units of work that do not depend on the workers.

.txt .md .py             the file is one document
.jsonl                   each line is an object whose text field is a document
.jsonl.gz .jsonl.zst     the same, compressed
.parquet .arrow          each row of the text column is a document

`data.sources.hugging_face` provides the same for data sets of the `datasets` library.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from data.sources.readers import (
    Document,
    LeftOut,
    decode,
    open_parquet,
    read_arrow,
    read_compressed_lines,
    read_lines,
    read_row_group,
)
from zeco_train.errors import DataError, check_open_files, names_field
from zeco_train.system.paths import is_within

TEXT_SUFFIXES = (".txt", ".md", ".py")
COMPRESSED_SUFFIXES = (".jsonl.gz", ".jsonl.zst")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", *COMPRESSED_SUFFIXES, ".parquet", ".arrow")
UNIT_BYTES = 1 << 21
DOCUMENT_BYTES = 1 << 29
UNIT_FILES = 1024


@dataclass(frozen=True)
class SourceFile:
    """A file to read."""

    path: Path
    name: str  # in the manifest: relative to the given folder
    size: int
    modified: int  # ns since 1970


@dataclass(frozen=True)
class Unit:
    """A unit of work: a contiguous part of a source's documents.

    `start` and `stop` are a byte range of a .jsonl file (the lines that begin there), or [row group, row group + 1) of
    a .parquet file; for data sets see `data.sources.hugging_face`.
    """

    paths: tuple[Path, ...]  # text files, or a single file of another kind; empty for a data set
    start: int
    stop: int
    size: float  # approximate share of the source's `total`, for the progress display
    stamp: str = ""  # digest of its files' names, sizes and modification times, to detect changes


class DocumentSource(Protocol):
    """Documents in a fixed order, cut into units. Worker processes get a copy."""

    name: str  # in messages
    total: float  # in units of `amount`, for the progress display
    amount: str  # "bytes", "documents" or "shards"
    manifest_sha256: str  # digest of the list of its contents

    def units(self) -> Iterator[Unit]:
        """All units, in order; deterministic for an unchanged source. Raises DataError."""

    def read(self, unit: Unit, first: int) -> Iterator[Document]:
        """The documents of a unit, from number `first` on, those left out included. Raises DataError."""


class FileSource:
    """A source of files and folders; for formats see the module docstring.

    Args:
        text_field: field of lines, column of tables.
        most_bytes: larger text files, and longer lines, are left out.

    Attributes:
        skipped: counts of the entries skipped in folders, by suffix ("hidden": names that begin with a dot; "link to a
            folder": not followed, since it may form a cycle).

    Raises:
        DataError: a path does not exist, a file given by name has an unknown suffix, one in a folder is a link out of
            it, or nothing is found.
    """

    amount = "bytes"

    def __init__(
        self,
        sources: Sequence[Path],
        text_field: str,
        unit_bytes: int = UNIT_BYTES,
        most_bytes: int = DOCUMENT_BYTES,
    ) -> None:
        self._files: list[SourceFile] = []
        self.skipped: Counter[str] = Counter()
        for source in sources:
            try:
                with names_field("SOURCE", source):
                    self._files += _walk(source, self.skipped) if source.is_dir() else [_named_file(source)]
            except OSError as error:
                check_open_files(error)
                raise DataError(error.filename or source, f"cannot be read ({error.strerror})") from error
        self._text_field, self._unit_bytes, self._most_bytes = text_field, unit_bytes, most_bytes
        self.name = ", ".join(str(source) for source in sources[:3]) + (" …" if len(sources) > 3 else "")
        if not self._files:
            skipped = ", ".join(f"{kind} {count}" for kind, count in self.skipped.most_common(8) if count)
            remedy = f"read are files of {' '.join(SUFFIXES)}" + (f"; skipped: {skipped}" if skipped else "")
            raise DataError(f"SOURCE={self.name}", "no text found", remedy)
        self.num_files = len(self._files)
        self.total: float = sum(file.size for file in self._files)
        # Of names and sizes, in order; the contents are covered by the tokens' digest.
        digest = hashlib.sha256()
        for file in self._files:
            digest.update(os.fsencode(file.name) + f"\0{file.size}\n".encode())
        self.manifest_sha256 = digest.hexdigest()

    def units(self) -> Iterator[Unit]:
        """Parts of about `unit_bytes`, in the order of the files; the cut depends on the files alone."""
        unit_bytes = self._unit_bytes
        group: list[SourceFile] = []
        for file in self._files:
            kind = _kind(file.path)
            if kind in TEXT_SUFFIXES:
                group.append(file)
            # A group of text files ends before a file of another kind, so that units keep the order of the files.
            if group and (kind not in TEXT_SUFFIXES or _size(group) >= unit_bytes or len(group) == UNIT_FILES):
                yield _unit_of(group, 0, 0, _size(group))
                group = []
            if kind == ".jsonl":
                for start in range(0, file.size, unit_bytes):
                    stop = min(start + unit_bytes, file.size)
                    yield _unit_of([file], start, stop, stop - start)
            elif kind == ".parquet":
                with open_parquet(file.path) as parquet_file:
                    row_groups = parquet_file.num_row_groups
                for index in range(row_groups):
                    yield _unit_of([file], index, index + 1, file.size / row_groups)
            elif kind not in TEXT_SUFFIXES:
                yield _unit_of([file], 0, 0, file.size)
        if group:
            yield _unit_of(group, 0, 0, _size(group))

    def read(self, unit: Unit, first: int) -> Iterator[Document]:
        return itertools.islice(self._read(unit), first, None)

    def _read(self, unit: Unit) -> Iterator[Document]:
        path, text_field, most_bytes = unit.paths[0], self._text_field, self._most_bytes
        try:
            match _kind(path):
                case ".jsonl":
                    yield from read_lines(path, unit.start, unit.stop, text_field, most_bytes)
                case ".jsonl.gz" | ".jsonl.zst":
                    yield from read_compressed_lines(path, text_field, most_bytes)
                case ".arrow":
                    yield from read_arrow(path, text_field)
                case ".parquet":
                    yield from read_row_group(path, unit.start, text_field)
                case _:
                    for path in unit.paths:
                        is_large = path.stat().st_size > most_bytes
                        yield LeftOut.large if is_large else decode(path.read_bytes(), path)
        except OSError as error:
            check_open_files(error)
            raise DataError(path, f"cannot be read ({error.strerror or error})") from error


def _named_file(source: Path) -> SourceFile:
    if not source.exists():
        raise DataError(source, "no such file or folder", f"give folders, or files of {' '.join(SUFFIXES)}")
    if not source.is_file():
        raise DataError(source, "is neither a file nor a folder", f"give folders, or files of {' '.join(SUFFIXES)}")
    if _kind(source) not in SUFFIXES:
        raise DataError(source, f"unknown kind of file {source.suffix!r}", f"known are {' '.join(SUFFIXES)}")
    return _source_file(source, source.name)


def _source_file(path: Path, name: str) -> SourceFile:
    status = path.stat()
    return SourceFile(path, name, status.st_size, status.st_mtime_ns)


def _kind(path: Path) -> str:
    double = "".join(path.suffixes[-2:]).lower()
    return double if double in COMPRESSED_SUFFIXES else path.suffix.lower()


def _size(files: Sequence[SourceFile]) -> int:
    return sum(file.size for file in files)


def _unit_of(files: Sequence[SourceFile], start: int, stop: int, size: float) -> Unit:
    identity = repr([(file.name, file.size, file.modified) for file in files] + [(start, stop)])
    stamp = hashlib.sha256(identity.encode("utf-8", errors="surrogateescape")).hexdigest()
    return Unit(tuple(file.path for file in files), start, stop, size, stamp)


def _walk(folder: Path, skipped: Counter[str]) -> list[SourceFile]:
    found = []
    # By default os.walk skips a folder that it cannot list, without a message.
    for root, folders, names in os.walk(folder, onerror=_raise):
        skipped["hidden"] += sum(name.startswith(".") for name in (*folders, *names))
        folders[:] = [name for name in folders if not name.startswith(".")]
        skipped["link to a folder"] += sum(Path(root, name).is_symlink() for name in folders)
        for name in names:
            path = Path(root, name)
            if name.startswith("."):
                continue
            if _kind(path) not in SUFFIXES:
                skipped[path.suffix.lower() or "no suffix"] += 1
            elif path.is_symlink() and path.exists() and not is_within(path.resolve(), folder.resolve()):
                # The folder may be a stranger's, the file a private one.
                raise DataError(path, "is a link out of its folder", "put the file itself there, or give files by name")
            elif path.is_file():
                found.append(_source_file(path, path.relative_to(folder).as_posix()))
            elif path.exists():
                skipped["not a regular file"] += 1
            else:
                raise DataError(path, "is a link to nothing", "remove it or repair it")
    return sorted(found, key=lambda file: os.fsencode(file.name))


def _raise(error: OSError) -> None:
    raise error
