"""Differences of numbers for comparisons with a limit: one that is not finite is within no limit."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np


def relative(value: float | None, expected: float | None) -> float:
    """Relative difference; NaN if one is None, as which `read_metrics` gives NaN and infinities."""
    if value is None or expected is None:
        return math.nan
    return abs(value - expected) / abs(expected)


def largest(errors: Iterable[float]) -> float:
    """The largest, or NaN if there is one: Python's `max` passes over a NaN that is not the first."""
    return float(np.max([*errors]))
