"""Learning rates, decay groups, the global norm and clipping."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from models.gla import GLAConfig, GLAForCausalLM
from models.hooks import has_weight_decay
from zeco_train.errors import ConfigError
from zeco_train.optim import OptimConfig, ScheduleConfig, ScheduleKind, build_optimizer, learning_rate
from zeco_train.parallelize import clip_gradients, global_norm


def _rates(kind: str, steps: int = 100, **fields: float) -> list[float]:
    schedule = ScheduleConfig(ScheduleKind(kind), **{"warmup_steps": 10, "min_ratio": 0.1, **fields})  # type: ignore[arg-type]
    return [learning_rate(step, steps, 2.0, schedule) for step in range(1, steps + 1)]


@pytest.mark.parametrize("kind", ["wsd", "cosine", "constant"])
def test_warm_up_is_linear(kind: str) -> None:
    assert _rates(kind)[:10] == pytest.approx([0.2 * step for step in range(1, 11)])


def test_wsd_is_stable_then_falls_linearly() -> None:
    rates = _rates("wsd", decay_fraction=0.2)
    assert rates[10:80] == [2.0] * 70
    assert rates[80] == 2.0
    differences = [a - b for a, b in pairwise(rates[80:])]
    assert differences == pytest.approx([2.0 * 0.9 / 20] * 19)
    assert rates[-1] == pytest.approx(2.0 * (0.1 + 0.9 / 20))


def test_cosine_ends_at_the_minimum() -> None:
    rates = _rates("cosine")
    assert rates[54] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 45 / 90))))
    assert rates[-1] == pytest.approx(0.2)
    assert all(a > b for a, b in pairwise(rates[10:]))


def test_constant_stays() -> None:
    assert _rates("constant")[10:] == [2.0] * 90


def test_a_run_shorter_than_its_warm_up() -> None:
    assert _rates("cosine", steps=5) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert _rates("wsd", steps=1, warmup_steps=0) == [2.0]


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (OptimConfig(lr=0.0), "optim.lr"),
        (OptimConfig(eps=0.0), "optim.eps"),
        (OptimConfig(betas=(0.9, 1.0)), "optim.betas"),
        (OptimConfig(weight_decay=-1.0), "optim.weight_decay"),
        (OptimConfig(grad_clip=-1.0), "optim.grad_clip"),
        (ScheduleConfig(warmup_steps=-1), "sched.warmup_steps"),
        (ScheduleConfig(decay_fraction=0.0), "sched.decay_fraction"),
        (ScheduleConfig(min_ratio=2.0), "sched.min_ratio"),
    ],
)
def test_values_out_of_range(config: OptimConfig | ScheduleConfig, field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}="):
        config.validate()


def test_matrices_decay_and_vectors_do_not() -> None:
    model = GLAForCausalLM(GLAConfig(num_layers=1))
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.3), has_weight_decay)
    decay, rest = optimizer.param_groups
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    assert {p.ndim for p in decay["params"]} == {2}
    assert {p.ndim for p in rest["params"]} == {1}
    assert len(decay["params"]) + len(rest["params"]) == len(list(model.parameters()))


def test_norm_and_clipping() -> None:
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    norm = global_norm(model)
    assert norm.item() == pytest.approx(math.sqrt(8))
    clip_gradients(model, norm, 0)
    assert global_norm(model).item() == norm.item()
    clip_gradients(model, norm, 1.0)
    # torch divides by norm + 1e-6, so that a norm of 0 stays finite.
    assert global_norm(model).item() == pytest.approx(1.0, rel=1e-6)
