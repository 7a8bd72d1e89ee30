"""Every backend at every sp size, every strategy, and documents, on 3 and 4 ranks; losses in bf16 and fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.training import largest_difference, train
from tests.training.test_training import DP, FP64, SEQ_LEN, Runs, documents, runs
from tests.training.test_training import test_each_sequence_is_read_by_exactly_one_group as check_read_once
from tests.training.test_training import test_fp64_runs_are_the_same_on_every_split as check_same

# Fixtures.
__all__ = ["runs"]
pytestmark = pytest.mark.campaign

# By world size.
SPLITS: dict[int, dict[str, list[str]]] = {
    3: {"zeco, sp 3, 5 blocks": ["sp=zeco", "sp.all_scan.algorithm=chain", "sp.all_scan.blocks=5"]},
    4: {
        "lasp1, sp 2": ["sp=lasp1", "sp.size=2"],
        "lasp1, sp 4": ["sp=lasp1", "sp.size=4"],
        "lasp2, sp 2": ["sp=lasp2", "sp.size=2"],
        "lasp2, sp 4": ["sp=lasp2", "sp.size=4"],
        "zeco, sp 2, hsdp": ["sp=zeco", "sp.size=2", "parallel=hsdp"],
        "zeco, sp 4, zero3, 3 segments": ["sp=zeco", "parallel=zero3", "train.segments=3", "train.recompute=full"],
        "zeco two_shot, sp 4, ddp": ["sp=zeco", "sp.all_scan.algorithm=two_shot", "parallel=ddp"],
        DP: ["sp=dp", "parallel=zero3"],
    },
}


def _splits(rank: int, world_size: int, folder: str, store: str) -> dict[str, dict[str, Any]]:
    cases = SPLITS[world_size].items()
    return {name: train(rank, world_size, f"{folder}/{name}", *FP64, *split) for name, split in cases}


def _documents(rank: int, world_size: int, folder: str, store: str) -> dict[str, dict[str, Any]]:
    cases = {"documents": [], "in segments": ["train.segments=2"], "two a pass": ["data.micro_batch=2"]}
    return {
        name: train(rank, world_size, f"{folder}/{name}", *FP64, *documents(store, "sp=zeco", *more))
        for name, more in cases.items()
    }


@pytest.mark.parametrize(
    ("suite", "world_size"), [(_splits, 3), (_splits, 4), (_documents, 2), (_documents, 3), (_documents, 4)]
)
def test_fp64_runs_are_the_same_on_every_split(runs: Runs, suite: Any, world_size: int) -> None:
    check_same(runs, suite, world_size)


def test_each_sequence_is_read_by_exactly_one_group(runs: Runs) -> None:
    check_read_once(runs, _splits, 4)


def _dtypes(rank: int, world_size: int, folder: str, store: str) -> dict[str, dict[str, Any]]:
    cases = {
        "fp32": ["train.steps=10"],
        "bf16": ["train.steps=3", "train.dtype=bf16", *(["train.segments=2"] if world_size != 2 else [])],
    }
    common = ["checkpoint.every=0", f"data.seq_len={SEQ_LEN}", "sp=dp" if world_size == 1 else "sp=zeco"]
    return {name: train(rank, world_size, f"{folder}/{name}", *common, *case) for name, case in cases.items()}


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.campaign) for n in (3, 4))])
def test_bf16_and_fp32_losses_agree_with_fp32_on_one_rank(runs: Runs, world_size: int) -> None:
    expected, found = (runs(_dtypes, n)[0] for n in (1, world_size))
    assert all(parameter.dtype == torch.float32 for parameter in found["bf16"]["parameters"].values())
    for row, exact in zip(found["bf16"]["rows"], expected["fp32"]["rows"][:3], strict=True):
        # bf16 has 8 bits: a relative error of 2^-9 in each of many activations, averaged over 960 tokens.
        assert abs(row["loss"] - exact["loss"]) <= 4e-3 * exact["loss"]
    # The contract over ten steps; by rounding alone two fp32 runs differ by about 1e-6 here.
    assert largest_difference(found["fp32"]["rows"], expected["fp32"]["rows"], "loss") <= 1e-4
