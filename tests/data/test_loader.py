"""The loader: order of sequences, slices of ranks and their labels, documents, and every value it refuses."""

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

from data.config import (
    DataConfig,
    DataKind,
    Shuffle,
    check_batch,
    check_config,
    check_seq_len,
)
from data.loader import Batch, DataSplit, PrefetchingLoader, SequenceLoader, SequenceReader, Source, validation_batches
from data.loader.opening import StorePaths, locate_stores
from data.store import PREPARE_HINT, TokenStore, shard_name
from data.store.documents import Documents, sequence_borders
from tests.support.commands import TORCHRUN, Command
from tests.support.stores import write_numbered_store
from tests.support.waiting import ENOUGH
from zeco_train.errors import ConfigError, DataError
from zeco_train.ops.position import SequencePosition

REPOSITORY = Path(__file__).resolve().parents[2]
SEQ_LEN = 24
# Borders at edges of shards and sequences and inside shards; documents of one token, and over several sequences.
LENGTHS = [6, 3, 15, 24, 1, 1, 7, 40, 3, 12, 62, 22, 5, 30, 9]


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    write_numbered_store(tmp_path / "store", LENGTHS)  # 240 tokens: 9 sequences, the tenth lacks its last label
    return TokenStore.open(tmp_path / "store")


def loader(store: TokenStore, seed: int = 7, global_batch: int = 4, **split: Any) -> SequenceLoader:
    return SequenceLoader(
        [Source(Documents(store))], DataSplit(**({"seq_len": SEQ_LEN} | split)), seed=seed, global_batch=global_batch
    )


@pytest.mark.parametrize("sp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_slices_of_ranks_join_to_the_sequence(store: TokenStore, sp_size: int, micro_batch: int) -> None:
    whole = loader(store, micro_batch=micro_batch)
    for consumed, micro_step in [(0, 0), (0, 1), (4, 1), (8, 0), (21, 1)]:
        expected = whole.batch(consumed, micro_step)
        start = torch.tensor(expected.sequence_ids)[:, None] * SEQ_LEN
        assert torch.equal(expected.input_ids, start + torch.arange(SEQ_LEN))
        assert torch.equal(expected.labels, expected.input_ids + 1), "a label is lost or moved"
        assert expected.input_ids.dtype == expected.labels.dtype == torch.int64
        parts = []
        for rank in range(sp_size):
            before = store.bytes_requested
            part = loader(store, micro_batch=micro_batch, sp_rank=rank, sp_size=sp_size).batch(consumed, micro_step)
            length = SEQ_LEN // sp_size
            assert store.bytes_requested - before == micro_batch * (length + 1) * store.itemsize
            assert part.sequence_ids == expected.sequence_ids
            assert part.input_ids.shape == part.labels.shape == (micro_batch, length)
            place = part.position
            assert (place.start, place.before(), place.cu_seqlens()) == (rank * length, rank * length, None)
            parts.append(part)
        assert torch.equal(torch.cat([part.input_ids for part in parts], dim=1), expected.input_ids)
        assert torch.equal(torch.cat([part.labels for part in parts], dim=1), expected.labels)


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
    shards = [meta["shards"][0] | {"num_tokens": num_tokens}]
    (tmp_path / "store" / "meta.json").write_text(
        json.dumps(
            meta | {"num_tokens": num_tokens, "num_documents": 2, "shards": shards, "doc_offsets_sha256": digest}
        )
    )
    split = {"sp_size": sp_size, "sp_rank": sp_size - 1, "segments": segments, "reset_state_at_document": True}
    batch = loader(TokenStore.open(tmp_path / "store"), seq_len=2**33, **split).batch(0, 0, segments - 1)
    assert batch.input_ids[0].tolist() == list(range(100, 108))
    assert batch.labels[0].tolist() == list(range(101, 109))
    assert batch.position.start == 2**33 - 8
    assert (batch.position.cu_seqlens().tolist(), batch.position.before()) == ([0, 5, 8], 2**33 - 8)


def test_last_sequence_has_all_its_labels(tmp_path: Path) -> None:
    write_numbered_store(tmp_path / "a", [48])
    write_numbered_store(tmp_path / "b", [49])
    assert loader(TokenStore.open(tmp_path / "a")).num_sequences == 1
    whole = SequenceReader(Documents(TokenStore.open(tmp_path / "b")), DataSplit(SEQ_LEN, sp_rank=1, sp_size=2))
    assert whole.num_sequences == 2
    assert whole.read([1]).labels[0].tolist() == list(range(37, 49))


@pytest.mark.parametrize("sp_size", [1, 2])
def test_step_has_same_sequences_on_every_split(store: TokenStore, sp_size: int) -> None:
    for consumed in range(0, 40, 4):
        expected = None
        for dp_size, micro_batch in [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)]:
            ids: list[int] = []
            for dp_rank in range(dp_size):
                part = loader(store, micro_batch=micro_batch, dp_rank=dp_rank, dp_size=dp_size, sp_size=sp_size)
                assert part.micro_steps == 4 // dp_size // micro_batch
                for micro_step in range(part.micro_steps):
                    ids += part.batch(consumed, micro_step).sequence_ids
            expected = expected or ids
            assert ids == expected, (dp_size, micro_batch)


