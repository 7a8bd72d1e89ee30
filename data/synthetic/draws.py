"""Random numbers that are functions of a name: the same on every machine, with every version of every library."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from data.permutation import Permutation

# Numbers that one step of Philox gives.
_LANES = 4


class Draws:
    """Draws for one example; each is named by what it is of, and independent of all others.

    Args:
        name: of the kind of example.
        seed, index: which one.
    """

    def __init__(self, name: str, seed: int, index: int) -> None:
        self._name, self._seed, self._index = name, seed, index

    def pick(self, count: int, n: int, of: str) -> list[int]:
        """`count` different numbers below `n`, in random order."""
        assert 0 <= count <= n, (count, n)
        order = Permutation(n, self._seed, self._index, f"{self._name}, {of}")
        return [order(place) for place in range(count)]

    def below(self, n: int, of: str) -> int:
        """A number below `n`."""
        return self.pick(1, n, of)[0]

    def many_below(self, n: int, start: int, stop: int, of: str) -> NDArray[np.int64]:
        """The `start`-th to `stop`-th of an endless row of numbers below `n`, [stop − start]; n is small."""
        name = f"{self._name}, {of}, seed {self._seed}, {self._index}"
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
        first = start // _LANES
        # numpy promises the bits of its generators for ever, not what it derives from them.
        raw = np.random.Philox(key=key, counter=first).random_raw(stop - first * _LANES)[start - first * _LANES :]
        # The high bits, by a product: n differs from equal shares by less than 2⁻³² of a share.
        return ((raw >> np.uint64(32)) * np.uint64(n) >> np.uint64(32)).astype(np.int64)
