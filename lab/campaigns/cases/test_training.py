"""Losses in bf16 and fp32 on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.training import largest_difference, train
from tests.training.test_training import SEQ_LEN, Runs, runs

# Fixtures.
__all__ = ["runs"]
pytestmark = pytest.mark.campaign


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
