"""Numbers: lower bounds of settings, divisors, comparison, and how lengths, rates and durations are shown."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from zeco_train.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def check_least(settings: object, section: str = "", /, **least: float) -> None:
    """Raise ConfigError for the first field of `settings`, named SECTION.NAME or NAME, below its bound."""
    for name, smallest in least.items():
        if (value := getattr(settings, name)) < smallest:
            raise ConfigError(f"{section}.{name}" if section else name, value, f"must be ≥ {smallest}")


def divisors(number: int) -> list[int]:
    """All divisors in increasing order."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]


def check_divides(field: str, value: int, whole: int, rule: str, otherwise: str = "") -> None:
    """Raise ConfigError with the `rule` and the legal values for a setting that does not divide `whole`."""
    if value < 1 or whole % value:
        legal = ", ".join(map(str, divisors(whole)))
        raise ConfigError(field, value, f"{rule}: {legal}{otherwise}")


def largest(works: Callable[[int], bool], guess: int, most: int, precision: float = 0.0) -> int:
    """The largest number from 1 to `most` that works, as all below it do; 0 if 1 does not.

    The search begins at a guess, moves from it in growing steps, and bisects until the smallest number that does not
    work is at most `precision` above the result, relative to it.
    """
    found, fails, factor = 0, most + 1, 1.1 if guess > 1 else 2.0
    number = min(max(guess, 1), most)
    while fails - found > max(1.0, precision * found):
        if works(number):
            found = number
        else:
            fails = number
        if fails > most:
            number = min(max(found + 1, int(found * factor)), most)
        elif not found:
            number = max(1, min(fails - 1, int(fails / factor)))
        else:
            number = (found + fails) // 2
        factor = min(2.0, factor * factor)
    return found


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖ in float64; the norm of `found` if `expected` is 0."""
    found, expected = found.detach().double(), expected.detach().double()
    scale = float(expected.norm())
    return float((found - expected).norm()) / (scale or 1.0)


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


# In place of a token's id.
IGNORE_INDEX = -100
