"""Reads a checkpoint's `.metadata` without executing code from it.

`torch.distributed.checkpoint` (DCP) stores its metadata as a pickle, and unpickling calls whatever the file names. Here
every name that DCP writes maps to an inert record or a plain value, and any other name is refused. DCP's own objects
are built from the records after each field has been checked: type, range, chunks that cover their tensor, files inside
the folder.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from zeco_train.checkpoint.files import METADATA_FILE, PROGRESS_FILE, is_count, named_step, parse_progress
from zeco_train.errors import CheckpointError
from zeco_train.system.paths import is_plain_name
from zeco_train.system.small_files import read_json, read_small

# 20 layers and their optimizer state, sharded over 1,024 ranks, take about 90 MB.
_LARGEST_BYTES = 1 << 30
_MOST_DIMENSIONS = 64
# Each distinct chunk takes more bytes than this in the file; a list with more chunks repeats references to one object.
_LEAST_BYTES_PER_CHUNK = 8
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_RECORDS = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
    )
} | {("torch.distributed.checkpoint.filesystem", "_StorageInfo")}


def read_metadata(folder: Path) -> Metadata:
    """DCP's metadata of the checkpoint in `folder`; nothing that the file names is imported or called.

    Fields that loading does not need (`planner_data`, `storage_meta`, memory formats) are omitted. Raises OSError, or
    CheckpointError if the file is not DCP metadata, or is inconsistent, which names the first entry concerned.
    """
    content = read_small(folder / METADATA_FILE, _LARGEST_BYTES)
    try:
        return _parse(content)
    except _Refused as error:
        raise CheckpointError(f"{folder / METADATA_FILE}: {error}") from error


@functools.lru_cache(maxsize=1)
def _parse(content: bytes) -> Metadata:
    """Parse the file; cached, since a checkpoint is first checked and then loaded."""
    return _Checked(content).metadata()


def files_of(metadata: Metadata) -> dict[str, int]:
    """The files that hold the entries, with the minimum size of each in bytes."""
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    return ends


def find_contradiction(folder: Path, table: Mapping[str, tuple[int, str]]) -> str | None:
    """Find an inconsistency between the files of a checkpoint, each of which is intact; None if they agree.

    `table` is its `checksums.json`, see `read_checksums`. Raises OSError for a storage failure.
    """
    for name in (METADATA_FILE, PROGRESS_FILE):
        if name not in table:
            return f"checksums.json has no entry for {name}"
    try:
        files = files_of(read_metadata(folder))
    except CheckpointError as error:
        return str(error).removeprefix(f"{folder}/")
    try:
        progress = parse_progress(read_json(folder / PROGRESS_FILE))
    except ValueError as error:
        return f"{PROGRESS_FILE}: {error}"
    for name, end in files.items():
        if name not in table:
            return f"checksums.json has no entry for {name}, which .metadata names"
        if table[name][0] < end:
            return f"{name} has {table[name][0]:,} bytes, .metadata names {end:,}"
    named = named_step(folder)
    if named is not None and named != progress.step:
        return f"run.json is of step {progress.step}"
    return None


class _Refused(Exception):
    """The file is not valid DCP metadata; the message gives the reason."""


class _Record:
    """Inert stand-in for a DCP object: keeps its pickled state."""

    __slots__ = ("state",)
    state: Any

    def __new__(cls) -> _Record:
        record = super().__new__(cls)
        record.state = {}
        return record

    def __setstate__(self, state: Any) -> None:
        # In place of the default, which would set attributes that the file names.
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Maps the names that DCP writes to records and plain values, and refuses all others.

    The stand-in classes are created per file: a pickle may set attributes of the classes it names.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        # typing.Any: the classes are created dynamically.
        self.kinds: dict[str, Any] = {name: type(name, (_Record,), {"__slots__": ()}) for _, name in _RECORDS}

        def size(numbers: object) -> object:
            return numbers

        def layout(name: object) -> object:
            return torch.strided if name == "torch.strided" else None

        def nothing(*arguments: object) -> None:
            return None

        self._values: dict[tuple[str, str], Callable[..., object]] = {
            ("torch", "Size"): size,
            ("torch.serialization", "_get_layout"): layout,
            # Not needed: the original folder, and memory formats, which early versions of Python 3.11 store by name.
            ("pathlib", "PosixPath"): nothing,
            ("pathlib", "WindowsPath"): nothing,
            ("pathlib._local", "PosixPath"): nothing,
            ("pathlib._local", "WindowsPath"): nothing,
            ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): nothing,
            ("builtins", "getattr"): nothing,
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return self.kinds[name]
        if module == "torch" and name in _DTYPES:
            return getattr(torch, name)
        if (module, name) in self._values:
            return self._values[module, name]
        raise _Refused(f"names {module}.{name}, which no checkpoint has; nothing of it was run")

    def persistent_load(self, pid: object) -> Any:
        raise _Refused("refers to something outside of it")


class _Checked:
    """Converts the records of a file to DCP objects, checking each field."""

    def __init__(self, content: bytes) -> None:
        unpickler = _Unpickler(content)
        self._kinds = unpickler.kinds
        self._chunks_left = len(content) // _LEAST_BYTES_PER_CHUNK
        try:
            self._root = unpickler.load()
        except _Refused:
            raise
        except Exception as error:  # damaged pickles raise almost anything
            reason = " ".join(str(error).split())[:200]
            raise _Refused(f"cannot be read ({type(error).__name__}: {reason})") from error

    def metadata(self) -> Metadata:
        fields = self._fields(self._root, "Metadata", "the file")
        entries, places = fields.get("state_dict_metadata"), fields.get("storage_data")
        if not isinstance(entries, dict) or not isinstance(places, dict):
            raise _Refused("has no table of entries, or none of their places")
        described = {_text(name, "the name of an entry"): self._entry(name, entry) for name, entry in entries.items()}
        stored = dict(self._place(index, place) for index, place in places.items())
        for name, entry in described.items():
            offsets = [c.offsets for c in entry.chunks] if isinstance(entry, TensorStorageMetadata) else [None]
            for offset in offsets:
                # Loading looks each chunk up by this index, and would raise a KeyError.
                if MetadataIndex(name, offset) not in stored:
                    raise _Refused(f"{name}: no file is named for its part at {offset and list(offset)}")
        version = fields.get("version")
        return Metadata(
            described,
            storage_data=stored,
            storage_meta=StorageMeta(),
            version=version if isinstance(version, str) else None,
        )

    def _entry(self, name: str, entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        if type(entry) is self._kinds["BytesStorageMetadata"]:
            return BytesStorageMetadata()
        fields = self._fields(entry, "TensorStorageMetadata", name)
        properties = getattr(fields.get("properties"), "state", None)
        if not (isinstance(properties, tuple) and len(properties) == 5 and isinstance(properties[0], torch.dtype)):
            raise _Refused(f"{name}: no dtype")
        if properties[1] is not torch.strided:
            raise _Refused(f"{name}: is not strided")
        size, chunks = _size(fields.get("size"), name), fields.get("chunks")
        if not isinstance(chunks, list):
            raise _Refused(f"{name}: no list of chunks")
        # Over all entries: lists that repeat references to one chunk let a small file ask for any amount of work.
        self._chunks_left -= len(chunks)
        if self._chunks_left < 0:
            raise _Refused(f"{name}: more chunks than the file has room for")
        made = []
        for chunk in chunks:
            part = self._fields(chunk, "ChunkStorageMetadata", name)
            made.append(ChunkStorageMetadata(_size(part.get("offsets"), name), _size(part.get("sizes"), name)))
        if not _cover(size, made):
            raise _Refused(f"{name}: its chunks do not cover {list(size)}, each number once")
        return TensorStorageMetadata(TensorProperties(dtype=properties[0]), size, made)

    def _place(self, index: Any, place: Any) -> tuple[MetadataIndex, _StorageInfo]:
        key = self._fields(index, "MetadataIndex", "the index of a place")
        name = _text(key.get("fqn"), "the name of a place")
        offset = key.get("offset")
        fields = self._fields(place, "_StorageInfo", name)
        file = fields.get("relative_path")
        if not (isinstance(file, str) and is_plain_name(file)):
            raise _Refused(f"{name}: lies in {file!r}, which is no file of the checkpoint's folder")
        if fields.get("transform_descriptors"):
            raise _Refused(f"{name}: is stored transformed")
        start, length = _number(fields.get("offset"), name), _number(fields.get("length"), name)
        return MetadataIndex(name, None if offset is None else _size(offset, name)), _StorageInfo(file, start, length)

    def _fields(self, record: Any, kind: str, where: str) -> dict[str, Any]:
        if type(record) is not self._kinds[kind] or not isinstance(record.state, dict):
            raise _Refused(f"{where}: is no {kind}")
        return record.state


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _Refused(f"{where} is no text")
    return value


def _number(value: Any, where: str) -> int:
    if not is_count(value):
        raise _Refused(f"{where}: {value!r:.40} is no number from 0 to 2^63 − 1")
    return value


def _size(value: Any, where: str) -> torch.Size:
    if not isinstance(value, tuple) or len(value) > _MOST_DIMENSIONS:
        raise _Refused(f"{where}: no size")
    return torch.Size([_number(number, where) for number in value])


def _cover(size: torch.Size, chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether the chunks cover each element of a tensor exactly once: the others would stay uninitialised memory."""
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
    if any(len(offset) != len(size) or len(extent) != len(size) for offset, extent in boxes):
        return False
    if any(o + e > s for offset, extent in boxes for o, e, s in zip(offset, extent, size, strict=True)):
        return False
    boxes = [box for box in boxes if math.prod(box[1])]
    if sum(math.prod(extent) for _, extent in boxes) != math.prod(size):
        return False
    # All are inside, and the element counts match: they cover the tensor unless two of them overlap.
    return not _overlap(boxes)


def _overlap(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether any two of the boxes (offset, extent) share an element.

    Boxes are sorted by start along one dimension, and each is compared with those that start before it ends. The
    dimension is the one with the most distinct starts: shards are slices along one dimension.
    """
    if len(boxes) < 2:
        return False
    starts = [len(set(column)) for column in zip(*(offset for offset, _ in boxes), strict=True)]
    along = starts.index(max(starts))
    boxes = sorted(boxes, key=lambda box: box[0][along])
    for i, (offset, extent) in enumerate(boxes):
        for other, size in itertools.islice(boxes, i + 1, None):
            if other[along] >= offset[along] + extent[along]:
                break
            if all(a < b + m and b < a + n for a, n, b, m in zip(offset, extent, other, size, strict=True)):
                return True
    return False
