"""The convolution token by token, as a recurrence over its last inputs: the oracle for all other implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.documents import find_restarts
from zeco_train.ops.short_conv.inputs import check_inputs, check_state


def naive_short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    pieces: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The short convolution, differentiable by autograd.

        window = [S_{t−1}; x_t],    y_t = bias + Σ_j weight[:, 0, j] ⊙ window_j,    S_t = window without its first row

    Args:
        x: [B, T, C].
        weight: [C, 1, w], w ≥ 2.
        bias: [C].
        scale: None or 1.
        initial_state: [B, 1, w − 1, C], the inputs before token 0, oldest first; None is zeros.
        pieces: [T], see `zeco_train.ops.documents`; B must be 1 with them.

    Returns:
        y: [B, T, C] in the dtype of x.
        final_state: [B, 1, w − 1, C] in fp64 if x is fp64, else fp32.

    Raises:
        ValueError: shapes, dtypes or documents do not fit; the message names the tensor.
    """
    check_inputs(x, weight, bias, scale, pieces)
    dtype = accumulation_dtype(x.dtype)
    zero = x.new_zeros(x.shape[0], weight.shape[2] - 1, x.shape[2], dtype=dtype)
    if initial_state is not None:
        check_state(initial_state, "initial_state", x, weight)
    state = zero if initial_state is None else initial_state[:, 0].to(dtype)
    taps = weight[:, 0].mT.to(dtype)
    restarts = [False] * x.shape[1] if pieces is None else find_restarts(pieces).tolist()
    y = []
    for x_t, restart in zip(x.to(dtype).unbind(1), restarts, strict=True):
        window = torch.cat([zero if restart else state, x_t[:, None]], dim=1)
        y.append(bias.to(dtype) + (taps * window).sum(1))
        state = window[:, 1:]
    return torch.stack(y, dim=1).to(x.dtype), state[:, None]
