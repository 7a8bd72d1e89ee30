"""One token of the convolution, for generation: the state, its last w − 1 inputs, is updated in place. No gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.short_conv.inputs import check_inputs, check_state


def convolution_step(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor, scale: float | None = None) -> Tensor:
    """Compute the next token of each sequence of a batch.

    Args:
        x: [B, 1, C].
        weight: [C, 1, w], w ≥ 2.
        bias: [C].
        state: [B, 1, w − 1, C] in fp64 if x is fp64, else fp32: the inputs before, oldest first; updated in place.
        scale: None or 1.

    Returns:
        y: [B, 1, C] in the dtype of x.

    Raises:
        ValueError: shapes or dtypes do not fit; the message names the tensor.
    """
    check_inputs(x, weight, bias, scale, None)
    check_state(state, "state", x, weight)
    dtype = accumulation_dtype(x.dtype)
    if x.shape[1] != 1:
        raise ValueError(f"x: expected one token of each sequence, got {x.shape[1]}")
    if state.dtype != dtype:
        raise ValueError(f"state: expected {dtype}, got {state.dtype}")
    window = torch.cat([state[:, 0], x.to(dtype)], dim=1)
    y = (weight[:, 0].mT.to(dtype) * window).sum(1, keepdim=True) + bias.to(dtype)
    state[:, 0].copy_(window[:, 1:])
    return y.to(x.dtype)
