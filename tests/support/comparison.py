"""Relative differences that tests compare with a limit; NaN and infinity exceed every limit."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np


def relative(value: float | None, expected: float | None) -> float:
    """Relative difference; NaN if either is None, which `read_metrics` returns for NaN and infinity."""
    if value is None or expected is None:
        return math.nan
    return abs(value - expected) / abs(expected)


def largest(errors: Iterable[float]) -> float:
    """The largest error, or NaN if any is NaN; Python's `max` ignores a NaN that is not first."""
    return float(np.max([*errors]))
