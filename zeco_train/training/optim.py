"""AdamW with decay groups, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import nn

from zeco_train.errors import ConfigError


@dataclass
class OptimConfig:
    """AdamW (Loshchilov & Hutter, 2019) and gradient clipping.

    Attributes:
        lr: peak learning rate.
        betas, eps, weight_decay: as in `torch.optim.AdamW`; the decay applies to matrices only.
        grad_clip: largest global gradient norm; 0 clips nothing.
    """

    lr: float = 3e-4
    betas: tuple[float, float] = field(default=(0.9, 0.95))
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0

    def validate(self) -> None:
        """Raise `ConfigError` for a value out of range."""
        # The upper bounds keep AdamW's own factors within fp32.
        _require(0 < self.lr <= 1e30, "optim.lr", self.lr, "must be > 0 and ≤ 1e30")
        _require(0 <= self.weight_decay <= 1e6, "optim.weight_decay", self.weight_decay, "must be ≥ 0 and ≤ 1e6")
        _require(self.grad_clip >= 0, "optim.grad_clip", self.grad_clip, "must be ≥ 0")
        _require(self.eps > 0, "optim.eps", self.eps, "must be > 0")
        _require(all(0 <= beta < 1 for beta in self.betas), "optim.betas", self.betas, "each must be in [0, 1)")


class ScheduleKind(Enum):
    """`wsd`: warm-up, stable, decay. `cosine`: warm-up, then half a cosine. `constant`: warm-up only."""

    wsd = "wsd"
    cosine = "cosine"
    constant = "constant"


@dataclass
class ScheduleConfig:
    """Attributes:
    kind: shape of the schedule.
    warmup_steps: steps of linear growth from 0 to the peak; a run shorter than that warms up all the way.
    decay_fraction: `wsd` only, the last part of the run, over which the rate falls linearly.
    min_ratio: the last step's learning rate over the peak.
    """

    kind: ScheduleKind = ScheduleKind.cosine
    warmup_steps: int = 100
    decay_fraction: float = 0.2
    min_ratio: float = 0.1

    def validate(self) -> None:
        """Raise `ConfigError` for a value out of range."""
        _require(self.warmup_steps >= 0, "sched.warmup_steps", self.warmup_steps, "must be ≥ 0")
        _require(0 < self.decay_fraction <= 1, "sched.decay_fraction", self.decay_fraction, "must be in (0, 1]")
        _require(0 <= self.min_ratio <= 1, "sched.min_ratio", self.min_ratio, "must be in [0, 1]")


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(name, value, allowed)


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """Learning rate of optimizer step `step` (the first is 1) in a run of `steps`; depends on nothing else."""
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    match schedule.kind:
        case ScheduleKind.constant:
            ratio = 1.0
        case ScheduleKind.cosine:
            progress = (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
            cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
            ratio = schedule.min_ratio + (1 - schedule.min_ratio) * cosine
        case ScheduleKind.wsd:
            decay_steps = max(1, round(schedule.decay_fraction * steps))
            # The last step has 1 / decay_steps left, not 0: a step without a learning rate would be wasted.
            remaining = min(1.0, (steps - step + 1) / decay_steps)
            ratio = schedule.min_ratio + (1 - schedule.min_ratio) * remaining
    return peak * ratio


def build_optimizer(model: nn.Module, config: OptimConfig, decays: Callable[[nn.Parameter], bool]) -> torch.optim.AdamW:
    """AdamW over the trainable parameters in two groups: those that `decays(parameter)` picks, and the rest."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[decays(parameter)].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": config.weight_decay},
            {"params": groups[False], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        # One pass over weights, gradient and moments; and the only kind that can leave a step out on the device.
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of every group for the step to come."""
    for group in optimizer.param_groups:
        group["lr"] = lr
