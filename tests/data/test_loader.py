"""The loader: order of sequences, slices of ranks and segments with their labels, documents, and what it refuses."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from data.config import DataConfig, DataKind, Shuffle, check_batch, check_config, check_seq_len
from data.loader.batches import Batch, DataSplit
from data.loader.loader import PrefetchingLoader, SequenceLoader, validation_batches
from data.loader.opening import StorePaths, locate_stores
from data.loader.sequences import SequenceReader, Source
from data.store import TokenStore, shard_name
from data.store.documents import Documents
from tests.support.stores import write_numbered_store
from tests.support.waiting import ENOUGH
from zeco_train.errors import ConfigError, DataError

REPOSITORY = Path(__file__).resolve().parents[2]
SEQ_LEN = 24
# Borders at edges of segments, shards and sequences and inside them; documents of one token, and over several of each.
LENGTHS = [6, 3, 15, 24, 1, 1, 7, 40, 3, 12, 62, 22, 5, 30, 9]
GLOBAL_BATCH = 4


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    # 240 tokens: 9 sequences, the tenth lacks its last label.
    return write_numbered_store(tmp_path / "store", LENGTHS)


def loader(store: TokenStore, seed: int = 7, global_batch: int = 4, **split: Any) -> SequenceLoader:
    return SequenceLoader(
        [Source(Documents(store))], DataSplit(**({"seq_len": SEQ_LEN} | split)), seed=seed, global_batch=global_batch
    )


def same(a: Batch, b: Batch) -> bool:
    """Whether two batches are the same in every field."""
    tensors = [(a.input_ids, b.input_ids), (a.labels, b.labels)]
    tensors += zip(a.position.documents or (), b.position.documents or (), strict=True)
    names = ("bounds", "rank", "seq_len", "segment", "num_segments")
    return (
        all(torch.equal(*pair) for pair in tensors)
        and all(getattr(a.position, name) == getattr(b.position, name) for name in names)
        and (a.sequence_ids, a.is_padding) == (b.sequence_ids, b.is_padding)
    )


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


# Segments and ranks; a shard has 24 tokens at most, and 1 at least.
@pytest.mark.parametrize(
    ("segments", "sp_size", "reset"), [(1, 1, False), (24, 1, True), (1, 3, False), (3, 2, True), (6, 4, False)]
)
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
    assert "prefetch" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(RuntimeError, match="closed"):
        ahead.next()


@pytest.mark.processes
@pytest.mark.parametrize("segments", [1, 6])
def test_prefetching_reads_given_number_of_segments_ahead(
    segments: int, store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = loader(store, segments=segments)
    read: list[tuple[int, int, int]] = []
    enough = threading.Event()

    def batch(consumed: int, micro_step: int, segment: int = 0) -> Batch:
        read.append((consumed, micro_step, segment))
        if len(read) == segments + 2:
            enough.set()
        return SequenceLoader.batch(direct, consumed, micro_step, segment)

    monkeypatch.setattr(direct, "batch", batch)
    ahead = PrefetchingLoader(direct, consumed=0, ahead=segments)
    ahead.next()
    assert enough.wait(ENOUGH)  # one returned, `segments` in the queue, and one read while the queue is full
    ahead._thread.join(0.3)  # time in which it could read more
    assert read == [(0, *divmod(number, segments)) for number in range(segments + 2)]
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


@pytest.mark.parametrize(("segments", "sp_size"), [(1, 1), (2, 3), (6, 2)])
def test_validation_reads_every_sequence_by_segments(store: TokenStore, segments: int, sp_size: int) -> None:
    for dp_size, micro_batch, most in [(1, 2, None), (2, 1, 5), (4, 2, 100), (2, 2, None)]:
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


@pytest.mark.parametrize(("sp_size", "segments"), [(2**10, 2**20), (1, 2**30)])
def test_positions_beyond_32_bits(tmp_path: Path, sp_size: int, segments: int) -> None:
    write_numbered_store(tmp_path / "store", [10])
    num_tokens = 2**33 + 1
    path = tmp_path / "store" / shard_name(0)
    os.truncate(path, 2 * num_tokens)  # a hole: it takes no space on disk
    with path.open("r+b") as file:
        file.seek(2 * (num_tokens - 9))
        file.write(np.arange(100, 109, dtype=np.uint16).tobytes())
    offsets = tmp_path / "store" / "doc_offsets.npy"
    np.save(offsets, np.array([0, num_tokens - 4, num_tokens]))
    digest = hashlib.sha256(offsets.read_bytes()).hexdigest()
    meta = json.loads((tmp_path / "store" / "meta.json").read_text())
    meta["shards"][0]["num_tokens"] = meta["num_tokens"] = num_tokens
    meta |= {"num_documents": 2, "doc_offsets_sha256": digest}
    (tmp_path / "store" / "meta.json").write_text(json.dumps(meta))
    split = {"sp_size": sp_size, "sp_rank": sp_size - 1, "segments": segments, "reset_state_at_document": True}
    batch = loader(TokenStore.open(tmp_path / "store"), seq_len=2**33, **split).batch(0, 0, segments - 1)
    assert batch.input_ids[0].tolist() == list(range(100, 108))
    assert batch.labels[0].tolist() == list(range(101, 109))
    assert batch.position.start == 2**33 - 8
    assert (batch.position.cu_seqlens().tolist(), batch.position.before()) == ([0, 5, 8], 2**33 - 8)


def test_last_sequence_has_all_its_labels(tmp_path: Path) -> None:
    assert loader(write_numbered_store(tmp_path / "a", [48])).num_sequences == 1
    longer = write_numbered_store(tmp_path / "b", [49])
    whole = SequenceReader(Documents(longer), DataSplit(SEQ_LEN, sp_rank=1, sp_size=2))
    assert whole.num_sequences == 2
    assert whole.read([1]).labels[0].tolist() == list(range(37, 49))


IN_ALL = "sp.size × train.segments = 2 × 4 = 8"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((3, 4), "3: must be ≥ 4: a token of each sequence for each of sp.size=4"),
        ((0, 4), "0: must be positive; nearest legal value: 4"),
        ((1004, 4, 1004), "1004: longer than the corpus of 1004 tokens; largest legal value: 1003; for longer"),
        ((4, 4, 4), "4: the corpus has only 4 tokens, too few for any sequence with sp.size=4"),
        ((7, 2, None, 4), f"7: must be ≥ 8: a token of each sequence for each of {IN_ALL}"),
        ((0, 2, None, 4), "0: must be positive; nearest legal value: 8"),
        ((8, 2, 8, 4), f"8: the corpus has only 8 tokens, too few for any sequence with {IN_ALL}"),
    ],
)
def test_invalid_seq_len_is_refused(arguments: tuple[Any, ...], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_seq_len(*arguments)
    assert str(caught.value).startswith(f"data.seq_len={expected}")
    assert caught.value.field == "data.seq_len"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            (10, 2, 4),
            "global_batch=10: must be a multiple of dp × data.micro_batch = 4 × 2 = 8; nearest legal values: 8, 16",
        ),
        ((3, 1, 4), "global_batch=3: must be a multiple of dp × data.micro_batch = 4 × 1 = 4; nearest legal values: 4"),
        ((0, 1, 4), "global_batch=0: must be positive; nearest legal value: 4"),
        ((4, 0, 1), "micro_batch=0: must be positive; nearest legal value: 1"),
    ],
)
def test_invalid_batch_sizes_are_refused(arguments: tuple[int, int, int], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_batch(*arguments)
    assert str(caught.value) == f"data.{expected}"


def test_loader_refuses_invalid_split(store: TokenStore) -> None:
    for split, field in (
        ({"seq_len": 1, "sp_size": 2}, "seq_len"),
        ({"seq_len": 240}, "seq_len"),
        ({"dp_size": 3}, "global_batch"),
    ):
        with pytest.raises(ConfigError) as caught:
            loader(store, **split)
        assert caught.value.field == f"data.{field}"
    assert loader(store, seq_len=232, sp_size=2, segments=4).num_sequences == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kind": DataKind.tokens}, "data.path=None: data=tokens needs the folder of a token store; prepare one with"),
        ({"path": "x"}, "data.path=x: data=embedded takes none; use data=tokens"),
        ({"validation_path": "x"}, "data.validation_path=x: data=embedded takes none; use data=tokens"),
        ({"validation_fraction": 0.6}, "data.validation_fraction=0.6: allowed: 0 (none) to 0.5"),
    ],
)
def test_invalid_data_config_is_refused(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(DataConfig(**changes))  # type: ignore[arg-type]
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize("name", ["embedded", "tokens", "mixture", "synthetic"])
def test_yaml_fields_equal_data_config(name: str) -> None:
    values = OmegaConf.load(REPOSITORY / "configs" / "data" / f"{name}.yaml")
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DataConfig), values))
    assert config == DataConfig(
        kind=DataKind(name), shuffle=Shuffle.documents if name == "mixture" else Shuffle.sequences
    )
    # Not the rule of labels: an evaluation on other text, which takes a file, keeps that of the run.
    unset = {"labels_across_documents"} | (set() if name == "synthetic" else {"synthetic"})
    assert set(values) == set(vars(config)) - unset


def test_locate_stores_finds_training_and_validation(store: TokenStore, tmp_path: Path) -> None:
    config = DataConfig(kind=DataKind.tokens, path=str(store.path))
    assert locate_stores(config) == [StorePaths(store.path, None)]
    other = tmp_path / "other"
    assert locate_stores(replace(config, validation_path=str(other))) == [StorePaths(store.path, other)]
    write_numbered_store(store.path / "validation", [40])
    assert locate_stores(config) == [StorePaths(store.path, store.path / "validation")]
