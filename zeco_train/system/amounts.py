"""Human-readable lengths and durations."""

from __future__ import annotations

from datetime import timedelta


def length_name(tokens: int) -> str:
    """An exact length with a binary unit: 1048576 → `1M`, 16384 → `16k`, 1000 → `1000`."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "k")):
        if tokens and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def clock(seconds: float) -> str:
    """A duration as "1:02:03", or with days as "2 days, 1:02:03"."""
    return str(timedelta(seconds=round(seconds)))
