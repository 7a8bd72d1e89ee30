"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import torch

from zeco_train.errors import ConfigError


class ScheduleKind(Enum):
    """See `ScheduleConfig`."""

    wsd = "wsd"
    cosine = "cosine"
    constant = "constant"


@dataclass
class ScheduleConfig:
    """Shape of the learning rate over a run.

    Attributes:
        kind: shape of the curve. `wsd`: warm-up, stable, decay. `cosine`: warm-up, then half a cosine. `constant`:
            warm-up only.
        warmup_steps: steps of linear growth from 0 to the peak; a shorter run warms up to its end.
        decay_fraction: `wsd` only, the last fraction of the run, in which the rate decays linearly.
        min_ratio: the last step's learning rate, relative to the peak; `wsd` and `cosine` only, and in a run longer
            than its warm-up.
    """

    kind: ScheduleKind = ScheduleKind.cosine
    warmup_steps: int = 100
    decay_fraction: float = 0.2
    min_ratio: float = 0.1

    def validate(self) -> None:
        for name, is_right, allowed in (
            ("warmup_steps", self.warmup_steps >= 0, "must be ≥ 0"),
            ("decay_fraction", 0 < self.decay_fraction <= 1, "must be in (0, 1]"),
            ("min_ratio", 0 <= self.min_ratio <= 1, "must be in [0, 1]"),
        ):
            if not is_right:
                raise ConfigError(f"sched.{name}", getattr(self, name), allowed)

    def check_steps(self, steps: int) -> None:
        """Raise `ConfigError` for a warm-up that reaches into the decay, in a run of so many steps."""
        latest = steps - self.decay_steps(steps)
        if self.kind is ScheduleKind.wsd and self.warmup_steps > latest:
            decay = f"with train.steps={steps} and sched.decay_fraction={self.decay_fraction:g} the decay begins"
            allowed = f"{decay} after step {latest}; allowed: 0 to {latest}, or another sched"
            raise ConfigError("sched.warmup_steps", self.warmup_steps, allowed)

    def decay_steps(self, steps: int) -> int:
        """Steps of the decay of `wsd` in a run of so many steps, at least 1."""
        return max(1, round(self.decay_fraction * steps))

    def needs(self) -> Iterator[tuple[str, str, bool]]:
        yield "decay_fraction", "sched=wsd", self.kind is ScheduleKind.wsd
        yield "min_ratio", "sched=wsd or cosine", self.kind is not ScheduleKind.constant


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """Learning rate of optimizer step `step` (the first is 1) in a run of `steps`."""
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
            remaining = min(1.0, (steps - step) / schedule.decay_steps(steps))
            ratio = schedule.min_ratio + (1 - schedule.min_ratio) * remaining
    return peak * ratio


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set every group's learning rate for the next step, times the group's `lr_ratio` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)


def reads_device_rates(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether the optimizer's kernels read learning rates from the device without loss: fused ones on CUDA.

    They read fp32, which is less than weights in fp64 get from a number.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    is_fused = device.type == "cuda" and bool(optimizer.defaults.get("fused"))
    return is_fused and all(weight.dtype is torch.float32 for weight in weights)


class DeviceRates:
    """The learning rates of a fused optimizer's groups as tensors on the device, which a captured step reads anew."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._rates = [torch.zeros((), device=device) for _ in optimizer.param_groups]

    def update(self) -> None:
        for rate, group in zip(self._rates, self._optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])

    @contextmanager
    def given(self) -> Iterator[None]:
        """The optimizer reads the tensors; its groups, which checkpoints store, have numbers otherwise."""
        groups = self._optimizer.param_groups
        numbers = [{"lr": group["lr"], "capturable": group.get("capturable", False)} for group in groups]
        for rate, group in zip(self._rates, groups, strict=True):
            group |= {"lr": rate, "capturable": True}
        try:
            yield
        finally:
            for group, kept in zip(groups, numbers, strict=True):
                group |= kept