def test_steps_cross_epochs_without_loss_or_repeat(store: TokenStore) -> None:
    whole = loader(store, global_batch=6)
    assert whole.num_sequences == 9
    # 6 does not divide 9: the second step crosses into the second epoch, without loss or repetition.
    stream = [whole.batch(consumed, step).sequence_ids[0] for consumed in range(0, 36, 6) for step in range(6)]
    epochs = [stream[start : start + 9] for start in range(0, 36, 9)]
    assert all(sorted(epoch) == list(range(9)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1, "every epoch has the same order"
    # `consumed` need not be a multiple of the batch: a resume with another batch continues the same stream.
    assert loader(store, global_batch=3).batch(7, 1).sequence_ids == [stream[8]]
    seeded = loader(store, seed=8)
    other = [seeded.sequence_id(seeded.place(position)) for position in range(9)]
    assert sorted(other) == list(range(9))
    assert other != epochs[0]


def pieces_by_hand(offsets: list[int], sequence_start: int, offset: int, length: int) -> tuple[list[int], int]:
    """The definition, token by token."""
    starts = {0, *(border - sequence_start for border in offsets)}  # the state is reset at the start of a sequence
    cuts = [0, *(t for t in range(1, length) if offset + t in starts), length]
    return cuts, offset - max(start for start in starts if start <= offset)


@pytest.mark.parametrize("sp_size", [1, 2, 3, 4, 6, 24])
def test_cu_seqlens_of_every_shard_match_definition(store: TokenStore, sp_size: int) -> None:
    length = SEQ_LEN // sp_size
    seen = set()
    for rank in range(sp_size):
        split = DataSplit(SEQ_LEN, sp_rank=rank, sp_size=sp_size, reset_state_at_document=True)
        part = SequenceReader(Documents(store), split)
        for sequence in range(9):
            batch = part.read([sequence])
            cuts, before = pieces_by_hand(np.cumsum([0, *LENGTHS]).tolist(), sequence * SEQ_LEN, rank * length, length)
            assert batch.position.cu_seqlens().dtype == torch.int64
            assert (batch.position.cu_seqlens().tolist(), batch.position.before()) == (cuts, before)
            seen.add((rank > 0, before > 0, len(cuts) > 2))
    assert (False, True, False) not in seen
    if sp_size == 4:  # LENGTHS covers all cases: continued document or not, with and without a border inside
        assert {(True, *case) for case in itertools.product([False, True], repeat=2)} <= seen


def test_document_across_three_shards() -> None:
    offsets = np.array([0, 3, 10, 12])
    documents = [sequence_borders(offsets, 0, 12)]
    assert documents[0].tolist() == offsets.tolist()
    got = [SequencePosition((0, 4, 8, 12), rank, documents=documents) for rank in range(3)]
    assert [(position.cu_seqlens().tolist(), position.before()) for position in got] == [
        ([0, 3, 4], 0),
        ([0, 4], 1),
        ([0, 2, 4], 5),
    ]


def test_validation_reads_every_sequence_once(store: TokenStore) -> None:
    for dp_size, micro_batch, most in itertools.product([1, 2, 4], [1, 2], [None, 5, 100]):
        count = min(9, most or 9)
        ids, rounds = [], set()
        for dp_rank in range(dp_size):
            split = DataSplit(SEQ_LEN, micro_batch, dp_rank, dp_size, sp_rank=1, sp_size=2)
            batches = list(validation_batches(SequenceReader(Documents(store), split), max_sequences=most))
            rounds.add(len(batches))
            for batch in batches:
                assert batch.input_ids.shape[0] >= 1
                assert batch.is_padding == (batch.sequence_ids == [])
                first = [row[0] for row in batch.input_ids.tolist()]
                assert batch.is_padding or first == [i * SEQ_LEN + 12 for i in batch.sequence_ids]
                ids += batch.sequence_ids
        assert sorted(ids) == list(range(count))
        assert len(rounds) == 1, "ranks with fewer batches than others: a collective would hang"


def test_prefetching_returns_same_batches(store: TokenStore) -> None:
    direct = loader(store, dp_size=2, dp_rank=1)
    ahead = PrefetchingLoader(direct, consumed=8)
    for consumed in (8, 12, 16):
        for micro_step in range(2):
            expected, got = direct.batch(consumed, micro_step), ahead.next()
            assert torch.equal(got.input_ids, expected.input_ids)
            assert got.sequence_ids == expected.sequence_ids
    ahead.close()
    assert "prefetch" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(RuntimeError, match="closed"):
        ahead.next()


@pytest.mark.processes
def test_prefetching_reads_no_further_than_ahead(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    direct = loader(store)
    read: list[int] = []
    second = threading.Event()

    def batch(consumed: int, micro_step: int, segment: int = 0) -> Batch:
        read.append(micro_step)
        if len(read) == 3:
            second.set()
        return SequenceLoader.batch(direct, consumed, micro_step, segment)

    monkeypatch.setattr(direct, "batch", batch)
    ahead = PrefetchingLoader(direct, consumed=0, ahead=1)
    ahead.next()
    assert second.wait(ENOUGH)  # one returned, one in the queue, and one read while the queue is full
    ahead._thread.join(0.3)  # time in which it could read more
    assert len(read) == 3
    ahead.close()


def test_prefetching_raises_reader_errors(store: TokenStore) -> None:
    (store.path / shard_name(0)).write_bytes(b"")
    ahead = PrefetchingLoader(loader(store), consumed=0)
    for _ in range(2):
        with pytest.raises(DataError, match="has become shorter since it was opened"):
            ahead.next()
    ahead.close()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((3, 4), "data.seq_len=3: must be ≥ 4: a token of each sequence for each of sp.size=4"),
        ((0, 4), "data.seq_len=0: must be positive; nearest legal value: 4"),
        ((-8, 4), "data.seq_len=-8: must be positive; nearest legal value: 4"),
        (
            (1004, 4, 1004),
            "data.seq_len=1004: longer than the corpus of 1004 tokens; largest legal value: 1003; "
            f"for longer sequences {PREPARE_HINT}",
        ),
        ((4, 4, 4), "data.seq_len=4: the corpus has only 4 tokens, too few for any sequence with sp.size=4"),
    ],
)
def test_invalid_seq_len_is_refused(arguments: tuple[int, ...], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_seq_len(*arguments)
    assert str(caught.value) == expected
    assert caught.value.field == "data.seq_len"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            (10, 2, 4),
            "data.global_batch=10: must be a multiple of dp × data.micro_batch = 4 × 2 = 8; nearest legal valu",
        ),
        (
            (3, 1, 4),
            "data.global_batch=3: must be a multiple of dp × data.micro_batch = 4 × 1 = 4; nearest legal values: 4",
        ),
        ((0, 1, 4), "data.global_batch=0: must be positive; nearest legal value: 4"),
        ((4, 0, 1), "data.micro_batch=0: must be positive; nearest legal value: 1"),
    ],
)
def test_invalid_batch_sizes_are_refused(arguments: tuple[int, int, int], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_batch(*arguments)
    assert str(caught.value).startswith(expected)


def test_valid_values_are_accepted() -> None:
    check_seq_len(1000, 4, 1001)
    check_seq_len(1001, 4, 1002)
    check_seq_len(4, 4)
    check_batch(16, 2, 4)
    check_config(DataConfig())


def test_loader_refuses_invalid_split(store: TokenStore) -> None:
    with pytest.raises(ConfigError, match=r"data\.seq_len=1: must be ≥ 2: "):
        loader(store, seq_len=1, sp_size=2)
    with pytest.raises(ConfigError, match=r"data\.seq_len=240: longer than the corpus .*store of 240 tokens"):
        loader(store, seq_len=240)
    with pytest.raises(ConfigError, match=r"data\.global_batch=4: must be a multiple"):
        loader(store, dp_size=3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kind": DataKind.tokens}, "data.path=None: data=tokens needs the folder of a token store; prepare one with"),
        ({"path": "x"}, "data.path=x: data=embedded takes none; use data=tokens"),
        ({"validation_path": "x"}, "data.validation_path=x: data=embedded takes none; use data=tokens"),
        ({"validation_fraction": 0.6}, "data.validation_fraction=0.6: allowed: 0 (none) to 0.5"),
        ({"seq_len": 0}, "data.seq_len=0: must be positive"),
        ({"global_batch": -1}, "data.global_batch=-1: must be positive"),
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
    with pytest.raises(ConfigError, match=r"^data\.path=None"):
        locate_stores(DataConfig(kind=DataKind.tokens))


def test_embedded_corpus_is_prepared_and_split(tmp_path: Path) -> None:
    [paths] = locate_stores(DataConfig(cache_dir=str(tmp_path)))
    assert paths.validation is not None
    train, validation = TokenStore.open(paths.train), TokenStore.open(paths.validation)
    assert train.num_tokens > 5_000_000
    # Documents are drawn, and one of them, pydoc's topics, is 7 % of a library without its tests, such as Debian's.
    assert 0.02 < validation.num_tokens / (train.num_tokens + validation.num_tokens) < 0.15
    first = SequenceReader(Documents(train), DataSplit(4096)).read([0]).input_ids[0]
    assert b"import" in bytes((first[first >= 3] - 3).tolist())


@pytest.mark.processes
@pytest.mark.slow
def test_loader_benchmark_runs_on_two_ranks(tmp_path: Path) -> None:
    launcher = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    case = ["-m", "lab.loader", "tokens=65536", "device=cpu", f"out={tmp_path / 'out'}"]
    with Command([*launcher, *case], tmp_path) as command:
        outcome = command.wait()
    assert outcome.code == 0, outcome
    assert "one sequence of 65,536 tokens, 2 ranks, uint16" in outcome.out
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert [(row["rank"], row["tokens"]) for row in rows] == [(0, 32_768), (1, 32_768)]
    for row in rows:
        assert row["cold_ms"] > 0
        assert row["warm_ms"] > 0
        # Its own tokens, and the label of the last one.
        assert row["bytes_requested"] == 2 * 32_769
