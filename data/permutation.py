"""A random order of n things that needs no memory: each place is computed when it is asked for."""

from __future__ import annotations

import hashlib

_ROUNDS = 8
_MASK = (1 << 64) - 1


class Permutation:
    """A bijection of 0 … n−1 determined by (n, seed, epoch), in constant time and memory.

    A balanced Feistel network is a bijection of the pairs of `half`-bit numbers whatever its round function is: each
    round maps (left, right) to (right, left XOR f(right)), which can be undone. Its domain is the smallest even power
    of two that is >= n. A result >= n is fed in again ("cycle walking"): the cycle through a place < n comes back to a
    place < n at the latest at its start, so restricted to 0 … n−1 it is still a bijection. The domain is less than 4n
    (4 at least), so fewer than 4 turns are expected.

    Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), sections 4 (cycle walking) and 5 (Feistel).
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        assert n > 0, n
        self.n = n
        self._half = max(1, ((n - 1).bit_length() + 1) // 2)
        digest = hashlib.blake2b(f"order of sequences, seed {seed}, epoch {epoch}".encode(), digest_size=8 * _ROUNDS)
        words = digest.digest()
        self._keys = [int.from_bytes(words[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]

    def __call__(self, index: int) -> int:
        """The thing at place `index`."""
        assert 0 <= index < self.n, (index, self.n)
        place = self._encrypt(index)
        while place >= self.n:
            place = self._encrypt(place)
        return place

    def _encrypt(self, value: int) -> int:
        low = (1 << self._half) - 1
        left, right = value >> self._half, value & low
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & low)
        return left << self._half | right


def _mix(x: int) -> int:
    """A 64-bit mixer in which every bit of the input moves every bit of the result (the finalizer of splitmix64)."""
    x &= _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
