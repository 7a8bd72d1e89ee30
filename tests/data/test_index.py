"""Document indices: equal from file and memory, rebuilt if damaged, and built by one process only."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from data.randomness import Permutation
from data.store import TokenStore
from data.store import documents as index
from data.store.documents import Documents
from tests.support.stores import write_tokens
from tests.support.waiting import ENOUGH
from zeco_train.errors import DataError

# Several blocks of 128 entries, the last one partial.
NUM_DOCUMENTS = 300


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    lengths = np.random.default_rng(0).integers(1, 40, NUM_DOCUMENTS)
    return TokenStore.open(write_tokens(tmp_path / "store", np.arange(lengths.sum()), lengths, vocab_size=1 << 17))


def whole_stream(documents: Documents, order: Permutation | None) -> list[int]:
    stream = documents.stream(order)
    return stream.read(stream.pieces(0, stream.num_tokens), 0, stream.num_tokens).tolist()


@pytest.mark.parametrize(("shortest", "shuffled"), [(0, True), (25, True), (39, False), (40, False)])
def test_stream_equals_reference_from_memory_and_file(
    store: TokenStore, shortest: int, shuffled: bool, tmp_path: Path
) -> None:
    """From memory, from a new file and from an existing one; the whole stream and random ranges."""
    offsets = store.doc_offsets.tolist()
    kept = [range(a, b) for a, b in itertools.pairwise(offsets) if b - a >= shortest]
    order = Permutation(len(kept), 3, 1, "documents") if shuffled else None
    expected = list(itertools.chain(*(kept[order(i) if order else i] for i in range(len(kept)))))
    for smallest_cached in (NUM_DOCUMENTS + 1, NUM_DOCUMENTS, NUM_DOCUMENTS):
        documents = Documents(store, shortest, tmp_path, smallest_cached)
        assert (documents.num_documents, documents.num_tokens) == (len(kept), len(expected))
        assert not expected or whole_stream(documents, order) == expected
    stream = documents.stream(order)
    rng = np.random.default_rng(1)
    for start, stop in [
        (0, 1),
        (len(expected) - 1, len(expected)),
        *np.sort(rng.choice(len(expected) + 1, (15, 2)), 1),
    ]:
        if 0 <= start < stop <= len(expected):
            pieces = stream.pieces(int(start), int(stop))
            assert pieces.offsets[0] <= start < pieces.offsets[1]
            assert pieces.offsets[-2] < stop <= pieces.offsets[-1]
            assert stream.read(pieces, int(start), int(stop)).tolist() == expected[start:stop]


def test_each_order_and_filter_has_its_own_file(store: TokenStore, tmp_path: Path) -> None:
    for shortest, seed, epoch in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (9, 0, 0)]:
        documents = Documents(store, shortest, tmp_path, smallest_cached=0)
        documents.stream(Permutation(documents.num_documents, seed, epoch, "documents"))
    # The filter has two files: the kept documents and their positions.
    assert len(list((tmp_path / "indices").glob("*.npy"))) == 4 + 2


@pytest.mark.parametrize("damage", ["truncated", "empty", "a flipped bit", "another file"])
def test_damaged_index_file_is_rebuilt(
    store: TokenStore, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    order = Permutation(NUM_DOCUMENTS, 0, 0, "documents")
    expected = whole_stream(Documents(store, 0, tmp_path, smallest_cached=0), order)
    [path] = (tmp_path / "indices").glob("*.npy")
    intact = path.read_bytes()
    changed = bytearray(intact)
    changed[len(intact) // 2] ^= 1
    path.write_bytes(
        {"truncated": intact[:-1], "empty": b"", "a flipped bit": bytes(changed), "another file": b"x" * 500}[damage]
    )
    with caplog.at_level(logging.WARNING):
        assert whole_stream(Documents(store, 0, tmp_path, smallest_cached=0), order) == expected
    assert f"{path} is damaged; making it again" in caplog.text
    assert path.read_bytes() == intact
    assert [entry.suffix for entry in path.parent.iterdir() if "tmp" in entry.name] == []


def _make_one(path: str, folder: str, barrier: multiprocessing.synchronize.Barrier) -> None:
    count = 0
    write = index._write

    def counted(*arguments: object) -> None:
        nonlocal count
        count += 1
        write(*arguments)  # type: ignore[arg-type]

    index._write = counted  # type: ignore[assignment]
    barrier.wait(ENOUGH)
    documents = Documents(TokenStore.open(path), 0, Path(folder), smallest_cached=0)
    documents.stream(Permutation(documents.num_documents, 0, 0, "documents"))
    Path(folder, f"made-{os.getpid()}").write_text(str(count))


@pytest.mark.processes
def test_concurrent_processes_build_index_once(store: TokenStore, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    arguments = (str(store.path), str(tmp_path), barrier)
    processes = [context.Process(target=_make_one, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert sorted(path.read_text() for path in tmp_path.glob("made-*")) == ["0", "0", "0", "1"]


def test_unwritable_index_folder_is_reported(store: TokenStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataError, match=r"/file/.*: cannot be written \(Not a directory\); choose another folder with"):
        Documents(store, 9, tmp_path / "file", smallest_cached=0)
