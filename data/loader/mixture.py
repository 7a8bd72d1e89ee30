"""Assigns stream positions to the stores of a mixture; a pure function of the position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from data.randomness import Permutation


def as_integers(weights: Sequence[float]) -> list[int]:
    """The smallest integers with the same ratios as `weights`, which are read as decimals by their repr."""
    fractions = [Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    integers = [int(fraction * scale) for fraction in fractions]
    return [number // math.gcd(*integers) for number in integers]


class Mixture:
    """Distributes the positions 0, 1, 2, … of a run's stream over stores in proportion to their weights.

    Positions are grouped into blocks of b = ⌈1 / the smallest share⌉. Store j gets ⌊t·b·W_j⌋ − ⌊t·b·W_{j−1}⌋ of the
    first t·b positions, W being the running sum of the shares: after every block it is within one of its exact share,
    without drift, in integer arithmetic. (b is large enough that no store's count ever decreases.) Positions are
    shuffled within a block, so that no period of the training loop, such as the logging interval, always hits the same
    store. Constant time and memory per position. Each store's indices 0, 1, 2, … occur exactly once, in order except
    for the shuffle within blocks.

    Args:
        weights: positive integers, one per store.
        seed: seed of the order within blocks.
    """

    def __init__(self, weights: Sequence[int], seed: int) -> None:
        assert weights, weights
        assert min(weights) > 0, weights
        self._seed = seed
        self._sums = [sum(weights[: j + 1]) for j in range(len(weights))]
        self.shares = [Fraction(weight, self._sums[-1]) for weight in weights]
        self.block = -(-self._sums[-1] // min(weights))

    def place(self, position: int) -> tuple[int, int]:
        """The store of the sequence at `position`, and the sequence's index within that store."""
        if len(self._sums) == 1:
            return 0, position
        block, slot = divmod(position, self.block)
        slot = Permutation(self.block, self._seed, block, of="stores")(slot)
        before, after = self._dealt(block), self._dealt(block + 1)
        store = next(j for j in range(len(self._sums)) if slot < after[j] - before[j])
        if store == 0:
            return 0, before[0] + slot
        return store, before[store] - before[store - 1] + slot - (after[store - 1] - before[store - 1])

    def _dealt(self, blocks: int) -> list[int]:
        """Cumulative number of positions of stores 0 … j in the first `blocks` blocks, for each j."""
        return [blocks * self.block * partial // self._sums[-1] for partial in self._sums]
