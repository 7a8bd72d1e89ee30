"""The token store: tokenised documents on disk (docs/data.md). `writer.py` writes them, `documents.py` orders them.

A store is a folder:

    tokens-00000.bin  the ids of all documents, one after another, little-endian uint16 (uint32 where the vocabulary has
    tokens-00001.bin  more than 65,536 ids), cut into shards of one bounded size, wherever that falls; each document
    …                 ends with the end-of-sequence id
    doc_offsets.npy   [documents + 1] int64: document d is tokens[doc_offsets[d] : doc_offsets[d + 1]]
    meta.json         StoreMeta, with the format's name and version; written last: a folder without it is not a store
    tokenizer/        optional: the tokenizer's files
    validation/       optional: the held-out documents, as another store

Version 1 had one tokens.bin and is read as a store of one shard.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from data.tokenizer import BYTES, TOKENIZER_FOLDER, info_problem
from zeco_train.errors import DataError, check_open_files
from zeco_train.system.files import FILES_OF_A_PROCESS, OPEN_SHARDS, allow_open_files, read_errors, sha256_of
from zeco_train.system.small_files import check_regular, read_json
from zeco_train.version import __version__

FORMAT = "zeco-train token store"
VERSION = 2
OFFSETS_FILE = "doc_offsets.npy"
META_FILE = "meta.json"
VALIDATION_FOLDER = "validation"
COPY_AGAIN = "copy the store again or prepare it again"
PREPARE_HINT = "prepare one with: python -m zeco_train.prepare SOURCE --out STORE"

_VERSION_1_TOKENS = "tokens.bin"
# Five digits or more, as `shard_name` pads to five and does not limit the number.
_SHARD_NAME = re.compile(r"tokens-[0-9]{5,}\.bin")
_OTHER_NAMES = frozenset({OFFSETS_FILE, META_FILE, VALIDATION_FOLDER, TOKENIZER_FOLDER, _VERSION_1_TOKENS})
_OFFSETS_BLOCK = 1 << 20
# Bytes read and hashed at a time.
_PART_BYTES = 1 << 22

Version = tuple[int, int, int]


def shard_name(index: int) -> str:
    """File name of a shard, counted from 0."""
    return f"tokens-{index:05d}.bin"


@dataclass(frozen=True)
class ShardMeta:
    """A shard's entry in meta.json."""

    name: str
    num_tokens: int
    sha256: str


