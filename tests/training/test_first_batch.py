"""Checks before the first step: ranks with different settings, code or data are reported."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from data.loader import SequenceLoader
from data.store import OFFSETS_FILE, shard_name
from tests.support.distributed import run_distributed
from tests.support.stores import write_tokens
from tests.support.training import train
from zeco_train.errors import ZecoError
from zeco_train.lifecycle import join
from zeco_train.lifecycle.join import _difference
from zeco_train.training import opening

# Token t of the store is t modulo 250, so a shift changes every token.
TOKENS = np.arange(9000) % 250
SPLIT = ["data=tokens", "sp=zeco", "sp.size=2", "data.seq_len=64", "train.steps=1", "train.eval_sequences=0"]


def _reordered(*arguments: Any, **settings: Any) -> SequenceLoader:
    return SequenceLoader(*arguments, **{**settings, "seed": 77})


def _train_on(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """Messages of starts: with equal ranks, and with one difference on rank 1 each."""
    store, stale = f"data.path={folder}/store", f"data.path={folder}/stale"
    cases: dict[str, tuple[list[str], Any]] = {
        # A copy of the store at another path is accepted.
        "right": ([f"data.path={folder}/copy" if rank else store], None),
        "stale": ([stale if rank else store], None),
        "borders": ([f"data.path={folder}/borders" if rank else store], None),
        "split": ([f"data.path={folder}/split" if rank else store], None),
        "setting": ([store, *(["optim.lr=0.5", "sp.size=1"] if rank else [])], None),
        "code": ([store], mock.patch.object(join, "_code_version", return_value="old" if rank else "new")),
        "variable": ([store], mock.patch.dict("os.environ", {"NCCL_ALGO": "Tree"} if rank else {})),
        "order": ([store], mock.patch.object(opening, "SequenceLoader", _reordered) if rank == 1 else None),
    }
    messages = {}
    for name, (overrides, patch) in cases.items():
        try:
            with patch or contextlib.nullcontext():
                train(rank, world_size, f"{folder}/runs/{name}", *SPLIT, *overrides)
            messages[name] = "trained"
        except ZecoError as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


@pytest.mark.slow
def test_differences_between_ranks_are_reported(tmp_path: Path) -> None:
    write_tokens(tmp_path / "store", TOKENS, [4000, 5000])
    for copy in ("copy", "stale", "borders"):
        shutil.copytree(tmp_path / "store", tmp_path / copy)
    # Same size, valid meta.json, shifted tokens.
    (tmp_path / "stale" / shard_name(0)).write_bytes(np.roll(TOKENS, 1).astype(np.uint16).tobytes())
    np.save(tmp_path / "borders" / OFFSETS_FILE, np.array([0, 4100, 9000]))
    # The same tokens with other document borders.
    write_tokens(tmp_path / "split", TOKENS, [4100, 4900])
    found, other = run_distributed(_train_on, 2, str(tmp_path))
    # Each rank names its own copy of the store.
    assert found | {"stale": ""} == other | {"stale": ""}
    assert found["right"] == "trained"
    assert found["stale"].startswith(f"DataError: {tmp_path / 'store'}: ")
    assert "ranks 0 and 1, which share sequences, have different tokens where their shards of [" in found["stale"]
    assert found["stale"].endswith("; copy the token store to all nodes again")
    offsets = tmp_path / "borders" / OFFSETS_FILE
    assert found["borders"].startswith(f"DataError: {offsets}: its contents differ from what was prepared")
    assert found["split"].startswith("ConfigError: documents of training store 0=")
    assert ": rank 1 differs, rank 0 has " in found["split"]
    start = "DataError: data: ranks 0 and 1, which share sequences, have different ones in their first batch, ["
    assert found["order"].startswith(start)
    remedy = "; start all ranks with the same command line, code and environment"
    differs = "rank 1 differs, rank 0 has"
    assert found["setting"] == f"ConfigError: optim.lr=0.5: {differs} 0.001 (so do sp.size){remedy}"
    assert found["code"] == f"ConfigError: code=old: {differs} new{remedy}"
    assert found["variable"] == f"ConfigError: variable NCCL_ALGO=Tree: {differs} not set{remedy}"


@pytest.mark.parametrize(
    ("by_rank", "message"),
    [
        (["1", "2"], "key=2: rank 1 differs, rank 0 has 1; do"),
        (["1", "2", "2"], "key=1: rank 0 differs, the others have 2; do"),
        (["2", "1", "1", "2"], "key=1: ranks 1, 2 differ, the others have 2; do"),
        (["3", *"112111", *"222", "1"], "key=3: ranks 0, 3, 7–9 differ, the others have 1; do"),
    ],
)
def test_deviating_ranks_are_named(by_rank: list[str], message: str) -> None:
    assert str(_difference(["key"], by_rank, "do")) == message
