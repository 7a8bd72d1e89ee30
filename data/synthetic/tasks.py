"""Makes synthetic tasks: pure functions of (seed, index, length, depth). Recall is here, tasks of text in `texts`."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from data.randomness import Draws
from data.synthetic import FIRST_SYMBOL, NUM_SYMBOLS, SyntheticConfig
from data.synthetic.example import Answer, Example, Piece, Tokens
from data.synthetic.texts import Texts
from data.tokenizer import Tokenizer
from zeco_train.errors import ConfigError


class ExampleMaker(Protocol):
    """Interface of a task.

    Attributes:
        vocab_size: every id is below it.
        chance: accuracy of a uniform guess among all answers of the right form.
    """

    vocab_size: int
    chance: float

    def check(self, length: int, field: str) -> None:
        """Raise `ConfigError`, which names `field`, if sequences are too short for the task."""

    def example(self, length: int, draws: Draws, depth: float | None = None) -> Example:
        """Generate an example.

        Args:
            length: tokens of the sequence; must pass `check`.
            draws: source of randomness.
            depth: from 0 to 1: relative position, in the part before the questions, of the (first) fact asked about;
                None for a random position.
        """


class Noise:
    """Random symbols that are neither keys nor values."""

    def __init__(self, draws: Draws, first: int) -> None:
        self._draws, self._first = draws, first

    def read(self, start: int, stop: int) -> Tokens:
        """See `Filler`."""
        end = FIRST_SYMBOL + NUM_SYMBOLS
        return self._first + self._draws.many_below(end - self._first, start, stop, "noise")


class Recall:
    """Makes examples of `recall`: multi-query associative recall, with all pairs before all queries.

        … key value … key value … | … key → value … key → value …

    So with an even number of ranks per sequence, pairs and queries are always on different ranks.

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


def make_task(config: SyntheticConfig, tokenizer: Tokenizer) -> ExampleMaker:
    """The task of a valid configuration; `tokenizer` is used by text tasks only."""
    return Texts(config, tokenizer) if config.task.is_text else Recall(config)


def check_task_vocabulary(task: ExampleMaker, vocab_size: int) -> None:
    """Raise `ConfigError` if the task's vocabulary exceeds the model's."""
    if task.vocab_size > vocab_size:
        allowed = f"the task has {task.vocab_size} ids; allowed: {task.vocab_size} or more"
        raise ConfigError("model.vocab_size", vocab_size, allowed)


def draws_for(config: SyntheticConfig, purpose: str, seed: int, index: int) -> Draws:
    """The draws of example `index`; different for each purpose, such as training and validation."""
    return Draws(f"{purpose}, {config.task.value}", seed, index)
