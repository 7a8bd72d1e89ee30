"""The elementwise recurrence of HGRN (Qin et al., 2023, arXiv 2311.04823): each channel has a state of one number.

    h_t = exp(g_t) ⊙ h_{t-1} + x_t,    o_t = h_t

x, g, o [B, T, H, K]; g is log-decays, fp32 or fp64, finite and at most 0. Heads are groups of channels, by which scans
over ranks cut the state, [B, H, K, 1]: they change no result. There is no scale. Its FLOPs count as 0: it has no matrix
products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeco_train.ops.hgrn.chunked import CHUNKED
from zeco_train.ops.operator import KernelRule, Kind, Operator, OperatorTime, PeerFunction


def hgrn_step(x: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
    """`Operator.one_token`: x and g [B, 1, H, K] → o."""
    h = state.squeeze(-1)
    h.mul_(g[:, 0].exp()).add_(x[:, 0])
    return h[:, None].to(x.dtype, copy=True)


_BLOCK = 16  # tokens of which all pairs are computed at once


def by_sums(x: Tensor, g: Tensor, *, scale: float | None, initial_state: Tensor) -> tuple[Tensor, Tensor]:
    """h_i = exp(G_i) ⊙ h + Σ_{j≤i} exp(G_i − G_j) ⊙ x_j, with h before a block and G the sums of log-decays since.

    x, g [B, T, H, K] and initial_state [B, H, K, 1] fp64 → o and the state after the last token.
    """
    assert scale in (None, 1.0)
    state, outputs = initial_state.squeeze(-1), []
    for start in range(0, x.shape[1], _BLOCK):
        x_b, g_b = x[:, start : start + _BLOCK], g[:, start : start + _BLOCK]
        later = torch.ones(x_b.shape[1], x_b.shape[1], dtype=torch.bool, device=x.device).tril(-1)
        # [B, i, j, H, K]: of the tokens after j up to i; sums of their own, since differences would cancel.
        between = (g_b[:, :, None] * later[..., None, None]).cumsum(1).exp()
        seen = between * ~later.mT[..., None, None]
        outputs.append(g_b.cumsum(1).exp() * state[:, None] + (seen * x_b[:, None]).sum(2))
        state = outputs[-1][:, -1]
    return torch.cat(outputs, 1), state.unsqueeze(-1)


class ElementwiseRecurrence(Operator):
    """The operator; its states have one column, V = 1."""

    def state_shape(self, operands: Sequence[Tensor]) -> tuple[int, int, int, int]:
        """(B, H, K, 1)."""
        batch, _, heads, key_dim = operands[0].shape
        return batch, heads, key_dim, 1


HGRN = ElementwiseRecurrence(
    operands=("x", "g"),
    dims=("BTHK", "BTHK"),
    kind=Kind.diagonal,
    portable=CHUNKED,
    oracle=by_sums,
    one_token=hgrn_step,
    forward_flops=lambda *dims: 0.0,
    about="The elementwise recurrence of HGRN (Qin et al. 2023, arXiv 2311.04823); states are [B, H, K, 1]."
    "\n\n    h_t = exp(g_t) ⊙ h_{t-1} + x_t,    o_t = h_t",
    output=0,
    has_scale=False,
    cuda="zeco_train.ops.hgrn.kernels:CUDA",
    kernels=KernelRule(),
    # 0.464 ms for 16,384 tokens and 16 heads, 0.146 of them forward (lab/results/operator_1xh200_hgrn.txt).
    time=OperatorTime("hgrn", 1.77e-9, 0.31, 128, 1),
    peers=(PeerFunction("fla.ops.hgrn", "chunk_hgrn", joins_heads=True),),
)
