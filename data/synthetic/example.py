"""One example of a task: pieces inserted into an endless filler; any slice can be generated independently."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


class Filler(Protocol):
    """Tokens between the pieces."""

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of it, [stop − start] int64."""


class Piece(NamedTuple):
    """Tokens at a position of an example."""

    start: int
    tokens: Tokens


class Answer(NamedTuple):
    """Tokens [start, stop) of an example to be predicted, right or wrong as a whole."""

    start: int
    stop: int


@dataclass(frozen=True)
class Example:
    """A sequence of `length` tokens, plus one: the label of the last."""

    length: int
    filler: Filler
    pieces: Sequence[Piece]  # sorted by position, without overlap
    answers: Sequence[Answer]  # sorted by position

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop), [stop − start] int64, with 0 ≤ start ≤ stop ≤ length + 1; generates only these."""
        assert 0 <= start <= stop <= self.length + 1, (start, stop, self.length)
        parts, place = [], start
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        for number in range(first, len(self.pieces)):
            piece = self.pieces[number]
            if piece.start >= stop:
                break
            end = piece.start + len(piece.tokens)
            if end <= place:
                continue
            if place < piece.start:
                parts.append(self._fill(number, place, piece.start))
                place = piece.start
            parts.append(piece.tokens[place - piece.start : min(stop, end) - piece.start])
            place = min(stop, end)
        if place < stop:
            parts.append(self._fill(bisect.bisect_left(self._starts, stop), place, stop))
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def counts(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Mask of the counted labels of tokens [start, stop), [stop − start]; a token's label is the next token."""
        counts = np.zeros(stop - start, dtype=np.bool_)
        for answer in self.answers:
            counts[max(0, answer.start - 1 - start) : max(0, answer.stop - 1 - start)] = True
        return counts

    @property
    def num_labels(self) -> int:
        return sum(answer.stop - answer.start for answer in self.answers)

    @cached_property
    def _starts(self) -> list[int]:
        return [piece.start for piece in self.pieces]

    @cached_property
    def _before(self) -> list[int]:
        # Total tokens of the pieces before each piece, and of all pieces.
        return [0, *np.cumsum([len(piece.tokens) for piece in self.pieces]).tolist()]

    def _fill(self, number: int, start: int, stop: int) -> Tokens:
        # Positions of the example, between pieces `number` − 1 and `number`.
        return self.filler.read(start - self._before[number], stop - self._before[number])
