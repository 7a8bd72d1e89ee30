"""Stores of many shards: contents do not depend on shard size, nor on interruptions of the writer."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from data import store as store_module
from data.inspect import check_shard
from data.loader.batches import DataSplit
from data.loader.loader import SequenceLoader
from data.loader.sequences import Source
from data.store import META_FILE, TokenStore, shard_name
from data.store.documents import Documents
from data.store.writer import StoreWriter, WriterState
from tests.support.commands import snapshot
from tests.support.stores import edit_json, verify, write_tokens
from zeco_train.errors import DataError

LENGTHS = [3, 1, 7, 20, 5, 14]
NUM_TOKENS = sum(LENGTHS)
TOKENS = np.arange(NUM_TOKENS) + 2


def new_writer(folder: Path, shard_tokens: int, state: WriterState | None = None) -> StoreWriter:
    return StoreWriter(
        folder, vocab_size=1000, eos_id=1, tokenizer={"kind": "bytes"}, shard_tokens=shard_tokens, state=state
    )


def write(folder: Path, shard_tokens: int) -> Path:
    return write_tokens(folder, TOKENS, LENGTHS, 1000, shard_tokens=shard_tokens)


@pytest.mark.parametrize("shard_tokens", [1, 7, 49, 50])
def test_reads_cross_shard_borders(tmp_path: Path, shard_tokens: int) -> None:
    opened = TokenStore.open(write(tmp_path / "store", shard_tokens))
    assert opened.num_shards == -(-NUM_TOKENS // shard_tokens)
    for index, shard in enumerate(opened.meta.shards):
        data = (tmp_path / "store" / shard.name).read_bytes()
        assert len(data) == 2 * shard.num_tokens <= 2 * shard_tokens
        assert shard.sha256 == hashlib.sha256(data).hexdigest()
        assert opened.shard_range(index) == (index * shard_tokens, index * shard_tokens + shard.num_tokens)
    for start, stop in itertools.combinations_with_replacement(
        range(0, NUM_TOKENS + 1, 1 if shard_tokens == 7 else 5), 2
    ):
        assert opened.read(start, stop).tolist() == TOKENS[start:stop].tolist()
    assert opened.doc_offsets.tolist() == [0, *np.cumsum(LENGTHS).tolist()]
    verify(opened)


def test_number_of_open_shards_of_all_stores_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened_last = lru_cache(maxsize=3)(store_module._opened.__wrapped__)
    monkeypatch.setattr(store_module, "_opened", opened_last)
    stores = [TokenStore.open(write(tmp_path / name, 5)) for name in ("a", "b")]
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counts descriptors
    for opened in [*stores, *stores]:
        np.testing.assert_array_equal(opened.read(0, NUM_TOKENS), TOKENS)
        assert len(os.listdir("/proc/self/fd")) == before + 3  # noqa: PTH208
    for opened in stores:
        opened.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize("shard_tokens", [6, 50])
def test_sequence_parallel_rank_reads_only_its_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_tokens: int
) -> None:
    """Each rank reads exactly the bytes of its own tokens and one more."""
    path = write(tmp_path / "store", shard_tokens)
    asked: list[int] = []
    whole = os.preadv

    def spy(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        first = int(name.removeprefix("tokens-").removesuffix(".bin")) * shard_tokens * 2 + offset
        asked.extend(range(first, first + len(buffers[0])))
        return whole(descriptor, buffers, offset)

    monkeypatch.setattr(store_module.os, "preadv", spy)
    for rank in range(4):
        asked.clear()
        store = TokenStore.open(path)
        split = DataSplit(48, sp_rank=rank, sp_size=4)
        loader = SequenceLoader([Source(Documents(store))], split, seed=0, global_batch=1)
        batch = loader.batch(0, 0)
        assert asked == list(range(2 * 12 * rank, 2 * (12 * (rank + 1) + 1)))
        assert store.bytes_requested == len(asked)
        assert torch.equal(batch.input_ids[0], torch.from_numpy(TOKENS[12 * rank : 12 * (rank + 1)]))
        assert torch.equal(batch.labels[0], torch.from_numpy(TOKENS[12 * rank + 1 : 12 * (rank + 1) + 1]))


def test_version_1_store_opens_as_one_shard(tmp_path: Path) -> None:
    folder = write(tmp_path / "store", NUM_TOKENS)
    record = json.loads((folder / META_FILE).read_text())
    [shard] = record.pop("shards")
    del record["preparation"]
    (folder / META_FILE).write_text(json.dumps(record | {"version": 1, "tokens_sha256": shard["sha256"]}))
    (folder / shard_name(0)).rename(folder / "tokens.bin")
    opened = TokenStore.open(folder)
    verify(opened)
    np.testing.assert_array_equal(opened.read(0, NUM_TOKENS), TOKENS)
    assert (opened.num_shards, opened.meta.tokens_sha256) == (1, shard["sha256"])
    (folder / "tokens.bin").unlink()
    with pytest.raises(DataError, match=r"tokens\.bin: cannot be read \(No such file"):
        TokenStore.open(folder)


def test_damaged_or_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "store", 7)
    opened = TokenStore.open(folder)
    data = bytearray((folder / shard_name(3)).read_bytes())
    data[4] ^= 1  # still a valid id: only the digest differs
    (folder / shard_name(3)).write_bytes(data)
    for store in (opened, TokenStore.open(folder)):
        with pytest.raises(DataError, match=r"tokens-00003\.bin: its contents differ from what was prepared; copy the"):
            check_shard(store, 3, [])
    (folder / shard_name(5)).unlink()
    with pytest.raises(DataError, match=r"tokens-00005\.bin.*: cannot be read \(No such file or directory\); copy the"):
        TokenStore.open(folder)
    np.testing.assert_array_equal(opened.read(0, 21), TOKENS[:21])
    with pytest.raises(DataError, match=r"tokens-00003\.bin, bytes 8 to 14: was changed or replaced since"):
        opened.read(25, 35)
    with pytest.raises(DataError, match=r"tokens-00005\.bin.*: cannot be read \(No such file or directory\); copy the"):
        opened.read(30, 40)


@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        ([], "its shards have 0 tokens, num_tokens says 50"),
        ([{"name": "tokens-00000.bin", "num_tokens": 49, "sha256": "x"}], "its shards have 49 tokens, num_tokens says"),
        ([{"name": "../tokens-00000.bin", "num_tokens": 50, "sha256": "x"}], "is no shard of tokens"),
        ([{"name": "tokens-00000.bin", "num_tokens": 0, "sha256": "x"}], "is no shard of tokens"),
        (["tokens-00000.bin"], "is no shard of tokens"),
        (7, "shards is 7, not tuple[ShardMeta, ...]"),
    ],
)
def test_invalid_shard_list_is_refused(tmp_path: Path, shards: object, expected: str) -> None:
    folder = write(tmp_path / "store", 50)
    edit_json(folder / META_FILE, shards=shards)
    with pytest.raises(DataError) as caught:
        TokenStore.open(folder)
    assert expected in str(caught.value)


@pytest.mark.parametrize(("shard_tokens", "stop"), [(1, 1), (4, 2), (11, 3), (31, 4), (100, 5)])
def test_interrupted_writer_resumes_from_checkpoint(tmp_path: Path, shard_tokens: int, stop: int) -> None:
    """Documents after the checkpoint are lost, and the resumed writer writes them again."""
    expected = snapshot(write(tmp_path / "unbroken", shard_tokens))
    first = sum(LENGTHS[:stop])
    with new_writer(tmp_path / "store", shard_tokens) as writer:
        writer.append(TOKENS[:first], LENGTHS[:stop])
        state = writer.checkpoint()
        writer.append(np.full(40, 9), [40])
        writer.checkpoint()
        sizes = {path: path.stat().st_size for path in (tmp_path / "store").iterdir()}
    # Closing had nothing left to write, which a kill would lose.
    assert {path: path.stat().st_size for path in sizes} == sizes
    with pytest.raises(DataError, match="from the start"):
        new_writer(tmp_path / "other", shard_tokens, state)
    with new_writer(tmp_path / "store", shard_tokens, state) as writer:
        writer.append(TOKENS[first:], LENGTHS[stop:])
        writer.finish("sources")
    assert snapshot(tmp_path / "store") == expected


@pytest.mark.parametrize("shard_tokens", [1, 19, 25, 100])
def test_tail_is_split_off_across_shards(tmp_path: Path, shard_tokens: int) -> None:
    with new_writer(tmp_path / "store", shard_tokens) as writer:
        writer.append(TOKENS, LENGTHS)
        # The tail may have exactly the fraction: 19 of 50 tokens.
        state = writer.tail_state(0.4)
        assert writer.tail_state(0.38) == state
        with writer.copy_tail(state, tmp_path / "store" / "validation") as tail:
            tail.finish("sources")
        writer.resume(state)
        assert writer.checkpoint() == state
        writer.finish("sources")
    kept, held_out = TokenStore.open(tmp_path / "store"), TokenStore.open(tmp_path / "store" / "validation")
    # 40 % of 50 tokens are 20: the last two documents (19) fit, the one before does not.
    assert (kept.doc_offsets.tolist(), held_out.doc_offsets.tolist()) == ([0, 3, 4, 11, 31], [0, 5, 19])
    verify(kept)
    verify(held_out)
    np.testing.assert_array_equal(np.concatenate([kept.read(0, 31), held_out.read(0, 19)]), TOKENS)
