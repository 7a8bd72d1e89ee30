"""Muon (Jordan et al., 2024): momentum, orthogonalised by Newton–Schulz steps; AdamW for all but projections.

Like `torch.optim.Muon`, extended for sharded training: each matrix is gathered on one rank
(`distributed.owned_matrices`), so the work is distributed and the update does not depend on the sharding; matrices
stacked in one parameter are orthogonalised one by one; and a non-finite step is skipped on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from models.parameters import ParameterRule
from models.spec import ParameterSpec
from zeco_train.distributed.owned_matrices import WholeMatrices, assign, local
from zeco_train.training.optim.adamw import ADAMW, FusedUpdate, gradient, moments_bytes
from zeco_train.training.optim.optimizer_spec import (
    AdjustLR,
    OptimizerSettings,
    OptimizerSpec,
    Parameters,
    Precision,
    decay_groups,
)

# Coefficients of the quintic polynomial a X + b (X Xᵀ) X + c (X Xᵀ)² X, and the lower bound of the norm that X is
# divided by; Jordan's and torch's values.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7


def orthogonalise(matrix: Tensor, steps: int) -> Tensor:
    """Newton–Schulz steps towards the nearest semi-orthogonal matrix of [N, K], in its own dtype.

    The coefficients maximise the growth of small singular values, which end near 1, between 0.7 and 1.2.
    """
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def _heights(shape: Sequence[int], rule: ParameterRule) -> list[int]:
    return list(rule.rows or shape[:1])


def _products(shape: Sequence[int], rule: ParameterRule, steps: int) -> float:
    # FLOPs: a step has two products over the long side and one of square matrices.
    sides = [(min(height, shape[1]), max(height, shape[1])) for height in _heights(shape, rule)]
    return float(sum(steps * (4 * short * short * long + 2 * short**3) for short, long in sides))


def _ratio(shape: Sequence[int], adjust: AdjustLR) -> float:
    rows, columns = shape
    if adjust is AdjustLR.original:
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for projections, AdamW for the other parameters, in one optimizer with one state.

    `found_inf` and `grad_scale` are scalars on the device, as for torch's fused optimizers; None: 0 and 1.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(self, parameters: Parameters, settings: OptimizerSettings) -> None:
        self._settings = settings
        self._rules = [rule for _, rule in parameters if rule.is_projection]
        projections = [parameter for parameter, rule in parameters if rule.is_projection]
        # One step each: only the ratios matter for the assignment.
        costs = [_products(p.shape, rule, 1) for p, rule in zip(projections, self._rules, strict=True)]
        self._matrices = WholeMatrices(projections, costs)
        others = [(parameter, rule) for parameter, rule in parameters if not rule.is_projection]
        ratio = (settings.adamw_lr or settings.lr) / settings.lr
        groups = [
            {"params": projections, "weight_decay": settings.weight_decay, "lr_ratio": 1.0},
            *({**group, "lr_ratio": ratio} for group in decay_groups(others, settings.weight_decay)),
        ]
        super().__init__(groups, {"lr": settings.lr})
        self._update = FusedUpdate()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters from their gradients. Collective."""
        assert closure is None
        projections, *others = self.param_groups
        for group in others:
            self._update_others(group)
        self._update_projections(projections)

    def _update_others(self, group: dict[str, Any]) -> None:
        parameters: list[Tensor] = group["params"]
        for parameter in parameters:
            if not self.state[parameter]:
                # On the device, where the fused kernels take a skipped step back from the count.
                count = torch.zeros((), dtype=torch.float32, device=parameter.device)
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] = {"step": count, **moments}
        self._update(
            parameters,
            [self.state[parameter] for parameter in parameters],
            lr=group["lr"],
            betas=self._settings.betas,
            eps=self._settings.eps,
            weight_decay=group["weight_decay"],
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
        )

    def _update_projections(self, group: dict[str, Any]) -> None:
        parameters: list[Tensor] = group["params"]
        # The same rounds on every rank: gather and scatter are collective, also for a rank that owns no matrix.
        for owners in self._matrices.rounds:
            indices = [index for index in owners if index is not None]
            moved = [self._direction(parameters[index]) for index in indices]
            whole = self._matrices.gather(owners, moved)
            if whole is not None and (mine := self._matrices.owned(owners)) is not None:
                whole = self._orthogonalise(whole, self._rules[mine])
            for index, update in zip(indices, self._matrices.scatter(owners, whole, moved[0]), strict=True):
                self._apply(parameters[index], update, group)

    def _direction(self, parameter: Tensor) -> Tensor:
        # Updates the momentum, unless the step is skipped; returns this rank's rows of the matrix to orthogonalise.
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer, grad = local(state["momentum_buffer"]), local(gradient(parameter))
        if self.grad_scale is not None:
            grad = grad / self.grad_scale
        if self.found_inf is not None:
            # The lerp towards itself leaves the buffer unchanged. Not a factor 0: 0 · NaN is NaN.
            grad = torch.where(self.found_inf.bool(), buffer, grad)
        momentum = self._settings.momentum
        buffer.lerp_(grad, 1 - momentum)
        return grad.lerp(buffer, momentum) if self._settings.nesterov else buffer

    def _orthogonalise(self, whole: Tensor, rule: ParameterRule) -> Tensor:
        dtype = torch.bfloat16 if self._settings.ns_dtype is Precision.bf16 else whole.dtype
        parts = whole.to(dtype).split(_heights(whole.shape, rule))
        steps, adjust = self._settings.ns_steps, self._settings.adjust_lr_fn
        # The learning rate depends on the shape of the logical matrix, so it is part of the update.
        return torch.cat([orthogonalise(x, steps).to(whole.dtype) * _ratio(x.shape, adjust) for x in parts])

    def _apply(self, parameter: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        own, lr = local(parameter), group["lr"]
        moved = (own * (1 - lr * group["weight_decay"])).add_(update, alpha=-lr)
        own.copy_(moved if self.found_inf is None else torch.where(self.found_inf.bool(), own, moved))


def _most_products(parameters: Sequence[ParameterSpec], ranks: int, settings: OptimizerSettings) -> float:
    costs = [_products(shape, rule, settings.ns_steps) for shape, rule in parameters if rule.is_projection]
    return max(sum(costs[index] for index in owned) for owned in assign(costs, ranks))


def _working(parameters: Sequence[ParameterSpec]) -> int:
    # The largest matrix six times: shards of a round with send and receive buffers, whole, two iterates, two squares.
    return 6 * max((math.prod(shape) for shape, rule in parameters if rule.is_projection), default=0)


MUON = OptimizerSpec(
    name="muon",
    build=Muon,
    # A projection has one momentum buffer.
    state_bytes=lambda elements, itemsize, rule: (
        elements * itemsize if rule.is_projection else moments_bytes(elements, itemsize)
    ),
    settings=(*ADAMW.settings, "momentum", "nesterov", "ns_steps", "adjust_lr_fn", "ns_dtype", "adamw_lr"),
    products=_most_products,
    working=_working,
)
