"""Forget gates whose lower bounds rise from layer to layer, as of HGRN2 (Qin et al., 2024, arXiv 2404.07904)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Bounds the forget gate from below: 0 has no logarithm, and 1 / f must be finite. A state that it multiplies is gone.
_LEAST = 1e-30


def lower_bounds(parameter: Tensor) -> Tensor:
    """Lower bounds of the forget gates: [L, D], from the parameter [L, D].

    A channel's are the cumulative sum over layers of a softmax, less its first: 0 in the first layer, below 1 in the
    last.
    """
    steps = parameter.softmax(0)[1:]
    # The first layer's is a constant, so no rounding error of the others' gradients reaches it. A sum may round to more
    # than 1, and a decay must not.
    return torch.cat([torch.zeros_like(parameter[:1]), steps.cumsum(0).clamp(max=1)])


def forget_gate(logits: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and log-decays of a forget gate f = b + (1 − b) σ(logits).

    Args:
        logits: [..., D].
        bound: b [D], in [0, 1], fp32 (fp64 for fp64 logits).

    Returns:
        k = 1 − f [..., D] in the dtype of the logits, and g = log f [..., D] in that of the bound.
    """
    if torch.compiler.is_compiling():
        k, g = _gate_values(logits.to(bound.dtype), bound)
        return k.to(logits.dtype), g
    return _ForgetGate.apply(logits, bound)


def _gate_values(logits: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """The results of `forget_gate`, to all digits both where f is nearly 1 and where it is nearly 0."""
    k = (1 - bound) * (-logits).sigmoid()
    f = _forgets(logits, bound)
    # Bounded on the side that is not taken, where the gradient would be 0 · ∞.
    return k, torch.where(k < 0.5, torch.log1p(-k.clamp(max=0.5)), f.log())


def _forgets(logits: Tensor, bound: Tensor) -> Tensor:
    """The forget gate f."""
    return (bound + (1 - bound) * logits.sigmoid()).clamp(min=_LEAST)


class _ForgetGate(torch.autograd.Function):
    """x [..., D], b [D] → k = 1 − f, g = log f, with f = b + (1 − b) σ(x).

    With h = dg / f − dk and s = σ(−x) = 1 − σ(x):

    db = Σ s h over all but the last dimension
    dx = (1 − b) s (1 − s) h
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits, bound)
        k, g = _gate_values(logits.to(bound.dtype), bound)
        return k.to(logits.dtype), g

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: Tensor, dg: Tensor) -> tuple[Tensor, Tensor]:
        logits, bound = ctx.saved_tensors
        wide = logits.to(bound.dtype)
        of_forgotten = (dg / _forgets(wide, bound)).sub_(dk).mul_((-wide).sigmoid())
        dbound = of_forgotten.reshape(-1, bound.shape[0]).sum(0)
        return of_forgotten.mul_(wide.sigmoid()).mul_(1 - bound).to(logits.dtype), dbound
