"""Faults in training steps that verify finds, and its defaults on two ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.commands import TORCHRUN, Command
from tests.support.distributed import run_distributed
from tests.verify.test_own_ranks import TIMEOUT, _replaced
from zeco_train.training.step import TrainingStep
from zeco_train.training.step_totals import taken_from
from zeco_train.verify import step_cases
from zeco_train.verify.report import VerifyRow
from zeco_train.verify.step_cases import StepCase

pytestmark = pytest.mark.campaign


def losses_of_steps(rank: int, world_size: int, fault: str) -> list[list[str]]:
    """Failures of two training steps, with a fault."""
    case = StepCase("mamba2", "chain/3", segments=2, documents=True, recompute=step_cases.Recompute.full)
    rows: list[VerifyRow] = []
    faults = {
        "none": contextlib.nullcontext,
        "a segment's carry forgotten": lambda: _replaced(TrainingStep, "_run_forward", _forgets_carries),
        "no gradient of carries": lambda: _replaced(TrainingStep, "_run_backward", _forgets_carry_grads),
    }
    with faults[fault]():
        step_cases.run_step_cases([case], rank, world_size, TIMEOUT, rows.append)
    dist.barrier()
    return [row.failures for row in rows]


def _forgets_carries(run: Callable[..., Any], step: Any, batch: Any, carries: Any) -> tuple[Tensor, ...]:
    states = run(step, batch, carries)
    return *states[: len(carries)], *(torch.zeros_like(state) for state in states[len(carries) :])


def _forgets_carry_grads(run: Callable[..., Any], step: Any, *args: Any, last: bool) -> tuple[Tensor, ...]:
    numbers, grads = taken_from(run(step, *args, last=last))
    return *vars(numbers).values(), *(torch.zeros_like(grad) for grad in grads)


def test_training_steps_find_planted_faults() -> None:
    for fault, said in (("none", ""), ("a segment's carry forgotten", "loss"), ("no gradient of carries", "gradients")):
        [failures] = run_distributed(losses_of_steps, step_cases.SIZE, fault)[0]
        assert bool(failures) == (fault != "none"), failures
        assert any(said in failure for failure in failures) or fault == "none", failures


@pytest.mark.processes
def test_defaults_pass_on_two_ranks_and_say_what_they_do_not_cover(tmp_path: Path) -> None:
    launcher = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    with Command([*launcher, "-m", "zeco_train.verify", "device=cpu"], tmp_path) as run:
        outcome = run.wait()
    assert outcome.code == 0, outcome
    table = outcome.out.splitlines()
    assert table[-1].startswith("ok: ")
    assert "not covered here:" in table
    assert not [row for row in table if row.startswith(("- operator:", "- scan:", "- mixer:", "- method:"))]
