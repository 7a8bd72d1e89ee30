"""A store's documents as one token stream, in stored or random order, and the borders of a sequence's documents.

A random order is a `Permutation`, which takes no memory. The index adds the token position of every 128th document in
that order: 0.06 bytes per document. A look-up finds the block, computes its documents, and sums their lengths. A filter
stores the list of kept documents, 4 bytes each, once for all epochs. Building an index reads all document offsets once
(10^8 documents: about 15 s). For large stores it is therefore cached in a file that all processes of a machine map.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.config import default_cache_dir
from data.randomness import Permutation
from data.store import TokenStore, map_array
from zeco_train.errors import DataError
from zeco_train.system.files import whole_file, write_errors
from zeco_train.system.small_files import check_regular

# Smaller stores are indexed faster than a cached index could be opened and checked.
SMALLEST_CACHED = 1 << 20
_INDEX_FORMAT = 1
# Documents per stored position.
BLOCK = 128
# Documents processed at a time; a multiple of BLOCK, so that no block straddles two chunks.
_CHUNK = BLOCK << 11
_DIGEST_BYTES = 32

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DocumentIndex:
    """A selection and order of a store's documents.

    Attributes:
        kept: [n] their numbers in the store, increasing; None: all n documents of the store.
        order: document i of the stream is kept[order(i)]; None: kept[i].
        sums: [⌈n / BLOCK⌉ + 1] int64, tokens before documents 0, BLOCK, 2·BLOCK, … of the stream, and the total.
        num_documents: n.
    """

    kept: NDArray[np.integer] | None
    order: Permutation | None
    sums: NDArray[np.int64]
    num_documents: int

    @property
    def num_tokens(self) -> int:
        """Total tokens of the index's documents."""
        return int(self.sums[-1])

    def documents(self, first: int, beyond: int) -> NDArray[np.int64]:
        """The documents at places [first, beyond) of the stream, as numbers in the store."""
        places = np.arange(first, beyond)
        chosen = places if self.order is None else self.order.map(places)
        return chosen if self.kept is None else self.kept[chosen].astype(np.int64)

    def around(self, start: int, stop: int) -> tuple[NDArray[np.int64], int]:
        """The documents of the blocks that cover tokens [start, stop), and the number of tokens before them."""
        first, beyond = touched(self.sums, start, stop)
        return self.documents(first * BLOCK, min(beyond * BLOCK, self.num_documents)), int(self.sums[first])


def touched(offsets: NDArray[np.int64], start: int, stop: int) -> tuple[int, int]:
    """The range [first, beyond) of the parts, bordered by `offsets`, that overlap positions [start, stop)."""
    # The sides differ so that parts which only share a border with [start, stop) are left out.
    first = int(np.searchsorted(offsets, start, side="right")) - 1
    return first, int(np.searchsorted(offsets, stop, side="left"))


def long_documents(offsets: NDArray[np.int64], min_tokens: int) -> NDArray[np.integer]:
    """The numbers of the documents of at least `min_tokens` tokens, increasing; uint32 if they fit, else int64."""
    count = len(offsets) - 1
    dtype = np.uint32 if count <= 1 << 32 else np.int64
    found = [np.empty(0, dtype)]
    for start in range(0, count, _CHUNK):
        lengths = np.diff(offsets[start : start + _CHUNK + 1])
        found.append((start + np.flatnonzero(lengths >= min_tokens)).astype(dtype))
    return np.concatenate(found)


def block_sums(offsets: NDArray[np.int64], index: DocumentIndex) -> NDArray[np.int64]:
    """Compute `DocumentIndex.sums` from the store's document offsets; the index's other fields must be set."""
    sums = [np.zeros(1, np.int64)]
    for first in range(0, index.num_documents, _CHUNK):
        documents = index.documents(first, min(first + _CHUNK, index.num_documents))
        lengths = offsets[documents + 1] - offsets[documents]
        sums.append(np.add.reduceat(lengths, np.arange(0, len(lengths), BLOCK)))
    return np.cumsum(np.concatenate(sums))


