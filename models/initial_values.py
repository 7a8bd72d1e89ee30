"""Initial values of a large model by several threads: numbers of one generator, in the order of the parameters.

PyTorch draws on the CPU with one thread, 7 s for a billion values. Its generator, the Mersenne Twister MT19937, is
linear over GF(2): n draws later its words are sums (exclusive or) of words near by, by the coefficients of t^n modulo
the recurrence's characteristic polynomial, so that a thread can begin anywhere in the sequence of numbers (Haramoto et
al., "Efficient jump ahead for F2-linear random number generators", 2008).
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import Parameter

from models.parameters import MATRIX, ParameterRule

# Of a thread's share at least: a jump takes about 25 ms, drawing so many values 300.
_SHARE = 1 << 25
# Torch draws one normal number for each value of a tensor whose size divides by it, and more for others.
_UNIT = 16
# Words of the generator's state, the distance of its recurrence, the bits of a word that come from the word before, and
# the last row of the recurrence's matrix (Matsumoto and Nishimura, "Mersenne Twister", 1998).
_WORDS, _DISTANCE, _LOWER, _ROW = 624, 397, 31, 0x9908B0DF
_DEGREE = 32 * _WORDS - _LOWER
# Where a torch generator's state has `left` and `next`, and its words, as 32 and 64 bits.
_LEFT, _NEXT, _FIRST = 2, 4, 3


def initialise(parameters: Iterable[tuple[str, Parameter, ParameterRule]], deviation: float, seed: int) -> None:
    """Set the parameters by their rules, with numbers of one generator in this order, on torch's number of threads."""
    generator, share = torch.Generator().manual_seed(seed), _Share(deviation)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        drawn = list[Future[None]]()
        for _, parameter, rule in parameters:
            is_known = rule.draws is not None and (rule.init is not MATRIX.init or parameter.numel() % _UNIT == 0)
            share.parts.append((parameter, rule))
            share.count += (rule.draws or 0) * parameter.numel()
            if not is_known:
                share.draw(generator)
            elif share.count >= _SHARE:
                # Another thread draws from here on, and this one goes on behind.
                own = torch.Generator()
                own.set_state(generator.get_state())
                drawn.append(pool.submit(share.draw, own))
                jump(generator, share.count)
            else:
                continue
            share = _Share(deviation)
        share.draw(generator)
        for each in drawn:
            each.result()


@dataclass
class _Share:
    # Parameters in order, and the numbers that they take.
    deviation: float
    parts: list[tuple[Parameter, ParameterRule]] = field(default_factory=list)
    count: int = 0

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        for parameter, rule in self.parts:
            rule.init(parameter, self.deviation, generator)


def jump(generator: torch.Generator, draws: int) -> None:
    """Advance a CPU generator by so many numbers of 32 bits, at least one, in a time that hardly depends on them."""
    state = generator.get_state()
    left, following = (state.view(torch.int32)[place].item() for place in (_LEFT, _NEXT))
    words = state.view(torch.int64)[_FIRST : _FIRST + _WORDS]
    # The recurrence begins with the next block: this one's first may hold the bits of a seed.
    sequence = _words_behind(words.numpy().astype(np.uint32))
    # `next` counts the numbers of a block that are drawn, but for a new seed's, of which none will be.
    behind = draws - (_WORDS - following if left > 1 or following else 0)
    if behind < 1:
        torch.empty(draws).uniform_(generator=generator)
        return
    # The block that begins with the last number drawn: torch's own are never quite new.
    found = np.zeros(_WORDS, np.uint32)
    for place in np.flatnonzero(_bits(_power(behind - 1))).tolist():
        found ^= sequence[place : place + _WORDS]
    words.copy_(torch.from_numpy(found.astype(np.int64)))
    state.view(torch.int32)[_LEFT], state.view(torch.int32)[_NEXT] = _WORDS, 1
    generator.set_state(state)


def _words_behind(block: NDArray[np.uint32]) -> NDArray[np.uint32]:
    # As many words after this block as a jump needs, before they are tempered.
    twister, blocks = np.random.MT19937(0), list[NDArray[np.uint32]]()
    for _ in range(_DEGREE // _WORDS + 2):
        twister.state = {"bit_generator": "MT19937", "state": {"key": block, "pos": _WORDS}}
        twister.random_raw(1, output=False)
        block = twister.state["state"]["key"].copy()
        blocks.append(block)
    return np.concatenate(blocks)


# Polynomials over GF(2) are integers: bit n is the coefficient of t^n.


@cache
def _terms() -> list[int]:
    # Exponents of the characteristic polynomial without the highest: theorem A.1 of Matsumoto and Nishimura.
    word = 1 << _WORDS | 1 << _DISTANCE
    before, powers = word >> 1, [1]
    for _ in range(_LOWER):
        powers.append(_product(powers[-1], before))
    found = _product(word, powers[_LOWER]) ^ (_ROW >> _LOWER)
    for bit in range(_LOWER):
        if _ROW >> bit & 1:
            found ^= _product(word, powers[_LOWER - 1 - bit])
    return np.flatnonzero(_bits(found))[:-1].tolist()


def _product(a: int, b: int) -> int:
    # Of `a` with few terms.
    found = 0
    while b:
        found ^= a << ((b & -b).bit_length() - 1)
        b &= b - 1
    return found


@cache
def _power(exponent: int) -> int:
    # t^exponent modulo the characteristic polynomial.
    found = 1
    for digit in f"{exponent:b}":
        spread = np.zeros(2 * (bits := _bits(found)).size, np.uint8)
        spread[::2] = bits
        found = int.from_bytes(np.packbits(spread, bitorder="little").tobytes(), "little") << int(digit)
        while high := found >> _DEGREE:
            found &= (1 << _DEGREE) - 1
            for term in _terms():
                found ^= high << term
    return found


def _bits(polynomial: int) -> NDArray[np.uint8]:
    size = polynomial.bit_length() // 8 + 1
    return np.unpackbits(np.frombuffer(polynomial.to_bytes(size, "little"), np.uint8), bitorder="little")
