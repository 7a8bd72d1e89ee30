"""Ranks that share a sequence find out before the first step whether they read the same one."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from data.store import shard_name
from data.store_writer import StoreWriter
from tests.distributed import run_distributed
from tests.training import train
from zeco_train.errors import DataError

# A store's token t is t modulo 250, so any shift of it shows in every token.
TOKENS = np.arange(9000) % 250
SPLIT = ["data=tokens", "sp=zeco", "sp.size=2", "data.seq_len=64", "train.steps=1", "train.eval_sequences=0"]


def _train_on(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """What starts say: with all as it should be, with an old shard on a node, and with another micro-batch."""
    stale = f"data.path={folder}/{'stale' if rank == 3 else 'store'}"
    cases = {
        "right": [f"data.path={folder}/store"],
        "stale": [stale],
        "other batch": [f"data.path={folder}/store", f"data.micro_batch={2 if rank == 1 else 1}"],
    }
    messages = {}
    for name, overrides in cases.items():
        try:
            train(rank, world_size, f"{folder}/runs/{name}", *SPLIT, *overrides)
            messages[name] = "trained"
        except DataError as error:
            messages[name] = str(error)
    return messages


def test_ranks_that_read_something_else(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", vocab_size=259, eos_id=1, tokenizer={"kind": "bytes"}) as writer:
        writer.append(TOKENS, [len(TOKENS)])
        writer.finish("sources")
    shutil.copytree(tmp_path / "store", tmp_path / "stale")
    # Of the same size, under a meta.json that is up to date.
    (tmp_path / "stale" / shard_name(0)).write_bytes(np.roll(TOKENS, 1).astype(np.uint16).tobytes())

    by_rank = run_distributed(_train_on, 4, str(tmp_path))
    assert all(messages == by_rank[0] for messages in by_rank[:3])
    assert by_rank[0]["right"] == by_rank[3]["right"] == "trained"
    stale = by_rank[0]["stale"]
    assert stale.startswith(f"{tmp_path / 'store'}: ")
    assert "ranks 2 and 3, which share sequences, have different tokens where their shards of [" in stale
    assert stale.endswith("; copy the token store to all nodes again")
    other = by_rank[0]["other batch"]
    assert other.startswith("data: ranks 0 and 1, which share sequences, have different ones in their first batch, [")
    assert other.endswith("; start all ranks with the same command line")
