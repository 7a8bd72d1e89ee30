"""Reads the documents of one file, or of a part of it.

In every format a null is no document (`LeftOut.null`), and a byte-order mark at the start of a line or of a document is
no text.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import IO, Any

from zeco_train.errors import DataError
from zeco_train.system.files import BYTE_ORDER_MARK, decode_text

READ_BYTES = 1 << 21
ROWS_AT_ONCE = 1024
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


class LeftOut(Enum):
    """Why a document is left out."""

    null = 0
    large = 1
    short = 2


Document = str | LeftOut


def decode(contents: bytes, path: Path, offset: int = 0) -> str:
    """`decode_text`; `offset` is the position of `contents` in the file, for the message."""
    try:
        return decode_text(contents)
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 at byte {offset + error.start}"
        raise DataError(path, problem, "convert it, for example with iconv") from error


def read_lines(path: Path, start: int, stop: int, text_field: str, most: int) -> Iterator[Document]:
    """Yield the documents of the lines whose first byte lies in [start, stop); `most`: see `_lines`."""
    with path.open("rb") as file:
        first = 0
        if start > 0:
            file.seek(start - 1)
            # The rest of a line that began before, or just the newline that ends it; not beyond this part, or the parts
            # of one long line would all read it to its end.
            rest = file.readline(stop - start)
            if not rest.endswith(b"\n"):
                return
            first = start - 1 + len(rest)
        lines = _lines(file, most, first, stop)
        yield from _documents(lines, path, text_field, lambda position, _: _line_number(path, position))


def read_compressed_lines(path: Path, text_field: str, most: int) -> Iterator[Document]:
    """Yield the documents of all lines of a compressed file; `most`: see `_lines`."""
    import pyarrow

    compression = _COMPRESSIONS[path.suffix.lower()]
    with (
        _arrow_errors(path, "cannot be decompressed", OSError),
        pyarrow.input_stream(str(path), compression=compression) as stream,
    ):
        lines = _lines(io.BufferedReader(stream, READ_BYTES), most)
        yield from _documents(lines, path, text_field, lambda _, number: number)


def _lines(file: IO[bytes], most: int, position: int = 0, stop: float = math.inf) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines of a file that begin before `stop`, each with its position, which is `position` at first.

    None stands for a line of more than `most` bytes, which is read in parts: a small compressed file may hold any line.
    """
    while position < stop and (line := file.readline(most + 1)):
        size, part = len(line), line
        while not part.endswith(b"\n") and (part := file.readline(READ_BYTES)):
            size += len(part)
        yield position, line if size == len(line) <= most or line.endswith(b"\n") else None
        position += size


@contextmanager
def _arrow_errors(subject: object, problem: str, *others: type[Exception]) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, *others) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(subject, f"{problem} ({reason})") from error


def _documents(
    lines: Iterator[tuple[int, bytes | None]], path: Path, text_field: str, number_of: Callable[[int, int], int]
) -> Iterator[Document]:
    # `number_of` gives a line's number in the file of its position and its number among `lines`.
    for count, (position, line) in enumerate(lines, 1):
        if line is None:
            yield LeftOut.large
        elif (text := decode(line, path, position)) and not text.isspace():
            try:
                document = _field_of_line(text, text_field)
            except ValueError as error:
                raise DataError(f"{path}, line {number_of(position, count)}", *error.args) from error
            yield document


def _field_of_line(line: str, text_field: str) -> Document:
    # Its ValueErrors have the arguments (problem, remedy).
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"not JSON ({reason})", "each line must be one JSON object") from error
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object", "each line must be one JSON object")
    if text_field not in record:
        raise ValueError(f"no field {text_field!r}; fields there: {listed(record)}", "choose one with --text-field")
    text = record[text_field]
    if text is None:
        return LeftOut.null
    if not isinstance(text, str):
        raise ValueError(f"field {text_field!r} is of type {type(text).__name__}, not text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can encode a lone surrogate, which is not a character
        raise ValueError(f"field {text_field!r} has a lone surrogate at character {error.start}") from error
    return text.removeprefix(BYTE_ORDER_MARK)


def listed(names: Sequence[str] | dict[str, Any]) -> str:
    """The first names, for a message."""
    shown = [str(name) for name in names]
    return ", ".join(shown[:10]) + (f" and {len(shown) - 10} more" if len(shown) > 10 else "") or "none"


def _line_number(path: Path, position: int) -> int:
    count, left = 1, position
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(left, READ_BYTES))):
            count += block.count(b"\n")
            left -= len(block)
    return count


def open_parquet(path: Path) -> Any:
    """A ParquetFile. Raises DataError."""
    from pyarrow import parquet

    with _arrow_errors(path, "cannot be read as parquet", OSError):
        return parquet.ParquetFile(path)


def read_row_group(path: Path, row_group: int, text_field: str) -> Iterator[Document]:
    """Yield the documents of a row group of a .parquet file."""
    with open_parquet(path) as file:
        check_column(path, file.schema_arrow, text_field)
        row = sum(file.metadata.row_group(index).num_rows for index in range(row_group))
        with _arrow_errors(f"{path}, row group {row_group}", "cannot be read"):
            for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[row_group], columns=[text_field]):
                yield from texts_of_column(batch.column(0), f"{path}, row", row, text_field)
                row += len(batch)


def read_arrow(path: Path, text_field: str) -> Iterator[Document]:
    """Yield the documents of a file of Arrow's streaming or file format."""
    import pyarrow

    with _arrow_errors(path, "cannot be read as arrow"), pyarrow.memory_map(str(path)) as mapped:
        magic = mapped.read(6)
        mapped.seek(0)
        reader = pyarrow.ipc.open_file(mapped) if magic == b"ARROW1" else pyarrow.ipc.open_stream(mapped)
        check_column(path, reader.schema, text_field)
        is_file = isinstance(reader, pyarrow.ipc.RecordBatchFileReader)
        row = 0
        for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
            yield from texts_of_column(batch.column(text_field), f"{path}, row", row, text_field)
            row += len(batch)


def check_column(source: object, schema: Any, text_field: str) -> None:
    """Raise DataError, which names `source`, unless the Arrow schema has a text column of this name."""
    from pyarrow import types

    if text_field not in schema.names:
        problem = f"no column {text_field!r}; columns there: {listed(schema.names)}"
        raise DataError(source, problem, "choose one with --text-field")
    kind = schema.field(text_field).type
    of_values = kind.value_type if types.is_dictionary(kind) else kind
    checks = types.is_string, types.is_large_string, types.is_string_view, types.is_null
    if not any(check(of_values) for check in checks):
        raise DataError(source, f"column {text_field!r} holds {kind}, not text")


def texts_of_column(column: Any, place: str, row: int, text_field: str) -> Iterator[Document]:
    """Yield the values of an Arrow array of text; `place`, such as "FILE, row", and `row`, the first, for messages."""
    for value in column:
        try:
            text = value.as_py()
            yield LeftOut.null if text is None else text.removeprefix(BYTE_ORDER_MARK)
        except UnicodeDecodeError as error:
            raise DataError(f"{place} {row}", f"not UTF-8 at byte {error.start} of column {text_field!r}") from error
        row += 1
