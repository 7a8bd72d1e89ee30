"""A synthetic task as a training source: an endless stream of examples, whose only state is the number consumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from data.config import DataConfig, Shuffle
from data.loader.batches import DataSplit, OpenedData, Reader, Shard
from data.synthetic import SyntheticConfig
from data.synthetic.example import Example
from data.synthetic.tasks import ExampleMaker, check_task_vocabulary, draws_for, make_task
from data.tokenizer import load_tokenizer

# Examples never repeat; the number exists for sums over sources.
_ENDLESS = 1 << 40


class ExampleReader(Reader):
    """Generates one sequence-parallel rank's shards of examples, each from its number; only labels of answers count."""

    has_labels = True

    def __init__(
        self, example: Callable[[int], Example], count: int, split: DataSplit, description: str = "examples"
    ) -> None:
        self._example, self.num_sequences, self.split, self.description = example, count, split, description

    def shard(self, epoch: int, sequence: int, segment: int) -> Shard:
        """See `Reader`. Padded if the split's sequences are longer; generates only the shard's tokens."""
        example, (start, stop) = self._example(sequence), self.split.range(segment)
        end = example.length + 1
        tokens = example.read(min(start, end), min(stop + 1, end))
        padded = np.pad(tokens, (0, stop - start + 1 - len(tokens)))
        return Shard(padded, example.counts(start, stop))

    def num_labels(self, epoch: int, sequence: int) -> int:
        """See `Reader`."""
        return self._example(sequence).num_labels


class SyntheticReader(ExampleReader):
    """Generates one sequence-parallel rank's shards of an endless stream of a task's examples.

    Raises:
        ConfigError: sequences too short for the task.
    """

    is_endless = True

    def __init__(self, source: SyntheticSource, split: DataSplit, seed: int) -> None:
        source.task.check(split.seq_len, "data.seq_len")
        self._source, self._seed = source, seed
        # Cached: each example of a step is used for its tokens and for its number of labels.
        super().__init__(lru_cache(maxsize=64)(self._make), _ENDLESS, split, source.description)

    def _make(self, sequence: int) -> Example:
        draws = draws_for(self._source.config, self._source.purpose, self._seed, sequence)
        return self._source.task.example(self.split.seq_len, draws)


@dataclass(frozen=True)
class SyntheticSource:
    """A task, see `data.loader.batches.SequenceSource`.

    Attributes:
        config: of the task.
        task: generates its examples.
        purpose: "training" or "validation"; their examples differ.
    """

    config: SyntheticConfig
    task: ExampleMaker
    purpose: str
    weight: int = 1
    name: str = ""

    @property
    def description(self) -> str:
        """Name in messages."""
        return f"the synthetic task {self.config.task.value}"

    def reader(
        self, split: DataSplit, *, shuffle: Shuffle = Shuffle.none, seed: int = 0, number: int = 0
    ) -> SyntheticReader:
        """See `data.loader.batches.SequenceSource`."""
        return SyntheticReader(self, split, seed)

    def describe(self, shuffle: Shuffle, seq_len: int, num_sequences: float) -> str:
        """See `data.loader.batches.SequenceSource`."""
        return f"{self.description}: {num_sequences:,.0f} different sequences of {seq_len:,} tokens"


@dataclass(frozen=True)
class OpenedSynthetic(OpenedData):
    """A task, with different examples for training and validation."""

    train: list[SyntheticSource]
    validation: list[SyntheticSource]

    def identity(self) -> dict[str, Any]:
        """See `OpenedData`."""
        config = self.train[0].config
        return {
            "data.synthetic.task": config.task.value,
            "data.synthetic.facts": config.num_facts,
            "data.synthetic.queries": config.num_queries,
            "data.synthetic.alphabet": config.alphabet,
            "data.synthetic.keys": config.num_keys,
            "data.synthetic.digits": config.digits,
            "data.tokenizer": load_tokenizer(config.tokenizer).info,
        }

    def tokenizer_files(self) -> Path | None:
        """See `OpenedData`."""
        folder = Path(self.train[0].config.tokenizer)
        return folder if folder.is_dir() else None


def open_synthetic(config: DataConfig, *, vocab_size: int, validate: bool) -> OpenedSynthetic:
    """Open the task of a configuration.

    Raises:
        ConfigError: sequences are too short for the task, or its vocabulary exceeds the model's.
        DataError: the tokenizer cannot be loaded.
    """
    settings = config.synthetic
    task = make_task(settings, load_tokenizer(settings.tokenizer))
    check_task_vocabulary(task, vocab_size)
    task.check(config.seq_len, "data.seq_len")
    held_out = [SyntheticSource(settings, task, "validation")] if validate else []
    return OpenedSynthetic([SyntheticSource(settings, task, "training")], held_out, [])