@dataclass(frozen=True)
class StoreMeta:
    """The contents of meta.json, without the format's name and version."""

    dtype: str  # "uint16" or "uint32"
    vocab_size: int  # every id is below it
    tokenizer: dict[str, str]  # `Tokenizer.info`
    eos_id: int  # ends each document
    num_tokens: int  # end-of-sequence ids included
    num_documents: int
    shards: tuple[ShardMeta, ...]  # in stream order
    doc_offsets_sha256: str
    sources_sha256: str  # of the manifest of the input
    created_by: str
    # Source and options of the text, as given to `data.prepare`.
    preparation: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_sha256(self) -> str:
        """Digest of all tokens: the file's digest for a single shard, else a digest of the shards' digests."""
        if len(self.shards) == 1:
            return self.shards[0].sha256
        return hashlib.sha256("".join(shard.sha256 for shard in self.shards).encode()).hexdigest()

    @property
    def control_strings(self) -> str:
        """What strings such as "</s>" in a document became: "text", "ids", or "unknown" for stores of version 0.2."""
        rule = "text" if self.tokenizer.get("kind") == BYTES else self.preparation.get("control_strings")
        return rule if rule in ("text", "ids") else "unknown"


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Little-endian uint16 if it holds all ids below `vocab_size`, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class TokenStore:
    """A store opened for reading. Reads are positional (`pread`) and thread-safe.

    Positions are of the whole token stream.

    Attributes:
        doc_offsets: [documents + 1] int64, mapped from the file.
        versions: `file_version` of each shard when the store was opened.
        itemsize: bytes per token on disk.
        bytes_requested: total bytes of tokens read by `read`.
    """

    def __init__(
        self, path: Path, meta: StoreMeta, doc_offsets: NDArray[np.int64], stats: list[os.stat_result]
    ) -> None:
        self.path, self.meta, self.doc_offsets = path, meta, doc_offsets
        self.versions = [file_version(stat) for stat in stats]
        self.num_tokens, self.vocab_size, self.num_shards = meta.num_tokens, meta.vocab_size, len(meta.shards)
        self._dtype = token_dtype(meta.vocab_size)
        self.itemsize = self._dtype.itemsize
        self._shard_stops = np.cumsum([shard.num_tokens for shard in meta.shards], dtype=np.int64)
        self._lock = threading.Lock()
        self.bytes_requested = 0

    @classmethod
    def open(cls, path: str | Path) -> TokenStore:
        """Open a store: checks meta.json, file sizes, and all offsets with their digest; reads no tokens.

        Raises:
            DataError: missing, not a token store, or files that disagree with meta.json.
        """
        folder = Path(path)
        meta = read_meta(folder)
        allow_open_files(FILES_OF_A_PROCESS)
        itemsize = token_dtype(meta.vocab_size).itemsize
        stats = []
        for shard in meta.shards:
            file = folder / shard.name
            # Reads compare with this, although a shard's file is opened at its first read only.
            with read_errors(file, COPY_AGAIN):
                stats.append(file.stat())
            if (size := stats[-1].st_size) != (expected := shard.num_tokens * itemsize):
                problem = f"{'truncated' if size < expected else 'too long'}: {size} bytes, meta.json says {expected}"
                raise DataError(file, problem, COPY_AGAIN)
        return cls(folder, meta, _load_offsets(folder / OFFSETS_FILE, meta), stats)

    def longest_document(self) -> int:
        """Tokens of the longest document. Reads all offsets."""
        return max(int(lengths.max()) for lengths in _length_blocks(self.doc_offsets))

    def shard_range(self, index: int) -> tuple[int, int]:
        """The stream positions [start, stop) of shard `index`."""
        stop = int(self._shard_stops[index])
        return stop - self.meta.shards[index].num_tokens, stop

    def shards_of(self, start: int, stop: int) -> range:
        if start == stop:
            return range(0)
        first, last = np.searchsorted(self._shard_stops, [start, stop - 1], side="right").tolist()
        return range(first, last + 1)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens [start, stop) as [stop − start] int64; reads only these bytes.

        Raises:
            DataError: the range is not within the store; or a shard is missing, changed since the store was opened,
                cannot be read, or has an id beyond the vocabulary in meta.json; names the shard and the bytes.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise DataError(self.path, f"no tokens from {start} to {stop}; it has those from 0 to {self.num_tokens}")
        tokens = np.empty(stop - start, dtype=self._dtype)
        for index in self.shards_of(start, stop):
            shard_start, shard_stop = self.shard_range(index)
            first, last = max(start, shard_start), min(stop, shard_stop)
            part = tokens[first - start : last - start]
            self._read_shard(index, first - shard_start, part)
            if part.max(initial=0) >= self.vocab_size:
                wrong = int(np.argmax(part >= self.vocab_size))
                position = first - shard_start + wrong
                problem = f"token {position} is {part[wrong]}, meta.json has ids below {self.vocab_size}"
                raise DataError(self._where(index, first - shard_start, part), problem, COPY_AGAIN)
        # `+=` is not atomic, and several threads may read.
        with self._lock:
            self.bytes_requested += tokens.nbytes
        return tokens.astype(np.int64)

    def shard_path(self, index: int) -> Path:
        return self.path / self.meta.shards[index].name

    def close(self) -> None:
        """Close the shards of all stores; further reads open them again."""
        _opened.cache_clear()

    def _read_shard(self, index: int, first: int, tokens: NDArray[np.unsignedinteger]) -> None:
        view = tokens.view(np.uint8).data
        offset, done, problem, remedy = first * self.itemsize, 0, "", "leave a store alone while a run uses it"
        try:
            shard = _opened(self.shard_path(index), self.versions[index])
            while done < len(view):  # one call gives at most 2 GiB, and may give less
                count = os.preadv(shard.descriptor, [view[done:]], offset + done)
                if count == 0:
                    break
                done += count
            # After the read, to detect changes during it.
            now = os.fstat(shard.descriptor)
            if done < len(view):
                problem = f"has become shorter since it was opened: nothing at byte {offset + done}"
            # This descriptor can still read a removed file, but no other process can open it.
            elif now.st_nlink == 0:
                problem = "was removed or replaced since it was opened"
            elif file_version(now) != self.versions[index]:
                problem = "was changed or replaced since it was opened"
        except OSError as error:
            check_open_files(error)
            problem, remedy = f"cannot be read ({error.strerror})", COPY_AGAIN
        if problem:
            raise DataError(self._where(index, first, tokens), problem, remedy)

    def _where(self, index: int, first: int, tokens: NDArray[np.unsignedinteger]) -> str:
        start = first * self.itemsize
        return f"{self.shard_path(index)}, bytes {start} to {start + tokens.nbytes}"


