"""The selective scan of Mamba (Gu & Dao, 2023, arXiv 2312.00752): each channel has a state of K numbers.

    h_t = exp(Δ_t A) ⊙ h_{t-1} + Δ_t x_t B_t,    o_t = Σ_k C_t ⊙ h_t + D ⊙ x_t

with Δ = softplus(dt + dt_bias) and A = −exp(A_log). x, dt, o [B, T, H] of H channels; B, C [B, T, K], the same for all
channels; A_log [H, K]; D, dt_bias [H]. There is no scale. Any numbers are valid: A is negative, Δ positive.

A channel is a head with K state channels and V = 1: states are [B, H, K, 1] and log-decays Σ_t Δ_t A [B, H, K], as of
all operators with diagonal transitions. So scans cut the state by channels, and pad nothing where K is a power of 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from zeco_train.ops.mamba1.chunked import CHUNKED
from zeco_train.ops.operator import KernelRule, Kind, Operator, OperatorTime


def selective_step(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, state: Tensor, scale: float
) -> Tensor:
    """`Operator.one_token`: x, dt [B, 1, H], B, C [B, 1, K] → o."""
    h, (x_t, dt_t, B_t, C_t) = state.squeeze(-1), (y[:, 0].to(state.dtype) for y in (x, dt, B, C))
    step = F.softplus(dt_t + dt_bias.to(state.dtype)).unsqueeze(-1)
    h.mul_((step * -A_log.to(state.dtype).exp()).exp()).add_(step * x_t.unsqueeze(-1) * B_t.unsqueeze(-2))
    return ((h * C_t.unsqueeze(-2)).sum(-1) + D.to(state.dtype) * x_t)[:, None].to(x.dtype)


_BLOCK = 16  # tokens of which all pairs are computed at once


def by_time_steps(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    *,
    scale: float | None,
    initial_state: Tensor,
) -> tuple[Tensor, Tensor]:
    """h_i = exp(Δ_i A) ⊙ h + Σ_{j≤i} exp(Δ_ij A) ⊙ Δ_j x_j B_j, with h before a block.

    Δ_i is the sum of time steps since h, Δ_ij that after token j up to i. Operands and initial_state [B, H, K, 1] fp64
    → o and the state after the last token.
    """
    assert scale in (None, 1.0)
    A, steps = -A_log.exp(), F.softplus(dt + dt_bias)
    written = (steps * x).unsqueeze(-1) * B.unsqueeze(-2)
    state, outputs = initial_state.squeeze(-1), []
    for start in range(0, x.shape[1], _BLOCK):
        block = slice(start, start + _BLOCK)
        own = steps[:, block]
        later = torch.ones(own.shape[1], own.shape[1], dtype=torch.bool, device=x.device).tril(-1)
        # [B, i, j, H]: sums of their own, since differences would cancel.
        between = (own[:, :, None] * later[..., None]).cumsum(1)
        seen = (between.unsqueeze(-1) * A).exp() * ~later.mT[..., None, None]
        h = (own.cumsum(1).unsqueeze(-1) * A).exp() * state[:, None] + (seen * written[:, None, block]).sum(2)
        outputs.append((h @ C[:, block, :, None]).squeeze(-1))
        state = h[:, -1]
    return torch.cat(outputs, 1) + D * x, state.unsqueeze(-1)


class SelectiveScan(Operator):
    """The operator; its states have one column, V = 1."""

    def state_shape(self, operands: Sequence[Tensor]) -> tuple[int, int, int, int]:
        """(B, H, K, 1)."""
        x, _, A_log, *_ = operands
        return x.shape[0], *A_log.shape, 1


MAMBA1 = SelectiveScan(
    operands=("x", "dt", "A_log", "B", "C", "D", "dt_bias"),
    dims=("BTH", "BTH", "HK", "BTK", "BTK", "H", "H"),
    kind=Kind.diagonal,
    portable=CHUNKED,
    oracle=by_time_steps,
    one_token=selective_step,
    # Of each channel the outer product with B and the product with C; h is computed again.
    forward_flops=lambda heads, key_dim, value_dim: 4.0 * heads * key_dim,
    recomputed_flops=lambda heads, key_dim, value_dim: 2.0 * heads * key_dim,
    about="The selective scan of Mamba (Gu & Dao 2023, arXiv 2312.00752); states are [B, H, K, 1]."
    "\n\n    h_t = exp(Δ_t A) ⊙ h_{t-1} + Δ_t x_t B_t,    o_t = Σ_k C_t ⊙ h_t + D ⊙ x_t"
    "\n\nwith Δ = softplus(dt + dt_bias) and A = -exp(A_log).",
    output=0,
    has_scale=False,
    cuda="zeco_train.ops.mamba1.kernels:CUDA",
    keys=3,
    # Their sums of dB and dC take K² / 64 bytes a token and channel: of 16,384 tokens and 4,096 channels 4 GB at 64.
    kernels=KernelRule(largest=(64, None)),
    # 6.519 ms for 16,384 tokens and 4,096 channels on an H200, 1.141 of them forward (docs/benchmarks.md).
    time=OperatorTime("mamba1", 9.71e-11, 0.18, 16, 1),
)
