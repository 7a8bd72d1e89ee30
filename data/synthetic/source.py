"""A synthetic task as a training source: an endless stream of examples, whose only state is the number consumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from data.config import DataConfig, Shuffle
from data.loader.batches import DataSplit, OpenedData, Reader, SequenceSource, Shard
from data.synthetic import SyntheticConfig
from data.synthetic.tasks import Example, ExampleMaker, draws_for, make_task
from data.tokenizer import load_tokenizer


class ExampleReader(Reader):
    """Generates one sequence-parallel rank's shards of examples, each from its number; only labels of answers count.

    Args:
        example: number → the example.
        count: of the examples; None: endless.
    """

    has_labels = True

    def __init__(
        self, example: Callable[[int], Example], count: int | None, split: DataSplit, description: str = "examples"
    ) -> None:
        self._example, self.split, self.description = example, split, description
        # An endless stream has a number for sums over sources only.
        self.is_endless, self.num_sequences = count is None, 1 << 40 if count is None else count

    def shard(self, epoch: int, sequence: int, segment: int) -> Shard:
        """This rank's shard, padded if the split's sequences are longer; generates only its tokens."""
        example, (start, stop) = self._example(sequence), self.split.range(segment)
        end = example.length + 1
        tokens = example.read(min(start, end), min(stop + 1, end))
        padded = np.pad(tokens, (0, stop - start + 1 - len(tokens)))
        return Shard(padded, example.counts(start, stop))

    def num_labels(self, epoch: int, sequence: int) -> int:
        return self._example(sequence).num_labels


@dataclass(frozen=True)
class SyntheticSource(SequenceSource):
    """Examples of a task, different ones for each `purpose`, "training" or "validation"."""

    config: SyntheticConfig
    task: ExampleMaker
    purpose: str

    @property
    def description(self) -> str:
        return f"the synthetic task {self.config.task.value}"

    def reader(
        self, split: DataSplit, shuffle: Shuffle = Shuffle.none, seed: int = 0, number: int = 0
    ) -> ExampleReader:
        """A reader of an endless stream. Raises ConfigError if sequences are too short for the task."""
        self.task.check(split.seq_len, "data.seq_len")

        # Cached: each example of a step is used for its tokens and for its number of labels.
        @lru_cache(maxsize=64)
        def example(sequence: int) -> Example:
            return self.task.example(split.seq_len, draws_for(self.config, self.purpose, seed, sequence))

        return ExampleReader(example, None, split, self.description)

    def describe(self, shuffle: Shuffle, seq_len: int, num_sequences: float) -> str:
        return f"{self.description}: {num_sequences:,.0f} different sequences of {seq_len:,} tokens"


@dataclass(frozen=True)
class OpenedSynthetic(OpenedData):
    """A task, with different examples for training and validation."""

    train: list[SyntheticSource]
    validation: list[SyntheticSource]

    def identity(self) -> dict[str, Any]:
        config = self.train[0].config
        settings = {
            "task": config.task.value,
            "facts": config.num_facts,
            "queries": config.num_queries,
            "alphabet": config.alphabet,
            "keys": config.num_keys,
            "digits": config.digits,
        }
        own = {f"data.synthetic.{name}": value for name, value in settings.items()}
        return {**own, "data.tokenizer": load_tokenizer(config.tokenizer).info}

    def tokenizer_files(self) -> Path | None:
        folder = Path(self.train[0].config.tokenizer)
        return folder if folder.is_dir() else None


def open_synthetic(config: DataConfig, *, vocab_size: int, validate: bool) -> OpenedSynthetic:
    """Open the task of a configuration.

    Raises:
        ConfigError: sequences are too short for the task, or its vocabulary exceeds the model's.
        DataError: the tokenizer cannot be loaded.
    """
    settings = config.synthetic
    task = make_task(settings, load_tokenizer(settings.tokenizer), vocab_size)
    task.check(config.seq_len, "data.seq_len")
    held_out = [SyntheticSource(settings, task, "validation")] if validate else []
    return OpenedSynthetic([SyntheticSource(settings, task, "training")], held_out, [])
