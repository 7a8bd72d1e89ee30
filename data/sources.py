"""Text files as streams of documents, cut into units of work that do not depend on who reads them.

.txt .md .py   the file is one document
.jsonl         each line is an object whose text field is a document
.parquet       each row of the text column is a document
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeco_train.errors import DataError

TEXT_SUFFIXES = (".txt", ".md", ".py")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".parquet")
UNIT_BYTES = 1 << 21
UNIT_FILES = 1024


class SourceProblem(Exception):
    """A problem of a source file: (subject, problem, remedy), the arguments of the DataError that it becomes.

    It crosses from a worker process to the parent, which needs an exception that is rebuilt from its arguments.
    """


@dataclass(frozen=True)
class SourceFile:
    """A file to read, its name in the manifest (relative to the folder that was given) and its size in bytes."""

    path: Path
    name: str
    size: int


@dataclass(frozen=True)
class Unit:
    """A piece of work: some whole text files, the lines that begin in a byte range, or one row group.

    Attributes:
        paths: text files, or the one .jsonl or .parquet file.
        start, stop: byte range of a .jsonl file; [row group, row group + 1) of a .parquet file.
        size: bytes, about, for the progress display.
    """

    paths: tuple[Path, ...]
    start: int
    stop: int
    size: int


def find_sources(sources: Sequence[Path]) -> tuple[list[SourceFile], Counter[str]]:
    """List the files of `sources` (files and folders), folders walked in sorted order.

    Returns:
        The files, and how many were passed over in folders, by suffix ("hidden" for names that begin with a dot).

    Raises:
        DataError: a path that does not exist, or a file given by name that has no suffix known here.
    """
    files: list[SourceFile] = []
    skipped: Counter[str] = Counter()
    for source in sources:
        try:
            if source.is_dir():
                files.extend(_walk(source, skipped))
            else:
                files.append(_named_file(source))
        except OSError as error:
            raise DataError(error.filename or source, f"cannot be read ({error.strerror})") from error
    return files, skipped


def manifest_sha256(files: Sequence[SourceFile]) -> str:
    """Digest of the names and sizes of the files, in order. (What is in them shows in the digest of the tokens.)"""
    digest = hashlib.sha256()
    for file in files:
        digest.update(os.fsencode(file.name) + f"\0{file.size}\n".encode())
    return digest.hexdigest()


def split_into_units(files: Sequence[SourceFile], unit_bytes: int = UNIT_BYTES) -> Iterator[Unit]:
    """Cut the files into units of about `unit_bytes`, in order. The cut depends on the files alone."""
    group: list[Path] = []
    group_bytes = 0
    for file in files:
        kind = file.path.suffix.lower()
        if kind in TEXT_SUFFIXES:
            group.append(file.path)
            group_bytes += file.size
        if group and (kind not in TEXT_SUFFIXES or group_bytes >= unit_bytes or len(group) == UNIT_FILES):
            yield Unit(tuple(group), 0, 0, group_bytes)
            group, group_bytes = [], 0
        if kind == ".jsonl":
            for start in range(0, file.size, unit_bytes):
                stop = min(start + unit_bytes, file.size)
                yield Unit((file.path,), start, stop, stop - start)
        elif kind == ".parquet":
            with _open_parquet(file.path) as parquet_file:
                row_groups = parquet_file.num_row_groups
            for index in range(row_groups):
                yield Unit((file.path,), index, index + 1, file.size // row_groups)
    if group:
        yield Unit(tuple(group), 0, 0, group_bytes)


def read_unit(unit: Unit, text_field: str) -> Iterator[str]:
    """Yield the documents of a unit.

    Raises:
        SourceProblem: a file that cannot be read, is not UTF-8, or has no text field where it should.
    """
    path = unit.paths[0]
    try:
        match path.suffix.lower():
            case ".jsonl":
                yield from _read_lines(path, unit.start, unit.stop, text_field)
            case ".parquet":
                yield from _read_row_group(path, unit.start, text_field)
            case _:
                for path in unit.paths:
                    yield _decode(path.read_bytes(), path)
    except OSError as error:
        raise SourceProblem(str(path), f"cannot be read ({error.strerror or error})", "") from error


def _named_file(source: Path) -> SourceFile:
    if not source.exists():
        raise DataError(source, "no such file or folder")
    if not source.is_file():
        raise DataError(source, "is neither a file nor a folder")
    if source.suffix.lower() not in SUFFIXES:
        raise DataError(source, f"unknown kind of file {source.suffix!r}", f"known are {' '.join(SUFFIXES)}")
    return SourceFile(source, source.name, source.stat().st_size)


def _walk(folder: Path, skipped: Counter[str]) -> list[SourceFile]:
    found = []
    for root, folders, names in os.walk(folder, onerror=_raise):
        skipped["hidden"] += sum(name.startswith(".") for name in (*folders, *names))
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(root, name)
            if name.startswith("."):
                continue
            if path.suffix.lower() not in SUFFIXES:
                skipped[path.suffix.lower() or "no suffix"] += 1
            elif path.is_file():
                found.append(SourceFile(path, path.relative_to(folder).as_posix(), path.stat().st_size))
            elif path.exists():
                skipped["not a regular file"] += 1
            else:
                raise DataError(path, "is a link to nothing", "remove it or repair it")
    return sorted(found, key=lambda file: os.fsencode(file.name))


def _raise(error: OSError) -> None:
    raise error


def _decode(contents: bytes, path: Path, offset: int = 0) -> str:
    """Decode UTF-8; `offset` is the place of `contents` in the file, for the message."""
    try:
        return contents.decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 at byte {offset + error.start}"
        raise SourceProblem(str(path), problem, "convert it, for example with iconv") from error


def _read_lines(path: Path, start: int, stop: int, text_field: str) -> Iterator[str]:
    """Yield the documents of the lines whose first byte lies in [start, stop)."""
    with path.open("rb") as file:
        if start > 0:
            file.seek(start - 1)
            file.readline()  # the rest of a line that began before, or just the newline that ends it
        while (position := file.tell()) < stop:
            line = file.readline()
            if line.isspace():
                continue
            text = _decode(line, path, position)
            try:
                yield _field_of_line(text.removeprefix("\ufeff") if position == 0 else text, text_field)
            except _LineProblem as error:
                subject = f"{path}, line {_line_number(path, position)}"
                raise SourceProblem(subject, error.problem, error.remedy) from error


class _LineProblem(Exception):
    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


def _field_of_line(line: str, text_field: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise _LineProblem(f"not JSON ({reason})", "each line must be one JSON object") from error
    if not isinstance(record, dict):
        raise _LineProblem(f"a JSON {type(record).__name__}, not an object", "each line must be one JSON object")
    if text_field not in record:
        raise _LineProblem(f"no field {text_field!r}; fields there: {_listed(record)}", "choose one with --text-field")
    text = record[text_field]
    if not isinstance(text, str):
        raise _LineProblem(f"field {text_field!r} is of type {type(text).__name__}, not text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which is no character
        raise _LineProblem(f"field {text_field!r} has a lone surrogate at character {error.start}") from error
    return text


def _listed(names: Sequence[str] | dict[str, Any]) -> str:
    shown = [str(name) for name in names]
    return ", ".join(shown[:10]) + (f" and {len(shown) - 10} more" if len(shown) > 10 else "") or "none"


def _line_number(path: Path, position: int) -> int:
    """The number of the line that begins at byte `position`, counted from 1."""
    count, left = 1, position
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(left, UNIT_BYTES))):
            count += block.count(b"\n")
            left -= len(block)
    return count


def _open_parquet(path: Path) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SourceProblem(str(path), f"cannot be read as parquet ({reason})", "") from error


def _read_row_group(path: Path, row_group: int, text_field: str) -> Iterator[str]:
    import pyarrow

    with _open_parquet(path) as file:
        schema = file.schema_arrow
        if text_field not in schema.names:
            problem = f"no column {text_field!r}; columns there: {_listed(schema.names)}"
            raise SourceProblem(str(path), problem, "choose one with --text-field")
        kind = schema.field(text_field).type
        value_kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not (pyarrow.types.is_string(value_kind) or pyarrow.types.is_large_string(value_kind)):
            raise SourceProblem(str(path), f"column {text_field!r} holds {kind}, not text", "")
        row = sum(file.metadata.row_group(index).num_rows for index in range(row_group))
        try:
            for batch in file.iter_batches(1024, row_groups=[row_group], columns=[text_field]):
                for value in batch.column(0):
                    yield value.as_py() or ""  # a missing value is an empty document
                    row += 1
        except UnicodeDecodeError as error:
            problem = f"not UTF-8 at byte {error.start} of column {text_field!r}"
            raise SourceProblem(f"{path}, row {row}", problem, "") from error
        except pyarrow.ArrowException as error:
            reason = " ".join(str(error).split())[:200]
            raise SourceProblem(f"{path}, row group {row_group}", f"cannot be read ({reason})", "") from error
