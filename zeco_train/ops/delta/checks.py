"""Checks of the operands of the delta rules."""

from __future__ import annotations

from torch import Tensor

from zeco_train.ops.operator import check_operands


def check_inputs(pieces: Tensor | None, **tensors: Tensor) -> None:
    """Check the tensors of a phase, given by their names (q, k, v, g, beta, do), against each other.

    g is [B, T, H] or [B, T, H, K].

    Raises:
        ValueError: naming the tensor, the expected shape or dtype, and the actual one.
    """
    by_channel = "g" in tensors and tensors["g"].dim() == 4
    dims = {"q": "BTGK", "k": "BTGK", "v": "BTHV", "do": "BTHV", "beta": "BTH", "g": "BTHK" if by_channel else "BTH"}
    # beta before g, which `delta` makes of it.
    sizes = check_operands(pieces, dims, {name: tensors[name] for name in dims if name in tensors})
    if sizes["H"] % sizes["G"]:
        raise ValueError(f"q: expected a number of groups that divides the {sizes['H']} heads of v, got {sizes['G']}")
