"""Checks of the shapes and dtypes of operands, shared by the operators."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

# Operands of a number a token and head, or channel, whose dtype is their own; and why it may not be narrow.
WIDE = {
    "g": "log-decays are summed over chunks",
    "log_decay": "log-decays are summed over chunks",
    "beta": "writing strengths are solved for over chunks",
}


def check_operands(pieces: Tensor | None, dims: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Check the tensors of a phase against each other.

    Args:
        pieces: [T], see `zeco_train.ops.documents`; B must be 1 with them.
        dims: the dimensions of each tensor, a letter each, "BTHK" for example. Equal letters have equal sizes.
        tensors: by their names.

    Returns:
        The size of each dimension.

    Raises:
        ValueError: naming the tensor, the expected shape or dtype, and the actual one.
    """
    sizes: dict[str, int] = {}
    first = next(iter(tensors))
    for name, x in tensors.items():
        shape = f"[{', '.join(dims[name])}]"
        if x.dim() != len(dims[name]):
            raise ValueError(f"{name}: expected shape {shape}, got {list(x.shape)}")
        expected = [sizes.setdefault(dim, size) for dim, size in zip(dims[name], x.shape, strict=True)]
        if expected != list(x.shape):
            raise ValueError(f"{name}: expected shape {shape} = {expected}, got {list(x.shape)}")
        if 0 in x.shape:
            raise ValueError(f"{name}: no dimension may be 0, got shape {list(x.shape)}")
        if name not in WIDE and (not x.is_floating_point() or x.dtype != tensors[first].dtype):
            raise ValueError(f"{name}: expected a floating point dtype, that of {first}; got {x.dtype}")
        if name in WIDE and x.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name}: expected float32 or float64, for {WIDE[name]}; got {x.dtype}")
    if pieces is None:
        return sizes
    if sizes["B"] != 1:
        raise ValueError(f"cu_seqlens: packed documents need a batch of 1, got a batch of {sizes['B']}")
    if pieces.numel() != sizes["T"]:
        raise ValueError(f"cu_seqlens: describes {pieces.numel()} tokens, but there are {sizes['T']}")
    return sizes


def check_state(state: Tensor, name: str, shape: torch.Size) -> None:
    """Raise a ValueError naming the state if its shape is not [B, H, K, V] = `shape`."""
    if state.shape != shape:
        raise ValueError(f"{name}: expected shape [B, H, K, V] = {list(shape)}, got {list(state.shape)}")
