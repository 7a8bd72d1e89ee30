"""A store's documents as one token stream, in stored or random order, and the borders of a sequence's documents.

A random order is a `Permutation`, which takes no memory. The index adds the token position of every 128th document in
that order: 0.06 bytes per document. A filter stores the list of kept documents, 4 bytes each, once for all epochs.
Building an index reads all document offsets once (10^8 documents: about 15 s), so the index of a large store is cached
in a file that all processes of a machine map.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

Load = Callable[[str, Callable[[], NDArray]], NDArray]


def touched(offsets: NDArray[np.int64], start: int, stop: int) -> tuple[int, int]:
    """The range [first, beyond) of the parts, bordered by `offsets`, that overlap positions [start, stop)."""
    # The sides differ so that parts which only share a border with [start, stop) are left out.
    first = int(np.searchsorted(offsets, start, side="right")) - 1
    return first, int(np.searchsorted(offsets, stop, side="left"))


def _long_documents(offsets: NDArray[np.int64], min_tokens: int) -> NDArray[np.integer]:
    # The numbers of the documents of at least `min_tokens` tokens, increasing.
    count = len(offsets) - 1
    dtype = np.uint32 if count <= 1 << 32 else np.int64
    found = [np.empty(0, dtype)]
    for start in range(0, count, _CHUNK):
        lengths = np.diff(offsets[start : start + _CHUNK + 1])
        found.append((start + np.flatnonzero(lengths >= min_tokens)).astype(dtype))
    return np.concatenate(found)


def _cached(path: Path, make: Callable[[], NDArray], what: str) -> NDArray:
    # The first process to ask creates the file; the others wait on its lock.
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
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
            intact = hashlib.sha256(memoryview(whole)[:-_DIGEST_BYTES]).digest() == whole[-_DIGEST_BYTES:]
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
    """The k documents that overlap a range of a stream, in stream order."""

    documents: NDArray[np.int64]  # [k] their numbers in the store
    offsets: NDArray[np.int64]  # [k + 1] their start positions in the stream, and the end of the last
    starts: NDArray[np.int64]  # [k] their start positions in the store


class DocumentStream:
    """Documents of a store as one stream of tokens.

    Args:
        kept: [n] the documents' numbers in the store, increasing; None: all.
        order: document i of the stream is kept[order(i)]; None: kept[i].
        load: returns the array that a function makes, or a cached one of this name.
    """

    def __init__(self, store: TokenStore, kept: NDArray[np.integer] | None, order: Permutation | None, load: Load):
        self.store, self._kept, self._order = store, kept, order
        self.num_documents = store.meta.num_documents if kept is None else len(kept)
        self.num_tokens = store.num_tokens
        # Tokens before documents 0, BLOCK, 2·BLOCK, … of the stream, and the total; not needed for a store as it is.
        self._sums: NDArray[np.int64] | None = None
        if kept is not None or order is not None:
            self._sums = load("stored order" if order is None else order.name, self._block_sums)
            self.num_tokens = int(self._sums[-1])

    def pieces(self, start: int, stop: int) -> Pieces:
        """The documents of tokens [start, stop) of the stream."""
        assert 0 <= start < stop <= self.num_tokens, (start, stop, self.num_tokens)
        borders = self.store.doc_offsets
        if self._sums is None:
            first, beyond = touched(borders, start, stop)
            offsets = np.asarray(borders[first : beyond + 1])
            return Pieces(np.arange(first, beyond), offsets, offsets[:-1])
        first, beyond = touched(self._sums, start, stop)
        documents, before = self._documents(first * BLOCK, beyond * BLOCK), int(self._sums[first])
        starts = borders[documents]
        offsets = before + np.concatenate(([0], np.cumsum(borders[documents + 1] - starts)))
        first, beyond = touched(offsets, start, stop)
        return Pieces(documents[first:beyond], offsets[first : beyond + 1], starts[first:beyond])

    def read(self, pieces: Pieces, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [start, stop) of the stream, [stop − start] int64; `pieces` are the documents of this range.

        Documents adjacent in the store are read with one call. Raises DataError as `TokenStore.read`.
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

    def _documents(self, first: int, beyond: int) -> NDArray[np.int64]:
        # Those at places [first, beyond) of the stream, as numbers in the store.
        places = np.arange(first, min(beyond, self.num_documents))
        chosen = places if self._order is None else self._order.map(places)
        return chosen if self._kept is None else self._kept[chosen].astype(np.int64)

    def _block_sums(self) -> NDArray[np.int64]:
        sums, offsets = [np.zeros(1, np.int64)], self.store.doc_offsets
        for first in range(0, self.num_documents, _CHUNK):
            documents = self._documents(first, first + _CHUNK)
            lengths = offsets[documents + 1] - offsets[documents]
            sums.append(np.add.reduceat(lengths, np.arange(0, len(lengths), BLOCK)))
        return np.cumsum(np.concatenate(sums))


class Documents:
    """A store's documents of at least `min_tokens` tokens, and token streams of them.

    Args:
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
        # Every document has at least its end-of-sequence token, so a minimum of 1 keeps all.
        self._kept: NDArray[np.integer] | None = None
        if min_tokens > 1:
            self._kept = self._load("documents", lambda: _long_documents(store.doc_offsets, min_tokens))
        self._stored = DocumentStream(store, self._kept, None, self._load)
        self.num_documents, self.num_tokens = self._stored.num_documents, self._stored.num_tokens

    @property
    def description(self) -> str:
        left = f" (its documents of {self.min_tokens} tokens or more)" if self.min_tokens > 1 else ""
        return f"the corpus {self.store.path}{left}"

    def stream(self, order: Permutation | None = None) -> DocumentStream:
        """Concatenate the documents, in stored order or in `order`, a permutation of all `num_documents`."""
        return self._stored if order is None else DocumentStream(self.store, self._kept, order, self._load)

    def _load(self, name: str, make: Callable[[], NDArray]) -> NDArray:
        if self._is_small:
            return make()
        # The store's digest instead of its path: copies share an index, a store prepared anew gets another.
        key = f"{_INDEX_FORMAT} {self.store.meta.doc_offsets_sha256} {self.min_tokens} {name}"
        path = self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npy"
        return _cached(path, make, f"index of {self.store.path} ({name})")


def sequence_borders(doc_offsets: NDArray[np.int64], start: int, seq_len: int) -> Tensor:
    """Borders of the documents of the sequence tokens[start : start + seq_len], [documents + 1] from 0 to `seq_len`.

    A sequence begins with a fresh state: a document that began before `start` restarts there.

    Args:
        doc_offsets: [documents + 1] int64, strictly increasing borders in the token stream, at least those in
            the sequence.
        start: position of the sequence's first token in the stream.
        seq_len: at least 1.
    """
    first, beyond = touched(doc_offsets, start, start + seq_len)
    inside = doc_offsets[first + 1 : beyond] - start
    return torch.from_numpy(np.concatenate(([0], inside, [seq_len])).astype(np.int64))
