"""Multi-query associative recall: key-value pairs in the first half of a sequence, queries in the second half.

    … key value … key value … | … key → value … key → value …

So with an even number of ranks per sequence, pairs and queries are always on different ranks.
"""

from __future__ import annotations

import numpy as np

from data.synthetic import FIRST_SYMBOL, NUM_SYMBOLS, SyntheticConfig
from data.synthetic.draws import Draws
from data.synthetic.example import Answer, Example, Piece, Tokens
from zeco_train.errors import ConfigError


class Noise:
    """Random symbols that are neither keys nor values."""

    def __init__(self, draws: Draws, first: int) -> None:
        self._draws, self._first = draws, first

    def read(self, start: int, stop: int) -> Tokens:
        """See `Filler`."""
        end = FIRST_SYMBOL + NUM_SYMBOLS
        return self._first + self._draws.many_below(end - self._first, start, stop, "noise")


class Recall:
    """Makes examples of `recall`, see `data.synthetic.tasks.ExampleMaker`.

    The keys of an example are distinct, values may repeat. A query is a key, and the label of that token is its value;
    with more queries than pairs, keys repeat. Without a depth the pairs are scattered over the first half; with a depth
    they are contiguous.
    """

    vocab_size = FIRST_SYMBOL + NUM_SYMBOLS

    def __init__(self, config: SyntheticConfig) -> None:
        self._pairs, self._queries = config.num_facts, config.num_queries
        self._keys, self._alphabet = config.num_keys, config.alphabet
        # Accuracy of a uniform guess among all values.
        self.chance = 1 / config.alphabet

    def check(self, length: int, field: str) -> None:
        """See `ExampleMaker`."""
        # Each half holds whole pairs only; the second has one more token, the label of the last.
        shortest = max(4 * self._pairs, 4 * self._queries)
        if length < shortest:
            told = f"{self._pairs} pairs and {self._queries} queries"
            raise ConfigError(field, length, f"too short for {told} of recall; least legal value: {shortest}")

    def example(self, length: int, draws: Draws, depth: float | None = None) -> Example:
        """See `ExampleMaker`."""
        half = length // 2
        if depth is None:
            places = [2 * slot for slot in sorted(draws.pick(self._pairs, half // 2, "pairs"))]
        else:
            first = round(depth * (half - 2 * self._pairs))
            places = list(range(first, first + 2 * self._pairs, 2))
        keys = draws.pick(self._pairs, self._keys, "keys")
        values = [draws.below(self._alphabet, f"value {number}") for number in range(self._pairs)]
        questions = sorted(draws.pick(self._queries, (length + 1 - half) // 2, "questions"))
        asked = draws.pick(self._pairs, self._pairs, "asked")
        pieces = [self._piece(place, key, value) for place, key, value in zip(places, keys, values, strict=True)]
        answers = []
        for number, slot in enumerate(questions):
            start, pair = half + 2 * slot, asked[number % self._pairs]
            pieces.append(self._piece(start, keys[pair], values[pair]))
            answers.append(Answer(start + 1, start + 2))
        return Example(length, Noise(draws, FIRST_SYMBOL + 2 * self._alphabet), pieces, answers)

    def _piece(self, place: int, key: int, value: int) -> Piece:
        return Piece(place, np.array([FIRST_SYMBOL + key, FIRST_SYMBOL + self._alphabet + value]))
