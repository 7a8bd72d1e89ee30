"""Some cells of a product, in which each value of each axis meets each value of every other axis."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def cover_pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cells of the product, in each of which the most pairs are new; about as many as the two longest axes have."""
    cells = [*itertools.product(*axes)]
    missing = set().union(*map(pairs_of, cells))
    chosen = []
    while missing:
        chosen.append(max(cells, key=lambda cell: len(missing & pairs_of(cell))))
        missing -= pairs_of(chosen[-1])
    return chosen


def pairs_of(cell: Sequence[Any]) -> set[tuple[int, int, Any, Any]]:
    """The values of every two axes, with the axes' numbers."""
    return {(i, j, cell[i], cell[j]) for i, j in itertools.combinations(range(len(cell)), 2)}
