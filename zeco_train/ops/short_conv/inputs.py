"""Checks of the operands, shared by all implementations."""

from __future__ import annotations

import torch
from torch import Tensor


def check_inputs(x: Tensor, weight: Tensor, bias: Tensor, scale: float | None, doc_ids: Tensor | None) -> None:
    """Check the operands against each other.

    Raises:
        ValueError: naming the tensor, the expected shape or dtype, and the actual one.
    """
    if x.dim() != 3 or 0 in x.shape:
        raise ValueError(f"x: expected shape [B, T, C], no dimension 0; got {list(x.shape)}")
    channels = x.shape[2]
    if weight.dim() != 3 or weight.shape[:2] != (channels, 1) or weight.shape[2] < 2:
        raise ValueError(f"weight: expected shape [C, 1, w] = [{channels}, 1, at least 2], got {list(weight.shape)}")
    if bias.shape != (channels,):
        raise ValueError(f"bias: expected shape [C] = [{channels}], got {list(bias.shape)}")
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if not tensor.is_floating_point():
            raise ValueError(f"{name}: expected a floating point dtype, got {tensor.dtype}")
    if scale not in (None, 1.0):
        raise ValueError(f"scale: a convolution has none, expected 1; got {scale:g}")
    if doc_ids is None:
        return
    if x.shape[0] != 1:
        raise ValueError(f"cu_seqlens: packed documents need a batch of 1, got a batch of {x.shape[0]}")
    if doc_ids.numel() != x.shape[1]:
        raise ValueError(f"cu_seqlens: describes {doc_ids.numel()} tokens, but there are {x.shape[1]}")


def check_state(state: Tensor, name: str, x: Tensor, weight: Tensor) -> None:
    """Raise a ValueError naming the state if its shape is not [B, 1, w − 1, C]."""
    shape = torch.Size((x.shape[0], 1, weight.shape[2] - 1, x.shape[2]))
    if state.shape != shape:
        raise ValueError(f"{name}: expected shape [B, 1, w-1, C] = {list(shape)}, got {list(state.shape)}")
