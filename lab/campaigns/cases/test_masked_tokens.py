"""Training on masked tokens over ranks, and its resumption."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from models.mixer_registry import MIXERS
from tests.support.commands import run_here, train_here
from tests.support.distributed import run_distributed
from tests.support.training import largest_difference, train
from tests.support.unmasked import UnmaskedMixer
from zeco_train.config.schema import to_plain
from zeco_train.distributed.mesh import join_alike
from zeco_train.evaluate.__main__ import main
from zeco_train.evaluate.evaluation import Evaluation
from zeco_train.evaluate.held_out import HeldOut
from zeco_train.hf.trained import find_trained
from zeco_train.lifecycle.join import Launch

pytestmark = pytest.mark.campaign

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

# By world size.
SPLITS: dict[int, dict[str, list[str]]] = {
    1: {"one rank": ["sp=dp"], "micro-batch 2, recomputed": ["data.micro_batch=2", "train.recompute=full", "sp=lasp2"]},
    2: {
        "lasp2, recomputed": ["sp=lasp2", "train.recompute=full"],
        "zeco, micro-batch 2": ["sp=zeco", "data.micro_batch=2", "parallel=ddp"],
    },
    4: {
        "lasp1": ["sp=lasp1"],
        "dp": ["sp=dp", "parallel=zero3"],
        "lasp2": ["sp=lasp2", "train.recompute=selective"],
        "zeco": ["sp=zeco"],
        "zeco two_shot, sp 2": ["sp=zeco", "sp.size=2", "sp.all_scan.algorithm=two_shot"],
    },
}


def _train_each(rank: int, world_size: int, folder: str, splits: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    with mock.patch.dict(MIXERS, gla=UnmaskedMixer):
        return {
            name: train(rank, world_size, f"{folder}/{world_size} {name}", *MASKED, *split)
            for name, split in splits.items()
        }


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    [results] = run_distributed(_train_each, 1, str(tmp_path_factory.mktemp("runs")), SPLITS[1])
    return results["one rank"]


def _check_same_as(reference: dict[str, Any], found: dict[str, Any], name: str) -> None:
    # Steps amplify differences in the last digits of fp64.
    for key in ("loss", "grad_norm", "val_loss"):
        error = largest_difference(found["rows"], reference["rows"], key)
        assert error < 1e-9, f"{key} of {name} differs by {error:.1e}"


def _until(rank: int, world_size: int, folder: str, steps: int) -> dict[str, Any]:
    settings = ["sp=lasp2", "sched=constant", "checkpoint.every=2", f"train.steps={steps}"]
    with mock.patch.dict(MIXERS, gla=UnmaskedMixer):
        return train(rank, world_size, folder, *MASKED, *settings)


def _evaluated(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """The task `validation` on a trained model, over all ranks; settings are the run's."""
    with mock.patch.dict(MIXERS, gla=UnmaskedMixer):
        trained = find_trained(folder)
        config, launch = trained.configure([]), Launch(rank, world_size, rank)
        mesh = join_alike(to_plain(config), launch, world_size, torch.device("cpu"), timedelta(seconds=60))
        evaluation, task = Evaluation(trained, config, mesh, lambda phase: None), HeldOut(sequences=3)
        task.prepare(evaluation, "validation")
        result = task.run(evaluation)
        evaluation.exchange.drain()
        return dict(result.metrics)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_masked_losses_do_not_depend_on_the_split(reference: dict[str, Any], world_size: int, tmp_path: Path) -> None:
    for name, found in run_distributed(_train_each, world_size, str(tmp_path), SPLITS[world_size])[0].items():
        _check_same_as(reference, found, f"{world_size} ranks, {name}")


def test_masked_run_resumes_with_the_same_masks_on_other_ranks(tmp_path: Path) -> None:
    whole = run_distributed(_until, 1, str(tmp_path / "whole"), 4)[0]
    run_distributed(_until, 2, str(tmp_path / "parts"), 2)
    found = run_distributed(_until, 1, str(tmp_path / "parts"), 4)[0]
    assert [row["step"] for row in found["rows"]] == [1, 2, 3, 4]
    _check_same_as(whole, found, "a run of 2 ranks, then of 1")
    # The evaluation masks the same tokens as the validation in training.
    metrics = run_distributed(_evaluated, 2, str(tmp_path / "parts"))[0]
    assert abs(metrics["loss"] - found["rows"][-1]["val_loss"]) < 1e-9
    assert "bits_per_byte" not in metrics


def test_validation_without_labels_has_no_loss_and_a_late_one_is_announced(tmp_path: Path) -> None:
    late, run = "validation after the last step (train.eval_every=0)", tmp_path / "unlabelled"
    settings = ["train.steps=1", "train.eval_every=0", "train.eval_sequences=2", "checkpoint.every=0"]
    plain = train_here(f"run_dir={tmp_path / 'plain'}", *settings)
    assert late in plain.out
    assert "val_loss" in plain.out
    none = ["model.mixer=linear", "model.causal=false", "task=mlm", "task.mask_fraction=1e-9"]
    unlabelled = train_here(f"run_dir={run}", *settings, *none)
    assert unlabelled.code == 0
    assert "no label in its held-out sequences counts" in unlabelled.err
    assert not any(text in unlabelled.out for text in (late, "val_loss", "nan"))
    refused = run_here(main, str(run), "validation.sequences=2")
    assert refused.errors[0].startswith("data.seq_len=64: no label counts in the held-out sequences of ")
