"""The token store: tokenised documents on disk (DESIGN, section 6).

A store is a folder:

    tokens.bin        the ids of all documents, one after another, little-endian uint16 (uint32 where the vocabulary has
                      more than 65,536 ids); each document ends with the end-of-sequence id
    doc_offsets.npy   [documents + 1] int64: document d is tokens[doc_offsets[d] : doc_offsets[d + 1]]
    meta.json         StoreMeta, with the format's name and version; written last, so a folder without it is no store
    validation/       optional: the held-out documents, a store of its own
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.atomic import sync_file, sync_folder
from data.tokenizer import Tokenizer
from zeco_train import __version__
from zeco_train.errors import ConfigError, DataError

FORMAT = "zeco-train token store"
VERSION = 1
TOKENS_FILE = "tokens.bin"
OFFSETS_FILE = "doc_offsets.npy"
META_FILE = "meta.json"
VALIDATION_FOLDER = "validation"
STORE_FILES = frozenset({TOKENS_FILE, OFFSETS_FILE, META_FILE, VALIDATION_FOLDER})
PREPARE_HINT = "prepare one with: python -m data.prepare SOURCE --out STORE"

_RAW_OFFSETS = "doc_offsets.raw"
_BLOCK_BYTES = 1 << 22
_OFFSETS_BLOCK = 1 << 20


@dataclass(frozen=True)
class StoreMeta:
    """What meta.json says of a store, besides the format's name and version.

    Attributes:
        dtype: "uint16" or "uint32".
        vocab_size: number of ids; every id is below it.
        tokenizer: `kind` ("bytes" or "huggingface"), and for the latter `path` and `sha256` of the tokenizer itself.
        eos_id: the id that ends each document.
        num_tokens, num_documents: counts, the end-of-sequence ids included.
        tokens_sha256, doc_offsets_sha256: digests of the two files.
        sources_sha256: digest of the list of source files (see `data.prepare`, `data.corpora`).
        created_by: name and version of the program.
    """

    dtype: str
    vocab_size: int
    tokenizer: dict[str, str]
    eos_id: int
    num_tokens: int
    num_documents: int
    tokens_sha256: str
    doc_offsets_sha256: str
    sources_sha256: str
    created_by: str


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest of uint16 and uint32, little-endian, that holds ids below `vocab_size`."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class TokenStore:
    """A store opened for reading. Reads are positional (`pread`): any thread may read at any time.

    Attributes:
        path: the folder.
        meta: what meta.json says.
        doc_offsets: [documents + 1] int64, mapped from the file.
    """

    def __init__(self, path: Path, meta: StoreMeta, doc_offsets: NDArray[np.int64], descriptor: int) -> None:
        self.path, self.meta, self.doc_offsets = path, meta, doc_offsets
        self._dtype = token_dtype(meta.vocab_size)
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        self._lock = threading.Lock()
        self._bytes_requested = 0

    @classmethod
    def open(cls, path: str | Path) -> TokenStore:
        """Open the store at `path` after the checks that need no reading of tokens.bin: meta, sizes, offsets.

        Raises:
            DataError: nothing there, not a token store, or files that disagree with meta.json.
        """
        folder = Path(path)
        meta = _read_meta(folder)
        try:
            descriptor = os.open(folder / TOKENS_FILE, os.O_RDONLY)
        except OSError as error:
            raise DataError(folder / TOKENS_FILE, f"cannot be read ({error.strerror})", "prepare it again") from error
        try:
            size, expected = os.fstat(descriptor).st_size, meta.num_tokens * token_dtype(meta.vocab_size).itemsize
            if size != expected:
                problem = f"{'truncated' if size < expected else 'too long'}: {size} bytes, meta.json says {expected}"
                raise DataError(folder / TOKENS_FILE, problem, "copy the store again or prepare it again")
            return cls(folder, meta, _load_offsets(folder / OFFSETS_FILE, meta), descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def num_tokens(self) -> int:
        """Tokens in all documents, their end-of-sequence ids included."""
        return self.meta.num_tokens

    @property
    def vocab_size(self) -> int:
        """Number of ids of the tokenizer; every id is below it."""
        return self.meta.vocab_size

    @property
    def itemsize(self) -> int:
        """Bytes of a token in tokens.bin."""
        return self._dtype.itemsize

    @property
    def bytes_requested(self) -> int:
        """Bytes of tokens.bin that `read` has asked the system for since the store was opened."""
        return self._bytes_requested

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens [start, stop) as [stop − start] int64; nothing else of the file is touched.

        Raises:
            DataError: the file has become shorter since it was opened, cannot be read, or has an id that meta.json's
                vocabulary has not.
        """
        assert 0 <= start <= stop <= self.num_tokens, (start, stop, self.num_tokens)
        tokens = np.empty(stop - start, dtype=self._dtype)
        view = tokens.view(np.uint8).data
        offset, done = start * self.itemsize, 0
        while done < len(view):  # one call gives at most 2 GiB, and may give less
            try:
                count = os.preadv(self._descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise DataError(self.path / TOKENS_FILE, f"cannot be read ({error.strerror})") from error
            if count == 0:
                problem = f"has become shorter since it was opened: nothing at byte {offset + done}"
                raise DataError(self.path / TOKENS_FILE, problem, "leave a store alone while a run uses it")
            done += count
        with self._lock:
            self._bytes_requested += len(view)
        if tokens.max(initial=0) >= self.vocab_size:
            first = int(np.argmax(tokens >= self.vocab_size))
            problem = f"token {start + first} is {tokens[first]}, meta.json has ids below {self.vocab_size}"
            raise DataError(self.path / TOKENS_FILE, problem, "copy the store again or prepare it again")
        return tokens.astype(np.int64)

    def verify(self) -> None:
        """Read both files whole and compare their digests with meta.json.

        Raises:
            DataError: a file differs from the one that was prepared.
        """
        digests = {TOKENS_FILE: self.meta.tokens_sha256, OFFSETS_FILE: self.meta.doc_offsets_sha256}
        for name, expected in digests.items():
            if _sha256_file(self.path / name) != expected:
                raise DataError(self.path / name, "its contents differ from what was prepared", "prepare it again")

    def close(self) -> None:
        """Close tokens.bin; further reads are an error."""
        self._close()


def check_vocabulary(store: TokenStore, model_vocab_size: int) -> None:
    """Raise ConfigError where the store has ids that the model has no embedding for."""
    if store.vocab_size > model_vocab_size:
        allowed = f"the token store {store.path} has {store.vocab_size} ids; allowed: {store.vocab_size} or more"
        raise ConfigError("model.vocab_size", model_vocab_size, allowed)


class StoreWriter:
    """Writes one store, document by document, into a folder, which is a store only once `finish` has returned.

    Memory does not grow with the corpus. The folder is made if it is missing; use `data.atomic` for its final place.
    """

    def __init__(self, folder: Path, *, vocab_size: int, eos_id: int, tokenizer: dict[str, str]) -> None:
        assert 0 <= eos_id < vocab_size, (eos_id, vocab_size)
        self.folder = folder
        self.num_tokens = 0
        self.num_documents = 0
        self._vocab_size, self._eos_id, self._tokenizer = vocab_size, eos_id, tokenizer
        self.dtype = token_dtype(vocab_size)
        folder.mkdir(exist_ok=True)
        self._tokens = (folder / TOKENS_FILE).open("w+b")
        self._offsets = (folder / _RAW_OFFSETS).open("w+b")
        self._offsets.write(np.zeros(1, np.int64).tobytes())
        self._sha256 = hashlib.sha256()

    @classmethod
    def for_tokenizer(cls, folder: Path, tokenizer: Tokenizer) -> StoreWriter:
        """A writer of a store with the ids of `tokenizer`."""
        return cls(folder, vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id, tokenizer=tokenizer.info)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def append(self, tokens: NDArray[np.integer], lengths: Sequence[int] | NDArray[np.int64]) -> None:
        """Add the documents whose ids follow one another in `tokens`, each with its end-of-sequence id.

        Args:
            tokens: [sum of lengths], any integer dtype, ids below the vocabulary size.
            lengths: tokens of each document, at least 1.
        """
        self.append_blocks([tokens.astype(self.dtype, copy=False).tobytes()], lengths)

    def append_document(self, ids: NDArray[np.integer]) -> None:
        """Add one document; `ids` [tokens] without the end of sequence, which is added."""
        self.append(np.append(ids.astype(self.dtype, copy=False), self.dtype.type(self._eos_id)), [len(ids) + 1])

    def append_blocks(self, blocks: Iterable[bytes], lengths: Sequence[int] | NDArray[np.int64]) -> None:
        """As `append`, with the ids as blocks of bytes in the store's dtype."""
        counts = np.asarray(lengths, dtype=np.int64)
        assert (counts > 0).all()
        written = 0
        for block in blocks:
            self._tokens.write(block)
            self._sha256.update(block)
            written += len(block)
        assert written == int(counts.sum()) * self.dtype.itemsize, (written, int(counts.sum()))
        self._offsets.write((self.num_tokens + np.cumsum(counts)).tobytes())
        self.num_tokens += int(counts.sum())
        self.num_documents += len(counts)

    def split_tail(self, fraction: float, folder: Path) -> StoreWriter:
        """Move the last documents, as many as fit into `fraction` of the tokens, to a new writer in `folder`.

        Raises:
            DataError: not even the last document fits.
        """
        self._flush()
        offsets = np.memmap(self.folder / _RAW_OFFSETS, dtype=np.int64, mode="r")
        most = int(self.num_tokens * fraction)
        first = int(np.searchsorted(offsets, self.num_tokens - most, side="left"))
        if first >= self.num_documents:
            last = self.num_tokens - int(offsets[-2])
            problem = f"its last document has {last} of {self.num_tokens} tokens, more than {fraction:g} of them"
            raise DataError("the validation part", f"would be empty: {problem}", "use a larger --validation-fraction")
        tail = StoreWriter(folder, vocab_size=self._vocab_size, eos_id=self._eos_id, tokenizer=self._tokenizer)
        keep = int(offsets[first])
        self._tokens.seek(keep * self.dtype.itemsize)
        tail.append_blocks(iter(lambda: self._tokens.read(_BLOCK_BYTES), b""), np.diff(offsets[first:]))
        self.num_tokens, self.num_documents = keep, first
        self._tokens.truncate(keep * self.dtype.itemsize)
        self._offsets.truncate((first + 1) * 8)
        self._flush()
        self._sha256 = hashlib.sha256()
        for block in _blocks(self.folder / TOKENS_FILE):
            self._sha256.update(block)
        return tail

    def finish(self, sources_sha256: str) -> StoreMeta:
        """Write doc_offsets.npy, wait for the disk, and write meta.json last."""
        self._flush()
        self.close()
        offsets_path, raw_path = self.folder / OFFSETS_FILE, self.folder / _RAW_OFFSETS
        with offsets_path.open("wb") as file:
            header = {"descr": "<i8", "fortran_order": False, "shape": (self.num_documents + 1,)}
            np.lib.format.write_array_header_1_0(file, header)
            file.writelines(_blocks(raw_path))
        raw_path.unlink()
        meta = StoreMeta(
            dtype=self.dtype.name,
            vocab_size=self._vocab_size,
            tokenizer=self._tokenizer,
            eos_id=self._eos_id,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            tokens_sha256=self._sha256.hexdigest(),
            doc_offsets_sha256=_sha256_file(offsets_path),
            sources_sha256=sources_sha256,
            created_by=f"zeco-train {__version__}",
        )
        sync_file(self.folder / TOKENS_FILE)
        sync_file(offsets_path)
        record = {"format": FORMAT, "version": VERSION, **asdict(meta)}
        (self.folder / META_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        sync_file(self.folder / META_FILE)
        sync_folder(self.folder)
        return meta

    def close(self) -> None:
        """Close the files; what was written stays, and is no store unless `finish` did this."""
        self._tokens.close()
        self._offsets.close()

    def _flush(self) -> None:
        self._tokens.flush()
        self._offsets.flush()


def is_store(folder: Path) -> bool:
    """Whether `folder` holds a token store and nothing else (it may be a damaged one)."""
    try:
        names = {entry.name for entry in folder.iterdir()}
        record = json.loads((folder / META_FILE).read_bytes())
    except (OSError, ValueError):
        return False
    return names <= STORE_FILES and isinstance(record, dict) and record.get("format") == FORMAT


def _read_meta(folder: Path) -> StoreMeta:
    if not folder.exists():
        raise DataError(folder, "no such token store", PREPARE_HINT)
    if not folder.is_dir():
        raise DataError(folder, "is a file, a token store is a folder", PREPARE_HINT)
    path = folder / META_FILE
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        what = "an empty folder, not a token store" if not any(folder.iterdir()) else "not a token store (no meta.json)"
        raise DataError(folder, what, PREPARE_HINT) from error
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DataError(folder, f"not a token store (meta.json is not JSON: {error})", PREPARE_HINT) from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise DataError(folder, f"not a token store (meta.json has no format {FORMAT!r})", PREPARE_HINT)
    if record.get("version") != VERSION:
        problem = f"format version {record.get('version')}; this zeco-train ({__version__}) reads version {VERSION}"
        raise DataError(folder, problem, "prepare it again")
    values: dict[str, Any] = {field.name: record.get(field.name) for field in fields(StoreMeta)}
    kinds = {"int": int, "str": str, "dict[str, str]": dict}
    for field in fields(StoreMeta):
        if not isinstance(values[field.name], kinds[str(field.type)]):
            raise DataError(path, f"{field.name} is {values[field.name]!r}, not {field.type}", "prepare it again")
    meta = StoreMeta(**values)
    if meta.num_tokens < 1 or meta.num_documents < 1:
        raise DataError(folder, "holds no tokens", "prepare it again")
    if not 0 <= meta.eos_id < meta.vocab_size or meta.dtype != token_dtype(meta.vocab_size).name:
        problem = f"eos_id {meta.eos_id}, vocab_size {meta.vocab_size} and dtype {meta.dtype} do not fit together"
        raise DataError(path, problem, "prepare it again")
    return meta


def _load_offsets(path: Path, meta: StoreMeta) -> NDArray[np.int64]:
    try:
        offsets = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        problem = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(path, f"cannot be read ({problem})", "copy the store again or prepare it again") from error
    problem = ""
    if offsets.dtype != np.int64 or offsets.shape != (meta.num_documents + 1,):
        problem = f"{offsets.dtype} {list(offsets.shape)}, expected int64 [{meta.num_documents + 1}]"
    elif offsets[0] != 0 or offsets[-1] != meta.num_tokens:
        problem = f"runs from {offsets[0]} to {offsets[-1]}, expected 0 to {meta.num_tokens}"
    else:
        blocks = range(0, len(offsets) - 1, _OFFSETS_BLOCK)
        if any((np.diff(offsets[start : start + _OFFSETS_BLOCK + 1]) <= 0).any() for start in blocks):
            problem = "its offsets do not increase"
    if problem:
        raise DataError(path, f"does not fit meta.json: {problem}", "copy the store again or prepare it again")
    return offsets


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from iter(lambda: file.read(_BLOCK_BYTES), b"")


def _sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
