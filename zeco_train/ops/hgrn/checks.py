"""Checks of the operands of the elementwise recurrence."""

from __future__ import annotations

from torch import Tensor

from zeco_train.ops.checks import check_operands

_DIMS = {"x": "BTHK", "g": "BTHK", "do": "BTHK"}


def check_inputs(scale: float | None, pieces: Tensor | None, **tensors: Tensor) -> None:
    """Check the tensors of a phase, given by their names (x, g, do), against each other.

    Raises:
        ValueError: naming the tensor, the expected shape or dtype, and the actual one; or a scale other than 1.
    """
    check_operands(pieces, _DIMS, tensors)
    if scale not in (None, 1.0):
        raise ValueError(f"scale: an elementwise recurrence has none, expected 1; got {scale:g}")
