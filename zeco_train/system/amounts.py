"""Human-readable lengths, numbers and durations."""

from __future__ import annotations

from datetime import timedelta


def length_name(tokens: int) -> str:
    """An exact length with a binary unit: 1048576 → `1M`, 16384 → `16k`, 1000 → `1000`."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "k")):
        if tokens and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def compact(value: float, unit: str = "") -> str:
    """Three significant digits with k, M, G or T, and a unit: 12345.6 → "12.3k"."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999.5 is rounded to 1000, which is the next prefix's.
        if value >= 0.9995 * size:
            scaled = value / size
            digits = max(0, 2 - int(scaled >= 9.995) - int(scaled >= 99.95))
            return f"{scaled:.{digits}f}{prefix}{unit}"
    return f"{value:.3g}{unit}"


def clock(seconds: float) -> str:
    """A duration as "1:02:03", or with days as "2 days, 1:02:03"."""
    return str(timedelta(seconds=round(seconds)))
