"""Numerical comparison of results."""

from __future__ import annotations

from torch import Tensor


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖ in float64; the norm of `found` if `expected` is 0."""
    found, expected = found.detach().double(), expected.detach().double()
    scale = float(expected.norm())
    return float((found - expected).norm()) / (scale or 1.0)
