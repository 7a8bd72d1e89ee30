"""Creates synthetic tasks from their configuration; examples are pure functions of (seed, index, length, depth)."""

from __future__ import annotations

from typing import Protocol

from data.synthetic import SyntheticConfig
from data.synthetic.draws import Draws
from data.synthetic.example import Example
from data.synthetic.symbols import Recall
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
