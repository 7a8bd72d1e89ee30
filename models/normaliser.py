"""Normaliser of linear attention: each output is divided by the sum of its token's attention weights.

    o_t = Σ_{s≤t} a_ts v_s / Σ_{s≤t} a_ts,    a_ts = φ(q_t)ᵀ φ(k_s)

The sum is the output of one more column of the values, all ones. So it is part of the state: the operator computes it
with the rest, over ranks, documents and segments. Columns of zeros follow it, up to a width that suits kernels; they
change nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeco_train.ops import accumulation_dtype

# Kernels load columns of bf16 in groups of 16 bytes.
COLUMNS = 8


def round_up(width: int, multiple: int) -> int:
    """The smallest multiple that is not below `width`."""
    return -(-width // multiple) * multiple


def with_ones(v: Tensor) -> Tensor:
    """Append a column of ones, then zeros: v [..., V] → [..., `round_up`(V + 1, COLUMNS)]."""
    column = v.new_zeros(round_up(v.shape[-1] + 1, COLUMNS) - v.shape[-1])
    # `column[0] = 1` would copy a number from the CPU, which a CUDA graph cannot capture.
    column[:1].fill_(1)
    return torch.cat([v, column.expand(*v.shape[:-1], -1)], dim=-1)


def normalised(o: Tensor, value_dim: int) -> Tensor:
    """Divide outputs by their normaliser.

    Args:
        o: [..., V + 1 or more], outputs of the operator for values `with_ones`.
        value_dim: V.

    Returns:
        [..., V] in the dtype of o. A normaliser of zero gives zeros, with zero gradients.
    """
    if torch.compiler.is_compiling():
        return _divide(o, value_dim)[0].to(o.dtype)
    return _Normalised.apply(o, value_dim)


def _divide(o: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """Compute y [..., V] and 1 / z [..., 1] of `_Normalised`, in the accumulation dtype."""
    wide = o.to(accumulation_dtype(o.dtype))
    sums = wide[..., value_dim : value_dim + 1]
    # 1 / inf = 0, and so is its gradient. Below the smallest normal number the reciprocal may overflow.
    reciprocal = sums.masked_fill(sums.abs() < torch.finfo(sums.dtype).tiny, torch.inf).reciprocal()
    return wide[..., :value_dim] * reciprocal, reciprocal


class _Normalised(torch.autograd.Function):
    """Division of [n | z | 0], n [..., V], z [..., 1] → y [..., V]; keeps only y and 1 / z.

    y  = n / z
    dn = dy / z
    dz = −(dy · y) / z
    """

    @staticmethod
    def forward(ctx: Any, o: Tensor, value_dim: int) -> Tensor:
        wide, reciprocal = _divide(o, value_dim)
        y = wide.to(o.dtype)
        ctx.save_for_backward(y, reciprocal)
        ctx.shape = o.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        y, reciprocal = ctx.saved_tensors
        value_dim = y.shape[-1]
        do = y.new_zeros(ctx.shape)
        scaled = dy.to(reciprocal.dtype) * reciprocal
        do[..., :value_dim] = scaled
        do[..., value_dim] = -(scaled * y).sum(dim=-1)
        return do, None