class _OpenShard:
    # Closed once it is neither cached nor read.
    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)


# Those read last, of all stores of this process.
@lru_cache(maxsize=OPEN_SHARDS)
def _opened(path: Path, version: Version) -> _OpenShard:
    return _OpenShard(path)


def is_store(folder: Path) -> bool:
    """Whether `folder` holds a token store, possibly damaged, and nothing else."""
    try:
        names = {entry.name for entry in folder.iterdir()}
        record = read_json(folder / META_FILE)
    except (OSError, ValueError):
        return False
    known = all(name in _OTHER_NAMES or _SHARD_NAME.fullmatch(name) for name in names)
    return known and isinstance(record, dict) and record.get("format") == FORMAT


def check_replaceable(out: Path) -> None:
    """Raise DataError unless `out` is the folder of a token store, the only kind that is ever replaced."""
    if out.is_symlink() or not is_store(out):
        problem = "exists and is a link" if out.is_symlink() else "exists and is not a token store"
        raise DataError(out, problem, "choose another folder; nothing was changed")


def read_meta(folder: Path) -> StoreMeta:
    """Read and check meta.json of the store in `folder`. Raises DataError as `TokenStore.open`."""
    if not folder.exists():
        raise DataError(folder, "no such token store", PREPARE_HINT)
    if not folder.is_dir():
        raise DataError(folder, "is a file, a token store is a folder", PREPARE_HINT)
    path = folder / META_FILE
    try:
        record = read_json(path)
    except FileNotFoundError as error:
        what = "an empty folder, not a token store" if not any(folder.iterdir()) else "not a token store (no meta.json)"
        raise DataError(folder, what, PREPARE_HINT) from error
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DataError(folder, f"not a token store (meta.json is not JSON: {error})", PREPARE_HINT) from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise DataError(folder, f"not a token store (meta.json has no format {FORMAT!r})", PREPARE_HINT)
    if record.get("version") not in (1, VERSION):
        problem = f"format version {record.get('version')}; this zeco-train ({__version__}) reads versions 1, {VERSION}"
        raise DataError(folder, problem, "prepare it again")
    if record["version"] == 1:
        sizes = {"num_tokens": record.get("num_tokens"), "sha256": record.get("tokens_sha256")}
        record = {**record, "shards": [{"name": _VERSION_1_TOKENS, **sizes}], "preparation": {}}
    meta = _meta_of(record, path)
    if meta.num_tokens < 1 or meta.num_documents < 1:
        raise DataError(folder, "holds no tokens", "prepare it again")
    if (total := sum(shard.num_tokens for shard in meta.shards)) != meta.num_tokens:
        raise DataError(path, f"its shards have {total} tokens, num_tokens says {meta.num_tokens}", COPY_AGAIN)
    if not 0 <= meta.eos_id < meta.vocab_size or meta.dtype != token_dtype(meta.vocab_size).name:
        problem = f"eos_id {meta.eos_id}, vocab_size {meta.vocab_size} and dtype {meta.dtype} do not fit together"
        raise DataError(path, problem, "prepare it again")
    return meta


