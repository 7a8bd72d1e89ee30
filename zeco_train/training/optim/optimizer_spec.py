"""The interface of an optimizer to the rest of the project: its descriptor and its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.nn import Parameter

from models.parameters import ParameterRule
from models.spec import ParameterSpec
from zeco_train.errors import ConfigError

# A param group of `torch.optim`: {"params": […], "weight_decay": …}.
Group = dict[str, Any]
# The parameters of an optimizer with their rules.
Parameters = Sequence[tuple[Parameter, ParameterRule]]


class AdjustLR(Enum):
    """How Muon's learning rate depends on a matrix [N, K], as in `torch.optim.Muon`.

    original: times √max(1, N/K). match_rms_adamw: times 0.2 √max(N, K), so that both optimizers can use AdamW's
    learning rate and weight decay.
    """

    original = "original"
    match_rms_adamw = "match_rms_adamw"


class Precision(Enum):
    """The dtype of Muon's orthogonalisation.

    master: that of the master weights. bf16: as in `torch.optim.Muon`. auto: bf16 where the model computes in bf16,
    else that of the master weights.
    """

    auto = "auto"
    master = "master"
    bf16 = "bf16"


@dataclass
class OptimizerSettings:
    """Settings of the optimizers, and gradient clipping.

    Attributes:
        lr: peak learning rate.
        betas: decay rates of AdamW's two moments.
        eps: added to the root of AdamW's second moment.
        weight_decay: decoupled weight decay; of the weights of linear layers, of the embedding and of convolutions
            only.
        grad_clip: largest global gradient norm; 0 clips nothing.
        momentum: Muon's momentum; it and the next three as in `torch.optim.Muon`.
        nesterov: whether Muon's momentum is Nesterov's.
        ns_steps: Newton–Schulz iterations of Muon's orthogonalization.
        adjust_lr_fn: how Muon scales the learning rate by a matrix's shape.
        ns_dtype: dtype of Muon's matrix products.
        adamw_lr: peak learning rate of the parameters that Muon updates with AdamW; null: `lr`.
    """

    lr: float = 3e-4
    betas: tuple[float, float] = field(default=(0.9, 0.95))
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    adjust_lr_fn: AdjustLR = AdjustLR.match_rms_adamw
    ns_dtype: Precision = Precision.auto
    adamw_lr: float | None = None

    def validate(self) -> None:
        # Conditions that must hold, rather than those that must not: NaN fulfils none.
        for name, is_right, allowed in (
            # The upper bounds keep AdamW's own factors within fp32.
            ("lr", 0 < self.lr <= 1e30, "must be > 0 and ≤ 1e30"),
            ("weight_decay", 0 <= self.weight_decay <= 1e6, "must be ≥ 0 and ≤ 1e6"),
            ("grad_clip", self.grad_clip >= 0, "must be ≥ 0"),
            ("eps", self.eps > 0, "must be > 0"),
            ("betas", all(0 <= beta < 1 for beta in self.betas), "each must be in [0, 1)"),
            ("momentum", 0 <= self.momentum < 1, "must be in [0, 1)"),
            ("ns_steps", 1 <= self.ns_steps < 100, "must be from 1 to 99"),
            ("adamw_lr", self.adamw_lr is None or 0 < self.adamw_lr <= 1e30, "must be > 0 and ≤ 1e30"),
        ):
            if not is_right:
                raise ConfigError(f"optim.{name}", getattr(self, name), allowed)


@dataclass(frozen=True, eq=False)
class OptimizerSpec:
    """An optimizer.

    Attributes:
        name: the value of `optim=`.
        build: (parameters with their rules, settings) → the optimizer over them. Its groups may have an `lr_ratio`:
            the ratio of their learning rate to the schedule's.
        state_bytes: (elements, itemsize, rule) → bytes of state for so many elements of a parameter, of that size each.
        settings: those that it reads besides lr, weight_decay and grad_clip; with another optimizer they are refused.
        products: (parameters, ranks, settings) → FLOPs of matrix products a step, on the rank that has the most.
        working: (parameters) → elements of temporary memory in a step, besides its state.
    """

    name: str
    build: Callable[[Parameters, OptimizerSettings], torch.optim.Optimizer]
    state_bytes: Callable[[int, int, ParameterRule], int]
    settings: tuple[str, ...] = ()
    products: Callable[[Sequence[ParameterSpec], int, OptimizerSettings], float] = lambda *_: 0.0
    working: Callable[[Sequence[ParameterSpec]], int] = lambda _: 0


def decay_groups(parameters: Parameters, weight_decay: float) -> list[Group]:
    """The parameters in two groups: with and without weight decay."""
    decaying = [parameter for parameter, rule in parameters if rule.decays]
    rest = [parameter for parameter, rule in parameters if not rule.decays]
    return [{"params": decaying, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
