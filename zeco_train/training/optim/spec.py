"""What the rest of the project knows of an optimizer: one descriptor in each optimizer's file, and the settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from zeco_train.errors import ConfigError

# Parameters and what holds for them, as `torch.optim` takes it: {"params": […], "weight_decay": …}.
Group = dict[str, Any]


@dataclass
class OptimizerSettings:
    """What optimizers read, and gradient clipping.

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
        for name, is_right, allowed in (
            # The upper bounds keep AdamW's own factors within fp32.
            ("lr", 0 < self.lr <= 1e30, "must be > 0 and ≤ 1e30"),
            ("weight_decay", 0 <= self.weight_decay <= 1e6, "must be ≥ 0 and ≤ 1e6"),
            ("grad_clip", self.grad_clip >= 0, "must be ≥ 0"),
            ("eps", self.eps > 0, "must be > 0"),
            ("betas", all(0 <= beta < 1 for beta in self.betas), "each must be in [0, 1)"),
        ):
            if not is_right:
                raise ConfigError(f"optim.{name}", getattr(self, name), allowed)


@dataclass(frozen=True, eq=False)
class OptimizerSpec:
    """An optimizer.

    Attributes:
        name: as `optim=` has it.
        build: (groups, settings) → the optimizer over these parameters.
        state_bytes: (elements, itemsize) → bytes that it keeps for a parameter of so many elements of that size.
        settings: those that it reads beside lr, weight_decay and grad_clip; of another optimizer they are refused.
    """

    name: str
    build: Callable[[list[Group], OptimizerSettings], torch.optim.Optimizer]
    state_bytes: Callable[[int, int], int]
    settings: tuple[str, ...] = ()
