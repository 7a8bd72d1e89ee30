"""From the configuration of a synthetic task to its examples: pure functions of (seed, index, length, depth)."""

from __future__ import annotations

from typing import Protocol

from data.synthetic.config import SyntheticConfig
from data.synthetic.draws import Draws
from data.synthetic.example import Example
from data.synthetic.symbols import Recall
from data.synthetic.texts import Texts
from data.tokenizer import Tokenizer
from zeco_train.errors import ConfigError


class ExampleMaker(Protocol):
    """What a task is made of.

    Attributes:
        vocab_size: every id is below it.
        chance: how often a guess among all answers of the right form is right.
    """

    vocab_size: int
    chance: float

    def check(self, length: int, field: str) -> None:
        """Raise `ConfigError`, which names `field`, for sequences that are too short for the task."""

    def example(self, length: int, draws: Draws, depth: float | None = None) -> Example:
        """An example.

        Args:
            length: tokens of the sequence, one that `check` allows.
            draws: what is random of it.
            depth: from 0 to 1: where in what comes before the questions stands what is asked for, or the first thing of
                it; None for a random place.
        """


def make_task(config: SyntheticConfig, tokenizer: Tokenizer) -> ExampleMaker:
    """The task of a valid configuration; a tokenizer is for texts only."""
    return Texts(config, tokenizer) if config.task.is_text else Recall(config)


def check_task_vocabulary(task: ExampleMaker, vocab_size: int) -> None:
    """Raise `ConfigError` where the task has ids that the model has no embedding for."""
    if task.vocab_size > vocab_size:
        allowed = f"the task has {task.vocab_size} ids; allowed: {task.vocab_size} or more"
        raise ConfigError("model.vocab_size", vocab_size, allowed)


def draws_for(config: SyntheticConfig, purpose: str, seed: int, index: int) -> Draws:
    """The draws of example `index`; those of other purposes, as training and evaluation, are others."""
    return Draws(f"{purpose}, {config.task.value}", seed, index)
