"""Sequences in segments: the segments of all ranks, concatenated, equal the sequence read by one rank."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from data.config import Shuffle, check_seq_len
from data.loader import Batch, DataSplit, PrefetchingLoader, SequenceLoader, SequenceReader, Source, validation_batches
from data.store import PREPARE_HINT, TokenStore, shard_name
from data.store.documents import Documents
from tests.support.stores import write_numbered_store
from tests.support.waiting import ENOUGH
from zeco_train.errors import ConfigError, DataError

SEQ_LEN = 24
# Borders at the edges of segments, shards and sequences and inside them; documents over several of each.
LENGTHS = [6, 3, 15, 24, 1, 1, 7, 40, 3, 12, 62, 22, 5, 30, 9]
# Segments and ranks; a shard has 24 tokens at most, and 1 at least.
CUTS = [(1, 1), (2, 1), (6, 1), (24, 1), (1, 3), (2, 2), (3, 2), (2, 3), (4, 3), (8, 3), (6, 4)]
GLOBAL_BATCH = 4


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    write_numbered_store(tmp_path / "store", LENGTHS)  # 240 tokens: 9 sequences, the tenth lacks its last label
    return TokenStore.open(tmp_path / "store")


def loader(store: TokenStore, **split: Any) -> SequenceLoader:
    return SequenceLoader(
        [Source(Documents(store))], DataSplit(**({"seq_len": SEQ_LEN} | split)), seed=7, global_batch=GLOBAL_BATCH
    )


def same(a: Batch, b: Batch) -> bool:
    """Whether two batches are the same in every field."""
    tensors = [(a.input_ids, b.input_ids), (a.labels, b.labels)]
    tensors += zip(a.position.documents or (), b.position.documents or (), strict=True)
    names = ("bounds", "rank", "seq_len", "segment", "num_segments", "micro_step")
    return (
        all(torch.equal(*pair) for pair in tensors)
        and all(getattr(a.position, name) == getattr(b.position, name) for name in names)
        and (a.sequence_ids, a.is_padding) == (b.sequence_ids, b.is_padding)
    )


def document_starts(parts: list[Batch]) -> list[int]:
    """Positions at which documents start in the concatenated shards."""
    starts: list[int] = []
    for part in parts:
        position, cuts = part.position, part.position.cu_seqlens()
        assert cuts is not None
        assert cuts.dtype == torch.int64
        assert (cuts[0], cuts[-1]) == (0, part.input_ids.shape[1])
        starts += [position.start + cut for cut in cuts[:-1].tolist() if cut > 0 or position.before() == 0]
    return starts


@pytest.mark.parametrize(("segments", "sp_size"), CUTS)
@pytest.mark.parametrize(
    ("dp_size", "micro_batch", "documents"), [(1, 1, True), (2, 1, True), (1, 2, False), (2, 2, False)]
)
def test_segments_of_all_ranks_join_to_the_sequence(
    store: TokenStore, segments: int, sp_size: int, dp_size: int, micro_batch: int, documents: bool
) -> None:
    length = SEQ_LEN // segments // sp_size
    for dp_rank in range(dp_size):
        dp = {"micro_batch": micro_batch, "dp_rank": dp_rank, "dp_size": dp_size, "reset_state_at_document": documents}
        whole = loader(store, **dp)
        ranks = [loader(store, **dp, sp_rank=rank, sp_size=sp_size, segments=segments) for rank in range(sp_size)]
        assert {(rank.micro_steps, rank.num_sequences) for rank in ranks} == {(whole.micro_steps, whole.num_sequences)}
        for consumed, micro_step in itertools.product([0, 4, 8, 21], range(whole.micro_steps)):
            expected = whole.batch(consumed, micro_step)
            parts = []
            for segment, (rank, part_loader) in itertools.product(range(segments), enumerate(ranks)):
                before = store.bytes_requested
                part = part_loader.batch(consumed, micro_step, segment)
                assert store.bytes_requested - before == micro_batch * (length + 1) * store.itemsize
                assert part.input_ids.shape == part.labels.shape == (micro_batch, length)
                start = segment * (SEQ_LEN // segments) + rank * length
                assert (part.position.segment, part.position.start) == (segment, start)
                assert part.sequence_ids == expected.sequence_ids
                parts.append(part)
            assert torch.equal(torch.cat([part.input_ids for part in parts], dim=1), expected.input_ids)
            assert torch.equal(torch.cat([part.labels for part in parts], dim=1), expected.labels)
            for part, following in itertools.pairwise(parts):  # of the next rank, or the first one's next segment
                assert torch.equal(part.labels[:, -1], following.input_ids[:, 0])
            if documents:
                assert document_starts(parts) == document_starts([expected])
            else:
                assert all(part.position.documents is None for part in parts)
                assert all(part.position.before() == part.position.start for part in parts)


@pytest.mark.parametrize("sp_size", [1, 2])
def test_document_borders_at_segment_edges(store: TokenStore, sp_size: int) -> None:
    """By hand: documents of 6, 3 and 15 tokens, one of a whole sequence, and the middle of a longer one."""
    found: dict[int, list[tuple[list[int], bool]]] = {0: [], 1: [], 5: []}
    for sequence, pieces in found.items():
        for segment, rank in itertools.product(range(4 // sp_size), range(sp_size)):
            split = DataSplit(
                SEQ_LEN, sp_rank=rank, sp_size=sp_size, segments=4 // sp_size, reset_state_at_document=True
            )
            batch = SequenceReader(Documents(store), split).read([sequence], segment)
            pieces.append((batch.position.cu_seqlens().tolist(), batch.position.before()))
    assert found == {
        0: [([0, 6], 0), ([0, 3, 6], 0), ([0, 6], 3), ([0, 6], 9)],
        1: [([0, 6], 0), ([0, 6], 6), ([0, 6], 12), ([0, 6], 18)],
        # The document began before this sequence, whose first token resets the state.
        5: [([0, 6], 0), ([0, 6], 6), ([0, 6], 12), ([0, 6], 18)],
    }


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(("segments", "sp_size"), CUTS)
def test_labels_at_document_borders_are_left_out(store: TokenStore, segments: int, sp_size: int, reset: bool) -> None:
    """Token t of the store is t, so the label of t is t + 1, unless a document begins there."""
    starts = set(itertools.accumulate(LENGTHS))
    for sequence in range(9):
        found = []
        for segment, rank in itertools.product(range(segments), range(sp_size)):
            split = DataSplit(
                SEQ_LEN,
                sp_rank=rank,
                sp_size=sp_size,
                segments=segments,
                reset_state_at_document=reset,
                labels_across_documents=False,
            )
            reader = SequenceReader(Documents(store), split)
            found += reader.read([sequence], segment).labels[0].tolist()
        expected = range(sequence * SEQ_LEN + 1, (sequence + 1) * SEQ_LEN + 1)
        assert found == [-100 if label in starts else label for label in expected]
        assert reader.num_labels(0, sequence) == SEQ_LEN - found.count(-100)


@pytest.mark.parametrize("shuffle", Shuffle)
def test_step_labels_are_those_of_all_ranks_and_segments(store: TokenStore, shuffle: Shuffle) -> None:
    for consumed in (0, 4, 6, 16):
        batches = []
        for dp_rank, sp_rank in itertools.product(range(2), range(3)):
            split = DataSplit(SEQ_LEN, 1, dp_rank, 2, sp_rank, 3, segments=2, labels_across_documents=False)
            sequences = [Source(Documents(store))]
            part = SequenceLoader(sequences, split, seed=7, global_batch=GLOBAL_BATCH, shuffle=shuffle)
            batches += [part.batch(consumed, *place) for place in itertools.product(range(2), range(2))]
        counts = sum(int((batch.labels != -100).sum()) for batch in batches)
        assert 0 < counts < GLOBAL_BATCH * SEQ_LEN
        assert {batch.step_labels for batch in batches} == {counts}


def test_prefetching_returns_segments_in_order(store: TokenStore) -> None:
    direct = loader(store, segments=3, sp_rank=1, sp_size=2, dp_rank=1, dp_size=2)
    ahead = PrefetchingLoader(direct, consumed=8, ahead=3)
    for consumed, micro_step, segment in itertools.product((8, 12, 16), range(2), range(3)):
        got = ahead.next()
        assert got.position.segment == segment
        assert same(got, direct.batch(consumed, micro_step, segment))
        assert same(got, ahead.again(consumed, micro_step, segment))
    ahead.close()


@pytest.mark.processes
def test_prefetching_reads_given_number_of_segments_ahead(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    direct = loader(store, segments=6)
    read: list[tuple[int, int, int]] = []
    enough = threading.Event()

    def batch(consumed: int, micro_step: int, segment: int = 0) -> Batch:
        read.append((consumed, micro_step, segment))
        if len(read) == 8:
            enough.set()
        return SequenceLoader.batch(direct, consumed, micro_step, segment)

    monkeypatch.setattr(direct, "batch", batch)
    ahead = PrefetchingLoader(direct, consumed=0, ahead=6)
    ahead.next()
    assert enough.wait(ENOUGH)  # one returned, six in the queue, and one read while the queue is full
    ahead._thread.join(0.3)  # time in which it could read more
    assert read == [*((0, 0, segment) for segment in range(6)), (0, 1, 0), (0, 1, 1)]
    ahead.close()


def test_prefetching_raises_errors_of_a_segment(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    direct = loader(store, segments=4)
    sequence, read = direct.batch(0, 0).sequence_ids[0], direct.batch

    def batch(consumed: int, micro_step: int, segment: int) -> Batch:
        if segment == 2:
            os.truncate(store.path / shard_name(0), (sequence * SEQ_LEN + 13) * store.itemsize)
        return read(consumed, micro_step, segment)

    monkeypatch.setattr(direct, "batch", batch)
    ahead = PrefetchingLoader(direct, consumed=0)
    assert [ahead.next().position.segment for _ in range(2)] == [0, 1]
    for _ in range(2):
        with pytest.raises(DataError, match="has become shorter since it was opened"):
            ahead.next()
    ahead.close()


@pytest.mark.parametrize(("segments", "sp_size"), [(1, 1), (2, 3), (6, 2), (24, 1)])
def test_validation_reads_every_sequence_by_segments(store: TokenStore, segments: int, sp_size: int) -> None:
    for dp_size, micro_batch, most in itertools.product([1, 2, 4], [1, 2], [None, 5]):
        groups_of_ranks = []
        for dp_rank, sp_rank in itertools.product(range(dp_size), range(sp_size)):
            split = DataSplit(SEQ_LEN, micro_batch, dp_rank, dp_size, sp_rank, sp_size, segments=segments)
            batches = list(validation_batches(SequenceReader(Documents(store), split), max_sequences=most))
            assert [batch.position.segment for batch in batches] == [*range(segments)] * (len(batches) // segments)
            for batch in batches:
                first = torch.tensor(batch.sequence_ids or [0])[:, None] * SEQ_LEN + batch.position.start
                assert torch.equal(batch.input_ids, first + torch.arange(batch.position.num_tokens))
                assert batch.is_padding == (batch.sequence_ids == [])
            groups = [batches[start : start + segments] for start in range(0, len(batches), segments)]
            assert all(len({tuple(batch.sequence_ids) for batch in group}) == 1 for group in groups)
            groups_of_ranks.append([group[0].sequence_ids for group in groups])
        assert len({len(groups) for groups in groups_of_ranks}) == 1, "a collective would hang"
        ids = sorted(itertools.chain(*itertools.chain(*groups_of_ranks)))
        assert ids == sorted([*range(min(9, most or 9))] * sp_size)


@pytest.mark.parametrize(
    ("seq_len", "num_tokens", "expected"),
    [
        (7, None, "must be ≥ 8: a token of each sequence for each of sp.size × train.segments = 2 × 4 = 8"),
        (0, None, "must be positive; nearest legal value: 8"),
        (1008, 1008, "longer than the corpus of 1008 tokens; largest legal value: 1007; for longer sequences "),
        (8, 8, "the corpus has only 8 tokens, too few for any sequence with sp.size × train.segments = 2 × 4 = 8"),
    ],
)
def test_invalid_seq_len_is_refused(seq_len: int, num_tokens: int | None, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_seq_len(seq_len, 2, num_tokens, 4)
    assert str(caught.value).removesuffix(PREPARE_HINT) == f"data.seq_len={seq_len}: {expected}"
    check_seq_len(1000, 2, 1001, 4)


def test_loader_refuses_invalid_seq_len(store: TokenStore) -> None:
    with pytest.raises(ConfigError, match=r"data\.seq_len=24: must be ≥ 26: .* = 2 × 13 = 26$"):
        DataSplit(SEQ_LEN, sp_size=2, segments=13)
    with pytest.raises(ConfigError, match=r"data\.seq_len=240: longer than the corpus .* of 240 tokens; .*: 239; "):
        loader(store, seq_len=240, sp_size=2, segments=4)
    assert loader(store, seq_len=232, sp_size=2, segments=4).num_sequences == 1
