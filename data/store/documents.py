"""A store's documents as one token stream, in stored or random order, and the borders of a sequence's documents."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.randomness import Permutation
from data.sources.corpora import default_cache_dir
from data.store import TokenStore
from data.store.index import DocumentIndex, block_sums, cached, long_documents, touched

# Smaller stores are indexed faster than a cached index could be opened and checked.
SMALLEST_CACHED = 1 << 20
_INDEX_FORMAT = 1


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
    """The documents of a store as one stream of tokens.

    Args:
        store: holds the documents.
        index: selection and order of the documents; None for all, in stored order.
    """

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
        store: holds the documents.
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
