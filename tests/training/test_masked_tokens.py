"""Training on masked tokens with an unmasked model: the same losses for every split, learning, and resumption."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from models.mixer_registry import MIXERS
from tests.support.distributed import run_distributed
from tests.support.training import largest_difference, train
from tests.support.unmasked import UnmaskedMixer

pytestmark = pytest.mark.numeric

MASKED = [
    "task=mlm",
    "model.causal=false",
    "train.dtype=fp64",
    "train.steps=2",
    "checkpoint.every=0",
    "data.seq_len=96",
    "train.eval_sequences=3",
    "train.eval_every=1",
]

# Splits of one rank: name → overrides.
SPLITS = {
    "reference": ["sp=dp"],
    "micro-batch 2, recomputed": ["data.micro_batch=2", "train.recompute=full", "sp=lasp2"],
}


def train_each(rank: int, world_size: int, folder: str, splits: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    with mock.patch.dict(MIXERS, gla=UnmaskedMixer):
        return {
            name: train(rank, world_size, f"{folder}/{world_size} {name}", *MASKED, *split)
            for name, split in splits.items()
        }


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    [results] = run_distributed(train_each, 1, str(tmp_path_factory.mktemp("runs")), SPLITS)
    return results


def check_same_as(reference: dict[str, Any], found: dict[str, Any], name: str) -> None:
    # Steps amplify differences in the last digits of fp64.
    for key in ("loss", "grad_norm", "val_loss"):
        error = largest_difference(found["rows"], reference["rows"], key)
        assert error < 1e-9, f"{key} of {name} differs by {error:.1e}"


@pytest.mark.slow
def test_micro_batches_and_recomputation_do_not_change_masked_losses(reference: dict[str, dict[str, Any]]) -> None:
    for name, found in reference.items():
        check_same_as(reference["reference"], found, name)
    losses = [row["loss"] for row in reference["reference"]["rows"]]
    # ln 259 at the start: the mean over the masked tokens, and no other sum.
    assert abs(losses[0] - 5.557) < 0.3
    assert losses[-1] < losses[0]
