"""Covering designs: few cases in which each value of each axis meets each value of every other axis."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Cell = dict[str, Any]
# A pair of values: axis, index of the value, and the same of another axis.
_Pair = tuple[str, int, str, int]

# Random completions of a case of which the best is taken, and tries to find a possible one at all.
_CANDIDATES, _TRIES = 24, 1_000


def cover_pairs(
    axes: Mapping[str, Sequence[Any]], is_possible: Callable[[Cell], bool], given: Sequence[Cell] = ()
) -> list[Cell]:
    """Cases that have each pair of values of two axes which some possible case has; the same in every process.

    Args:
        axes: the values of each axis.
        is_possible: whether these values can be together.
        given: cases that there are already; not in the result.
    """
    generator, sizes = random.Random(0), {axis: len(values) for axis, values in axes.items()}
    missing: dict[_Pair, None] = {}
    for a, b in itertools.combinations(axes, 2):
        missing |= dict.fromkeys((a, i, b, j) for i in range(len(axes[a])) for j in range(len(axes[b])))
    for cell in given:
        for pair in _pairs({axis: values.index(cell[axis]) for axis, values in axes.items()}):
            missing.pop(pair, None)
    chosen: list[Cell] = []
    while missing:
        a, i, b, j = next(iter(missing))
        best: dict[str, int] | None = None
        most = found = 0
        for _ in range(_TRIES):
            indices = {axis: int(generator.random() * size) for axis, size in sizes.items()} | {a: i, b: j}
            if not is_possible(_cell(axes, indices)):
                continue
            new = sum(pair in missing for pair in _pairs(indices))
            if best is None or new > most:
                best, most = indices, new
            found += 1
            if found == _CANDIDATES:
                break
        if best is None:
            # No case can have both.
            del missing[a, i, b, j]
            continue
        chosen.append(_cell(axes, best))
        for pair in _pairs(best):
            missing.pop(pair, None)
    return chosen


def _cell(axes: Mapping[str, Sequence[Any]], indices: Mapping[str, int]) -> Cell:
    return {axis: axes[axis][index] for axis, index in indices.items()}


def _pairs(indices: Mapping[str, int]) -> list[_Pair]:
    return [(a, i, b, j) for (a, i), (b, j) in itertools.combinations(indices.items(), 2)]
