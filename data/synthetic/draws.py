"""Random numbers as functions of a name: identical on every machine and with every library version."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from data.randomness import Permutation

# Numbers per Philox step.
_LANES = 4


class Draws:
    """Draws for one example; each has a name (`of`) and is independent of all others.

    Args:
        name: kind of example.
        seed, index: select the example.
    """

    def __init__(self, name: str, seed: int, index: int) -> None:
        self._name, self._seed, self._index = name, seed, index

    def pick(self, count: int, n: int, of: str) -> list[int]:
        """`count` distinct numbers below `n`, in random order."""
        assert 0 <= count <= n, (count, n)
        order = Permutation(n, self._seed, self._index, f"{self._name}, {of}")
        return [order(place) for place in range(count)]

    def below(self, n: int, of: str) -> int:
        """A number below `n`."""
        return self.pick(1, n, of)[0]

    def many_below(self, n: int, start: int, stop: int, of: str) -> NDArray[np.int64]:
        """Elements [start, stop) of an endless random sequence of numbers below `n`, [stop − start]; n is small."""
        name = f"{self._name}, {of}, seed {self._seed}, {self._index}"
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
        first = start // _LANES
        # numpy guarantees the raw bits of its generators across versions, but not its distributions.
        raw = np.random.Philox(key=key, counter=first).random_raw(stop - first * _LANES)[start - first * _LANES :]
        # Multiply-shift on the high 32 bits: the bias is below n · 2⁻³².
        return ((raw >> np.uint64(32)) * np.uint64(n) >> np.uint64(32)).astype(np.int64)
