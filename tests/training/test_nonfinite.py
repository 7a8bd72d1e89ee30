"""Non-finite steps: reported, and under `train.nonfinite=skip:N` skipped without any update."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from data.loader import Batch
from tests.support.distributed import run_distributed
from tests.support.training import train
from zeco_train.errors import ConfigError, NonFiniteError
from zeco_train.training.forward import SequenceForward
from zeco_train.training.nonfinite import skip_limit
from zeco_train.training.step import Numbers, TrainingStep

pytestmark = pytest.mark.numeric

SETTINGS = ["sp=zeco", "sched=constant", "data.seq_len=96", "train.eval_sequences=0", "checkpoint.every=1"]
GRADIENT, ACTIVATION = "model.layers.0.attn.o_proj.weight", "model.layers.1.attn.o_proj"


@contextlib.contextmanager
def _poison(gradient_ids: list[int], activation_ids: list[int], rank: int) -> Iterator[None]:
    """Set a gradient of rank 1 and a layer's input on rank 0 to NaN whenever certain sequences are trained on."""
    backward, forward = TrainingStep.backward, SequenceForward.loss

    def bad_backward(self: TrainingStep, segments: list[Batch], **options: Any) -> torch.Tensor | None:
        share = backward(self, segments, **options)
        if rank == 1 and segments[0].sequence_ids == gradient_ids:
            grad: Any = self.model.get_parameter(GRADIENT).grad
            grad.to_local().fill_(torch.nan)
        return share

    def bad_forward(self: SequenceForward, batch: Batch, *arguments: Any) -> torch.Tensor:
        if rank != 0 or batch.sequence_ids != activation_ids:
            return forward(self, batch, *arguments)
        module = self.model.get_submodule(ACTIVATION)
        handle = module.register_forward_pre_hook(lambda _, inputs: (inputs[0] * torch.nan, *inputs[1:]))
        try:
            return forward(self, batch, *arguments)
        finally:
            handle.remove()

    with (
        mock.patch.object(TrainingStep, "backward", bad_backward),
        mock.patch.object(SequenceForward, "loss", bad_forward),
    ):
        yield


@contextlib.contextmanager
def _without_updates(steps: set[int]) -> Iterator[None]:
    update, count = TrainingStep.update, 0

    def maybe(self: TrainingStep, loss: torch.Tensor) -> Numbers:
        nonlocal count
        count += 1
        if count not in steps:
            return update(self, loss)
        with mock.patch.object(self.optimizer, "step"):
            return update(self, loss)

    with mock.patch.object(TrainingStep, "update", maybe):
        yield


def _runs(rank: int, world_size: int, folder: str, resumed: bool) -> dict[str, Any]:
    def run(name: str, steps: int, policy: str) -> dict[str, Any]:
        settings = [f"train.steps={steps}", f"train.nonfinite={policy}", *SETTINGS]
        return train(rank, world_size, f"{folder}/{name}", *settings)

    results: dict[str, Any] = {}
    with _without_updates({3, 4}):
        results["reference"] = run("reference", 5, "stop")
    micro_batches = results["reference"]["sequence_ids"]
    # The last micro-batch of step 3, when gradients are complete, and the first of step 4.
    with _poison(micro_batches[2][3:], micro_batches[3][:1], rank):
        results["skipped"] = run("skipped", 5, "skip:2")
        if not resumed:
            return results
        run("resumed", 3, "skip:2")
        if rank == 0:
            shutil.copytree(Path(folder, "resumed"), Path(folder, "stopped"))
        dist.barrier()
        results["resumed"] = run("resumed", 5, "skip:2")
        # The count of skipped steps continues from the checkpoint.
        with pytest.raises(NonFiniteError) as error:
            run("stopped", 5, "skip:1")
        results["stopped"] = str(error.value)
    return results


@pytest.mark.parametrize("resumed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_skipped_steps_equal_run_without_their_updates(resumed: bool, tmp_path: Path) -> None:
    by_rank = run_distributed(_runs, 2, str(tmp_path), resumed)
    expected = by_rank[0]["reference"]
    rows = by_rank[0]["skipped"]["rows"]
    for name in ("skipped", "resumed") if resumed else ("skipped",):
        for rank in range(2):
            mine, theirs = by_rank[rank][name]["parameters"], expected["parameters"]
            assert all(torch.equal(mine[key], theirs[key]) for key in theirs), (name, rank)
        found = by_rank[0][name]["rows"]
        assert [row["step"] for row in found] == list(range(1, 6))
        for key in ("loss", "grad_norm", "lr", "tokens"):
            same = [row[key] for row in found if row["step"] not in (3, 4)]
            assert same == [row[key] for row in expected["rows"] if row["step"] not in (3, 4)], (name, key)
        assert [row.get("skipped_steps") for row in found] == [None, None, 1, 2, 2]
    assert by_rank[0]["skipped"]["sequence_ids"] == expected["sequence_ids"]

    gradient = f"the gradient norm is nan; the first non-finite tensor is the gradient of {GRADIENT}, on rank 1"
    activation = f"the loss is nan; the first non-finite tensor is the output of {ACTIVATION}, on rank 0"
    assert [row.get("nonfinite") for row in rows] == [None, None, gradient, activation, None]
    assert rows[2]["loss"] == expected["rows"][2]["loss"]
    assert (rows[2]["grad_norm"], rows[3]["loss"]) == (None, None)
    for results in by_rank if resumed else ():
        assert results["stopped"] == f"step 4: {activation}; skipped before it, by train.nonfinite: 1 in a row"
    log = (tmp_path / "skipped" / "logs" / "rank_0.log").read_text()
    assert f"step 3 is skipped (1 in a row, at most 2): {gradient}" in log
    assert f"step 4 is skipped (2 in a row, at most 2): {activation}" in log


@pytest.mark.parametrize(("policy", "limit"), [("stop", 0), ("skip:1", 1), ("skip:20", 20)])
def test_skip_limit_of_policies(policy: str, limit: int) -> None:
    assert skip_limit(policy) == limit


@pytest.mark.parametrize("policy", ["", "skip", "skip:", "skip:0", "skip:-1", "skip:1.5", "skip:x", "go on", "STOP"])
def test_invalid_policies_are_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match="must be stop, or skip:N to leave out up to N ≥ 1 steps in a row"):
        skip_limit(policy)
