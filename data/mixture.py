"""Which store each sequence of a run comes from: a pure function of its place in the stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from data.permutation import Permutation


def as_integers(weights: Sequence[float]) -> list[int]:
    """The smallest integers with the same ratios as `weights`, which count as the decimals they are written as."""
    fractions = [Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    integers = [int(fraction * scale) for fraction in fractions]
    return [number // math.gcd(*integers) for number in integers]


class Mixture:
    """Deals the places 0, 1, 2, … of a run's stream out to stores in proportion to their weights.

    With the shares w of the stores, places are taken in blocks of b = ⌈1 / the smallest share⌉. Store j has
    ⌊t·b·W_j⌋ − ⌊t·b·W_{j−1}⌋ of the first t·b places, W being the shares' running sum: less than one from its exact
    share after every block, for ever, in whole numbers throughout. (b is large enough that no store's count ever
    falls.) Inside of a block the places are in random order, so that no period of the training loop, such as that of
    its logging, always meets the same store. Constant time and memory for any place; each store's own indices 0, 1, 2,
    … occur exactly once, in order but for the shuffling inside of blocks.

    Args:
        weights: of the stores, positive integers.
        seed: of the order inside of blocks.
    """

    def __init__(self, weights: Sequence[int], seed: int) -> None:
        assert weights, weights
        assert min(weights) > 0, weights
        self._seed = seed
        self._sums = [sum(weights[: j + 1]) for j in range(len(weights))]
        self.shares = [Fraction(weight, self._sums[-1]) for weight in weights]
        self.block = -(-self._sums[-1] // min(weights))

    def place(self, position: int) -> tuple[int, int]:
        """The store of the sequence at `position`, and how many sequences of that store are before it."""
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
        """How many of the places of so many blocks each store and all before it have."""
        return [blocks * self.block * partial // self._sums[-1] for partial in self._sums]
