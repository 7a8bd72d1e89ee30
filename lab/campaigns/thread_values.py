"""Numbers of 32 bits in all threads of a program at once, for `lab.campaigns.addresses`: what is known of each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Vector = np.ndarray  # uint32, or bool of a predicate: of each thread, or one for all


class Value(NamedTuple):
    """Of a register in each thread; `free`: plus a number that is not known, but the same in all threads."""

    vector: Vector
    free: bool = False


State = dict[str, Value]


def constant(number: int) -> Vector:
    return np.array([number & 0xFFFFFFFF], dtype=np.uint32)


UNKNOWN_FOR_ALL = Value(constant(0), True)


def narrowed(x: Vector) -> Vector:
    return x[:1] if x.size > 1 and (x == x[0]).all() else x


def freed(x: Vector) -> Value:
    return Value(narrowed(x - x[:1]), True)


def same(a: Value | None, b: Value | None) -> Value | None:
    """Either, if both are known to be the same number."""
    if a is None or b is None or a.free or b.free or a.vector.dtype != b.vector.dtype:
        return None
    return a if (a.vector == b.vector).all() else None


def joined(a: Value | None, b: Value | None) -> Value | None:
    """What is known of a number that is one of both, in all threads the same one; a itself, if nothing less."""
    if a is b:
        return a
    if a is None or b is None or a.vector.dtype != b.vector.dtype:
        return None
    if a.vector.dtype == bool:
        if a.vector.size > 1 or b.vector.size > 1:
            return same(a, b)
        return a if a.free or same(a, b) else Value(a.vector, True)
    difference = a.vector - b.vector
    if (difference != difference[0]).any():
        return None
    return a if a.free or not (b.free or difference[0]) else freed(a.vector)


def common(first: State, second: State) -> State:
    """What both agree on."""
    found = {}
    for name, x in first.items():
        if (both := joined(x, second.get(name))) is not None:
            found[name] = both
    return found


def signed(x: Vector) -> Vector:
    return x.view(np.int32)


def shift_left(x: Vector, by: Vector) -> Vector:
    return np.where(by > 31, np.uint32(0), x << (by & 31))


def shift_right(x: Vector, by: Vector) -> Vector:
    return np.where(by > 31, np.uint32(0), x >> (by & 31))


def shift_signed(x: Vector, by: Vector) -> Vector:
    return (signed(x) >> np.minimum(by, 31).astype(np.int32)).view(np.uint32)


def bit_table(a: Vector, b: Vector, c: Vector, table: int) -> Vector:
    """Bit by bit, the bit of `table` that the three bits number."""
    found = constant(0)
    for case in range(8):
        if table >> case & 1:
            found = found | ((a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c))
    return found


def permuted(a: Vector, b: Vector, selector: Vector) -> Vector | None:
    """The bytes of b and a that the four digits of the selector number."""
    if selector.size > 1 or int(selector[0]) & 0x8888:
        return None
    found = constant(0)
    for position in range(4):
        digit = int(selector[0]) >> 4 * position & 7
        found = found | (((b if digit & 4 else a) >> np.uint32(8 * (digit & 3)) & 0xFF) << np.uint32(8 * position))
    return found


def from_first_lane(given: list[Value | None]) -> Value | None:
    x, lane = given[:2]
    if x is None or lane is None or lane.vector.any():
        return None
    return x if x.vector.size == 1 else Value(np.repeat(x.vector[::32], 32), x.free)
