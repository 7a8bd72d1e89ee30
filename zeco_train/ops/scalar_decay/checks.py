"""Checks of the operands of linear attention with one decay a head."""

from __future__ import annotations

from torch import Tensor

from zeco_train.ops.operator import check_operands

_DIMS = {"q": "BTGK", "k": "BTGK", "v": "BTHV", "do": "BTHV", "g": "BTH", "log_decay": "H"}


def check_inputs(pieces: Tensor | None, **tensors: Tensor) -> None:
    """Check the tensors of a phase, given by their names (q, k, v, g, log_decay, do), against each other.

    Raises:
        ValueError: naming the tensor, the expected shape or dtype, and the actual one.
    """
    sizes = check_operands(pieces, _DIMS, tensors)
    if sizes["H"] % sizes["G"]:
        raise ValueError(f"q: expected a number of groups that divides the {sizes['H']} heads of v, got {sizes['G']}")


def check_constant(log_decay: Tensor) -> None:
    """Raise a ValueError if the decays of `fixed_decay` ask for a gradient, which they never get."""
    if log_decay.requires_grad:
        raise ValueError("log_decay: expected a constant, got a tensor that requires a gradient; use scalar_decay")
