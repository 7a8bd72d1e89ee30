"""Numbers as people say them."""

from __future__ import annotations

from datetime import timedelta


def length_name(tokens: int) -> str:
    """A length as people say it, exact: 1048576 → `1M`, 16384 → `16k`, 1000 → `1000`."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "k")):
        if tokens and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: "1:02:03"; before them days, if there are any: "2 days, 1:02:03"."""
    return str(timedelta(seconds=round(seconds)))