def cached(path: Path, make: Callable[[], NDArray], what: str) -> NDArray:
    """Map the array in the file `path`. The first process to ask creates the file; the others wait on its lock.

    Raises:
        DataError: the file cannot be written.
    """
    with write_errors(path, "choose another folder with data.cache_dir=FOLDER or ZECO_CACHE=FOLDER"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            array = _read(path)
            if array is None:
                started = time.perf_counter()
                _write(path, make())
                logger.info("%s made in %.1f s: %s", what, time.perf_counter() - started, path)
                # Mapped from the file, not kept: the machine's processes share its pages.
                array = _read(path)
    if array is None:
        raise DataError(path, "does not hold what was just written there", "check the disk, or set data.cache_dir")
    return array


def _read(path: Path) -> NDArray | None:
    try:
        check_regular(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size - _DIGEST_BYTES
            digest, left = hashlib.sha256(), size
            while left > 0 and (part := file.read(min(left, 1 << 22))):
                digest.update(part)
                left -= len(part)
            intact = file.read() == digest.digest()
        if intact:
            return map_array(path)
    except FileNotFoundError:
        return None
    except ValueError:
        pass
    logger.warning("%s is damaged; making it again", path)
    return None


def _write(path: Path, array: NDArray) -> None:
    with whole_file(path) as partial, partial.open("w+b") as file:
        np.save(file, array, allow_pickle=False)
        file.seek(0)
        # Appended to the file: mapping an .npy file ignores what follows the array.
        digest = hashlib.file_digest(file, "sha256").digest()
        file.seek(0, os.SEEK_END)
        file.write(digest)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("ab") as file:
        # Without locks (some network file systems) several processes write the same file; the last one wins.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class Pieces:
    """The k documents that overlap a range of a stream, in stream order.

    Attributes:
        documents: [k] their numbers in the store.
        offsets: [k + 1] int64, their start positions in the stream, and the end of the last.
        starts: [k] int64, their start positions in the store.
    """

    documents: NDArray[np.int64]
    offsets: NDArray[np.int64]
    starts: NDArray[np.int64]


class DocumentStream:
    """The documents of a store as one stream of tokens, selected and ordered by `index`; None: all as stored."""

    def __init__(self, store: TokenStore, index: DocumentIndex | None = None) -> None:
        self.store, self._index = store, index
        self.num_tokens = store.num_tokens if index is None else index.num_tokens

    def pieces(self, start: int, stop: int) -> Pieces:
        """The documents of tokens [start, stop) of the stream."""
        assert 0 <= start < stop <= self.num_tokens, (start, stop, self.num_tokens)
        borders = self.store.doc_offsets
        if self._index is None:
            first, beyond = touched(borders, start, stop)
            offsets = np.asarray(borders[first : beyond + 1])
            return Pieces(np.arange(first, beyond), offsets, offsets[:-1])
        documents, before = self._index.around(start, stop)
        starts = borders[documents]
        offsets = before + np.concatenate(([0], np.cumsum(borders[documents + 1] - starts)))
        first, beyond = touched(offsets, start, stop)
        return Pieces(documents[first:beyond], offsets[first : beyond + 1], starts[first:beyond])

    def read(self, pieces: Pieces, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [start, stop) of the stream, [stop − start] int64; `pieces` are the documents of this range.

        Reads nothing else. Documents adjacent in the store are read with one call.

        Raises:
            DataError: see `TokenStore.read`.
        """
        begins = np.maximum(pieces.offsets[:-1], start)
        ends = np.minimum(pieces.offsets[1:], stop)
        froms = pieces.starts + (begins - pieces.offsets[:-1])
        tos = froms + (ends - begins)
        # Where a piece does not continue the one before it in the store, a new read begins.
        apart = np.flatnonzero(froms[1:] != tos[:-1])
        runs = zip(froms[np.append(0, apart + 1)].tolist(), tos[np.append(apart, len(tos) - 1)].tolist(), strict=True)
        if len(apart) == 0:
            return self.store.read(*next(runs))
        tokens, filled = np.empty(stop - start, dtype=np.int64), 0
        for first, beyond in runs:
            tokens[filled : filled + beyond - first] = self.store.read(first, beyond)
            filled += beyond - first
        assert filled == stop - start, (filled, start, stop)
        return tokens


class Documents:
    """A store's documents of at least `min_tokens` tokens, and token streams of them.

    Args:
        store: of the documents.
        min_tokens: shorter documents, end of sequence included, are dropped.
        cache_dir: folder for the indices of large stores; None for the user's cache.
        smallest_cached: indices of stores with at least this many documents are cached as files.

    Attributes:
        num_documents, num_tokens: counts after filtering; may be 0.

    Raises:
        DataError: an index cannot be written.
    """

    def __init__(
        self,
        store: TokenStore,
        min_tokens: int = 0,
        cache_dir: Path | None = None,
        smallest_cached: int = SMALLEST_CACHED,
    ) -> None:
        self.store, self.min_tokens = store, min_tokens
        self._folder = (cache_dir or default_cache_dir()) / "indices"
        self._is_small = store.meta.num_documents < smallest_cached
        self._stored: DocumentIndex | None = None
        self._kept: NDArray[np.integer] | None = None
        self.num_documents, self.num_tokens = store.meta.num_documents, store.num_tokens
        # Every document has at least its end-of-sequence token, so a minimum of 1 keeps all.
        if min_tokens > 1:
            self._kept = self._load("documents", lambda: long_documents(store.doc_offsets, min_tokens))
            self.num_documents = len(self._kept)
            self._stored = self._index(None)
            self.num_tokens = self._stored.num_tokens

    @property
    def description(self) -> str:
        """Name in messages."""
        left = f" (its documents of {self.min_tokens} tokens or more)" if self.min_tokens > 1 else ""
        return f"the corpus {self.store.path}{left}"

    def stream(self, order: Permutation | None = None) -> DocumentStream:
        """Concatenate the documents, in stored order or in `order`, a permutation of all `num_documents`."""
        return DocumentStream(self.store, self._stored if order is None else self._index(order))

    def _index(self, order: Permutation | None) -> DocumentIndex:
        # The sums are a placeholder: computing them needs the other fields.
        index = DocumentIndex(self._kept, order, np.zeros(1, np.int64), self.num_documents)
        name = "stored order" if order is None else order.name
        return replace(index, sums=self._load(name, lambda: block_sums(self.store.doc_offsets, index)))

    def _load(self, name: str, make: Callable[[], NDArray]) -> NDArray:
        if self._is_small:
            return make()
        # The store's digest instead of its path: copies share an index, a store prepared anew gets another.
        key = f"{_INDEX_FORMAT} {self.store.meta.doc_offsets_sha256} {self.min_tokens} {name}"
        path = self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npy"
        return cached(path, make, f"index of {self.store.path} ({name})")


def sequence_borders(doc_offsets: NDArray[np.int64], start: int, seq_len: int) -> Tensor:
    """Borders of the documents of the sequence tokens[start : start + seq_len], [documents + 1] from 0 to `seq_len`.

    A sequence begins with a fresh state: a document that began before `start` restarts there.

    Args:
        doc_offsets: [documents + 1] int64, strictly increasing, the document borders in the token stream; those of the
            documents in the sequence suffice.
        start: position of the sequence's first token in the stream.
        seq_len: tokens of the sequence, at least 1.
    """
    first, beyond = touched(doc_offsets, start, start + seq_len)
    inside = doc_offsets[first + 1 : beyond] - start
    return torch.from_numpy(np.concatenate(([0], inside, [seq_len])).astype(np.int64))
