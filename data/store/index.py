"""Document index: token positions of documents in shuffled or filtered order, small enough for stores of any size.

A random order is a `Permutation`, which takes no memory. The index adds the token position of every 128th document in
that order: 0.06 bytes per document. A look-up finds the block, computes its documents, and sums their lengths. A filter
stores the list of kept documents, 4 bytes each, once for all epochs.

Building an index reads all document offsets once (10^8 documents: about 15 s). For large stores it is therefore cached
in a file that all processes of a machine map.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.npy import map_array
from data.randomness import Permutation
from zeco_train.errors import DataError
from zeco_train.system.files import whole_file, write_errors
from zeco_train.system.small_files import check_regular

logger = logging.getLogger(__name__)

# Documents per stored position.
BLOCK = 128
# Documents processed at a time; a multiple of BLOCK, so that no block straddles two chunks.
_CHUNK = BLOCK << 11
_DIGEST_BYTES = 32


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
    """Map the array if the file exists and is intact: an .npy file followed by its sha256."""
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