def _meta_of(record: dict[str, Any], path: Path) -> StoreMeta:
    values: dict[str, Any] = {entry.name: record.get(entry.name) for entry in fields(StoreMeta)}
    # Annotations are text in this module, by the import from __future__.
    kinds = {"int": int, "str": str, "dict[str, str]": dict, "dict[str, Any]": dict, "tuple[ShardMeta, ...]": list}
    for entry in fields(StoreMeta):
        if not isinstance(values[entry.name], kinds[str(entry.type)]):
            raise DataError(path, f"{entry.name} is {values[entry.name]!r:.80}, not {entry.type}", "prepare it again")
    if (problem := info_problem(values["tokenizer"])) is not None:
        raise DataError(path, f"tokenizer: {problem}", "prepare it again")
    shards = tuple(_shard_of(shard, path) for shard in values["shards"])
    return StoreMeta(**{**values, "shards": shards})


def _shard_of(record: object, path: Path) -> ShardMeta:
    match record:
        case {"name": str(name), "num_tokens": int(num_tokens), "sha256": str(sha256)} if num_tokens > 0:
            if name == _VERSION_1_TOKENS or _SHARD_NAME.fullmatch(name):  # never a path out of the folder
                return ShardMeta(name, num_tokens, sha256)
    raise DataError(path, f"{record!r:.80} is no shard of tokens", "prepare it again")


def _load_offsets(path: Path, meta: StoreMeta) -> NDArray[np.int64]:
    try:
        offsets = map_array(path)
    except (OSError, ValueError) as error:
        check_open_files(error)
        problem = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(path, f"cannot be read ({problem})", COPY_AGAIN) from error
    problem = ""
    if offsets.dtype != np.int64 or offsets.shape != (meta.num_documents + 1,):
        problem = f"{offsets.dtype} {list(offsets.shape)}, expected int64 [{meta.num_documents + 1}]"
    elif offsets[0] != 0 or offsets[-1] != meta.num_tokens:
        problem = f"runs from {offsets[0]} to {offsets[-1]}, expected 0 to {meta.num_tokens}"
    elif any((lengths <= 0).any() for lengths in _length_blocks(offsets)):
        problem = "its offsets do not increase"
    if problem:
        raise DataError(path, f"does not fit meta.json: {problem}", COPY_AGAIN)
    # The checks above accept wrong borders too, and this digest is the key of cached indices.
    with read_errors(path, COPY_AGAIN):
        digest = sha256_of(path)
    if digest != meta.doc_offsets_sha256:
        raise DataError(path, "its contents differ from what was prepared", COPY_AGAIN)
    return offsets


def _length_blocks(offsets: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(offsets) - 1, _OFFSETS_BLOCK):
        yield np.diff(offsets[start : start + _OFFSETS_BLOCK + 1])


def file_version(stat: os.stat_result) -> Version:
    """(inode number, size, modification time in ns): changes with a write or a replacement."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def hash_in_parts(path: Path, version: Version) -> Generator[int, None, str]:
    """The sha256 of a file; yields the size of each part after reading it.

    Raises:
        DataError: the file cannot be read, or its `file_version` is not `version` in the end.
    """
    digest = hashlib.sha256()
    with read_errors(path, COPY_AGAIN), path.open("rb", buffering=0) as file:
        while part := file.read(_PART_BYTES):
            digest.update(part)
            yield len(part)
        # Of the descriptor: what was hashed, even if the path leads to another file by now.
        now = file_version(os.fstat(file.fileno()))
    if now != version:
        raise DataError(path, "was changed or replaced since it was opened", "leave a store alone while a run uses it")
    return digest.hexdigest()


def map_array(path: Path) -> NDArray:
    """Memory-map the array of plain numbers in an .npy file, read-only.

    Raises:
        OSError: not a regular file, or cannot be read.
        ValueError: not such a file, or shorter than its header requires.
    """
    check_regular(path)
    try:
        # Not np.load, which would also open archives.
        return open_memmap(path, mode="r")
    except (TypeError, ArithmeticError, MemoryError, RecursionError, SyntaxError, TokenError) as error:
        # Raised by numpy and by Python's parser for a malformed header.
        raise ValueError(f"not the header of an array ({type(error).__name__})") from error
