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
from tests.verify.test_verify import _SCANS, OF_GLA, passing, rows_of, torchrun
from zeco_train.training.step import TrainingStep, taken_from
from zeco_train.verify import step_cases
from zeco_train.verify.report import VerifyRow
from zeco_train.verify.step_cases import StepCase
from zeco_train.verify.whole import VERIFIED

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


@pytest.mark.processes
def test_hanging_rank_ends_verification_after_timeout(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(
        "import os, sys, time\n"
        "from tests.support.gate import meet\n"
        "from zeco_train.verify import __main__ as command, cases\n"
        "run = cases.run_on_ranks\n"
        "def stop(*args):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        time.sleep(600)\n"
        "    return run(*args)\n"
        "cases.run_on_ranks = stop\n"
        "meet()\n"
        "sys.exit(command.main(sys.argv[1:]))\n"
    )
    with torchrun(2, tmp_path, [str(script)], *OF_GLA, "tokens=[20]", "timeout=10", "sp_sizes=[2]") as run:
        outcome = run.wait()
    assert outcome.code != 0
    assert len(outcome.errors) == 1, outcome
    assert "every rank is alive: one is stuck, or slower than timeout" in outcome.errors[0]


@pytest.mark.parametrize("operator", [name for name in VERIFIED if name != "gla"])
def test_every_backend_passes_with_every_operator(operator: str) -> None:
    """Of two heads one would have no decays; of five, four have decays up to 20 a token."""
    arguments = ["tokens=[30]", "dtypes=[fp64]", "sp_sizes=[2]", f"operator={operator}"]
    table = passing(2, *arguments, "heads=5", "key_dim=8", "value_dim=5", "device=cpu")
    assert f", operator {operator}" in table[0]
    for backend in ("float64 itself", *_SCANS):
        assert sum(row.endswith(" ok") for row in rows_of(table, backend)) == 2, backend
