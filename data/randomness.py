"""Randomness without state: permutations and draws are functions of names, alike on every machine and version."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Elements that `map` computes at a time: the temporaries fit in a core's cache.
_BLOCK = 1 << 14
# Numbers per Philox step.
_LANES = 4


class Permutation:
    """A bijection of 0 … n−1 determined by (n, seed, epoch, of), in constant time and memory.

    A balanced Feistel network is a bijection of the pairs of `half`-bit numbers whatever its round function is: each
    round maps (left, right) to (right, left XOR f(right)), which can be undone. Its domain is the smallest even power
    of two that is >= n, at least 4. A result >= n is fed in again ("cycle walking"): the cycle through a value < n
    returns to a value < n at its start at the latest, so the restriction to 0 … n−1 is still a bijection. The domain is
    less than 4n, so fewer than 4 turns are expected.

    Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), sections 4 (cycle walking) and 5 (Feistel).

    `seed`, `epoch` and the kind of items `of` select the order; `name` is the order's.
    """

    def __init__(self, n: int, seed: int, epoch: int, of: str = "sequences") -> None:
        assert n > 0, n
        self.n = n
        self._half = max(1, ((n - 1).bit_length() + 1) // 2)
        self.name = f"order of {of}, seed {seed}, epoch {epoch}"
        words = hashlib.blake2b(self.name.encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(words[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]

    def __call__(self, index: int) -> int:
        """The item at position `index`."""
        assert 0 <= index < self.n, (index, self.n)
        place = self._encrypt(index)
        while place >= self.n:
            place = self._encrypt(place)
        return place

    def map(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The items at positions `indices`, a one-dimensional array: as `__call__` on each, but much faster."""
        result = indices.astype(np.uint64)
        for start in range(0, len(result), _BLOCK):
            # A view: the loop writes into `result`.
            places = result[start : start + _BLOCK]
            places[:] = self._encrypt(places)
            while (outside := np.flatnonzero(places >= self.n)).size:
                places[outside] = self._encrypt(places[outside])
        return result.view(np.int64)

    # Of one number, or of an array of uint64.
    def _encrypt(self, value: Any) -> Any:
        low = (1 << self._half) - 1
        left, right = value >> self._half, value & low
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & low)
        return left << self._half | right


def _mix(x: Any) -> Any:
    # The finalizer of splitmix64: every input bit affects every output bit. Arrays of uint64 wrap by themselves.
    x = (x ^ x >> 30) * _MULTIPLIERS[0] & _MASK
    x = (x ^ x >> 27) * _MULTIPLIERS[1] & _MASK
    return x ^ x >> 31


def splitmix_words(key: int, counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 random bits for each counter: splitmix64 (Steele et al. 2014) as a counter-based generator, modulo 2^64."""
    return _mix(np.uint64(key) + counters * np.uint64(_GAMMA))


class Draws:
    """Draws for the example `index` of the kind `name`; each has a name (`of`) and is independent of all others."""

    def __init__(self, name: str, seed: int, index: int) -> None:
        self._name, self._seed, self._index = name, seed, index

    def pick(self, count: int, n: int, of: str) -> list[int]:
        """`count` distinct numbers below `n`, in random order."""
        assert 0 <= count <= n, (count, n)
        order = Permutation(n, self._seed, self._index, f"{self._name}, {of}")
        return [order(place) for place in range(count)]

    def below(self, n: int, of: str) -> int:
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
