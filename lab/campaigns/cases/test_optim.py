"""A non-finite number on one rank stops the update on all of them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support.distributed import run_distributed
from tests.support.steps import Case, make_mesh, make_step
from tests.support.training import full
from tests.training.test_optim import set_gradients, update
from zeco_train.distributed.config import Strategy
from zeco_train.sp.exchange import local_exchange
from zeco_train.training.optim.optimizer_registry import OptimConfig, OptimizerName
from zeco_train.training.step import TrainingStep

pytestmark = pytest.mark.campaign


def _everything(step: TrainingStep) -> dict[str, Tensor]:
    """Weights, moments and counters."""
    state = {f"weight of {name}": full(p).clone() for name, p in step.model.named_parameters()}
    for name, parameter in step.model.named_parameters():
        for key, value in step.optimizer.state[parameter].items():
            state[f"{key} of {name}"] = full(value).clone()
    return state


def _poison(step: TrainingStep, what: str, value: float, rank: int) -> float:
    """Make the loss, or one number of a gradient, non-finite on rank 1 alone; returns the loss."""
    if rank != 1:
        return 1.0
    if what == "loss":
        return value
    block: Any = step.model.model.layers[1]
    gradient = block.mlp.down_proj.weight.grad
    assert isinstance(gradient, DTensor)
    gradient.to_local()[-1, -1] = value
    return 1.0


def _leave_out(rank: int, world_size: int, value: float) -> None:
    """A non-finite number on one rank stops the update on all of them, in a first step and later."""
    mesh = make_mesh(rank, world_size, world_size)
    cases = [
        (Strategy.zero2, "loss"),
        (Strategy.hsdp, "gradient"),
        (Strategy.zero3, "gradient"),
        (Strategy.ddp, "loss"),
    ]
    # Both values together have all pairs.
    names = [*OptimizerName][:: 1 if math.isnan(value) else -1]
    for (strategy, what), name in zip(cases, itertools.cycle(names), strict=False):
        where = f"{what} {value}, {strategy}, {name}"
        case = Case(strategy, optim=OptimConfig(name=name, lr=1e-2))
        _, step = make_step(case, local_exchange(), mesh)
        _, twin = make_step(case, local_exchange(), mesh)
        for number in range(3):
            before = _everything(step)
            set_gradients(step.model, number)
            numbers = update(step, _poison(step, what, value, rank))
            assert not all(map(math.isfinite, vars(numbers).values())), where
            after = _everything(step)
            # The first step creates the optimizer's state, as zeros.
            before = {name: torch.zeros_like(tensor) for name, tensor in after.items()} | before
            for name, tensor in before.items():
                assert torch.equal(after[name], tensor), f"{name}: step {number}, {where}"
            for one_step in (step, twin):
                set_gradients(one_step.model, number)
                assert all(map(math.isfinite, vars(update(one_step)).values())), where
        expected = _everything(twin)
        assert expected.keys() == after.keys()
        for name, tensor in _everything(step).items():
            assert torch.equal(tensor, expected[name]), f"{name}: {where}"
        counts = {tensor.item() for name, tensor in expected.items() if name.startswith("step of")}
        # Not every optimizer counts its steps.
        assert counts <= {3.0}, counts
        assert counts or case.optim.name is not OptimizerName["adamw"]


@pytest.mark.few(1)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_step_is_skipped_on_all_ranks(value: float) -> None:
    run_distributed(_leave_out, 2, value)
