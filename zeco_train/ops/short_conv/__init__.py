"""Short causal depthwise convolution, as of the inputs of Mamba-2 and the delta-rule mixers.

    y_t = bias + Σ_{j<w} weight[:, 0, j] ⊙ x_{t−(w−1)+j}

x, y [B, T, C]; weight [C, 1, w], bias [C], as `torch.nn.Conv1d(C, C, w, groups=C, padding=w − 1)` has them. There is
no scale. Its FLOPs count as 0: it has no matrix products.

The state after a token is the w − 1 inputs up to it, oldest first, [B, 1, w−1, C]: a state with one head, K = w − 1 and
V = C. A new input shifts it, and the output reads all its rows, so the convolution is an affine map of a state as every
operator is. The transition over T tokens is the shift by T rows, a matrix: 0 from T = w − 1 on, or if a document
restarts. Hence a shard needs only the last tokens before it, as a rule of one shard (`Operator.state_is_halo`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeco_train.ops.operator import KernelRule, Kind, Operator
from zeco_train.ops.oracle import by_windows
from zeco_train.ops.short_conv.passes import PLAIN


def convolution_step(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor, scale: float) -> Tensor:
    """`Operator.one_token`: x [B, 1, C] → y; the state is [B, 1, w − 1, C]."""
    dtype = state.dtype
    window = torch.cat([state[:, 0], x.to(dtype)], dim=1)
    y = (weight[:, 0].mT.to(dtype) * window).sum(1, keepdim=True) + bias.to(dtype)
    state[:, 0].copy_(window[:, 1:])
    return y.to(x.dtype)


class ShortConv(Operator):
    """The operator; its state's shape is given by x and the width."""

    def state_shape(self, operands: Sequence[Tensor]) -> tuple[int, int, int, int]:
        """(B, 1, w − 1, C)."""
        x, weight, _ = operands
        return x.shape[0], 1, weight.shape[2] - 1, x.shape[2]

    def check(self, operands: Sequence[Tensor], doc_ids: Tensor | None, do: Tensor | None = None) -> None:
        super().check(operands, doc_ids, do)
        if (width := operands[1].shape[2]) < 2:
            raise ValueError(f"weight: expected a width of at least 2, got {width}")

    def cuts(self, operands: Sequence[Tensor]) -> bool:
        """Whether the shard is as long as the state: nothing from before it is left then."""
        x, weight, _ = operands
        return x.shape[1] >= weight.shape[2] - 1


SHORT_CONV = ShortConv(
    operands=("x", "weight", "bias"),
    dims=("BTC", "C1W", "C"),
    kind=Kind.matrix,
    portable=PLAIN,
    oracle=by_windows,
    one_token=convolution_step,
    forward_flops=lambda *dims: 0.0,
    about="Short causal depthwise convolution; the state is the last inputs, [B, 1, W - 1, C]."
    "\n\n    o_t = bias + Σ_{j<W} weight[:, 0, j] ⊙ x_{t-(W-1)+j}",
    output=0,
    has_scale=False,
    cuda="zeco_train.ops.short_conv.kernels:CUDA",
    kernels=KernelRule(),
    state_is_halo=True,
)
