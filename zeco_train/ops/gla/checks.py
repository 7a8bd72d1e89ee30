"""Checks of the operands of gated linear attention."""

from __future__ import annotations

from torch import Tensor

from zeco_train.ops.operator import check_operands

_DIMS = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "g": "BTHK", "do": "BTHV"}


def check_inputs(pieces: Tensor | None, **tensors: Tensor) -> None:
    """Check the tensors of a phase, given by their names (q, k, v, g, do), against each other.

    Raises:
        ValueError: naming the tensor, the expected shape or dtype, and the actual one.
    """
    check_operands(pieces, _DIMS, tensors)
