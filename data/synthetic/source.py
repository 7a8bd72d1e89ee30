"""A synthetic task as what a run trains on: an endless stream of examples, whose only state is how many were taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from data.config import DataConfig, Shuffle
from data.reader import DataSplit, OpenedData, Reader, Shard
from data.synthetic.config import SyntheticConfig
from data.synthetic.example import Example
from data.synthetic.tasks import ExampleMaker, check_task_vocabulary, draws_for, make_task
from data.tokenizer import load_tokenizer

# Nothing ever comes again; the number is there for sums over sources.
_ENDLESS = 1 << 40


def shard_of(example: Example, split: DataSplit, segment: int) -> Shard:
    """One rank's part of a segment of an example, padded where the split's sequences are longer; tokens outside of it
    are not made.
    """
    offset = split.offset(segment)
    stop, end = offset + split.length, example.length + 1
    tokens = example.read(min(offset, end), min(stop + 1, end))
    padded = np.pad(tokens, (0, split.length + 1 - len(tokens)))
    return Shard(padded, None, offset, example.counts(offset, stop))


class ExampleReader(Reader):
    """Makes one sequence-parallel rank's slices of some examples."""

    has_labels = True

    def __init__(self, examples: Sequence[Example], split: DataSplit) -> None:
        self._examples, self.split = examples, split
        self.num_sequences, self.description = len(examples), "examples"

    def find(self, index: int) -> tuple[int, int]:
        """See `Reader`."""
        return divmod(index, self.num_sequences)

    def shard(self, epoch: int, sequence: int, segment: int) -> Shard:
        """See `Reader`."""
        del epoch
        return shard_of(self._examples[sequence], self.split, segment)

    def num_labels(self, epoch: int, sequence: int) -> int:
        """See `Reader`."""
        del epoch
        return self._examples[sequence].num_labels


class SyntheticReader(Reader):
    """Makes one sequence-parallel rank's slices of the examples of a task; only the labels of answers count.

    Raises:
        ConfigError: sequences too short for the task.
    """

    has_labels = True
    is_endless = True

    def __init__(self, source: SyntheticSource, split: DataSplit, seed: int) -> None:
        source.task.check(split.seq_len, "data.seq_len")
        self._source, self.split, self._seed = source, split, seed
        self.num_sequences, self.tokens_behind, self.description = _ENDLESS, 0, source.description
        # A step's examples are asked for more than once: for their tokens, and for how many labels they have.
        self._example = lru_cache(maxsize=64)(self._make)

    def find(self, index: int) -> tuple[int, int]:
        """See `Reader`."""
        return divmod(index, self.num_sequences)

    def shard(self, epoch: int, sequence: int, segment: int) -> Shard:
        """See `Reader`."""
        del epoch
        return shard_of(self._example(sequence), self.split, segment)

    def num_labels(self, epoch: int, sequence: int) -> int:
        """See `Reader`."""
        del epoch
        return self._example(sequence).num_labels

    def _make(self, sequence: int) -> Example:
        draws = draws_for(self._source.config, self._source.purpose, self._seed, sequence)
        return self._source.task.example(self.split.seq_len, draws)


@dataclass(frozen=True)
class SyntheticSource:
    """A task, see `data.reader.SequenceSource`.

    Attributes:
        config: of the task.
        task: makes its examples.
        purpose: "training" or "validation": their examples differ.
    """

    config: SyntheticConfig
    task: ExampleMaker
    purpose: str
    weight: int = 1
    name: str = ""

    @property
    def description(self) -> str:
        """What messages call it."""
        return f"the synthetic task {self.config.task.value}"

    def reader(
        self, split: DataSplit, *, shuffle: Shuffle = Shuffle.none, seed: int = 0, number: int = 0
    ) -> SyntheticReader:
        """See `data.reader.SequenceSource`."""
        del shuffle, number
        return SyntheticReader(self, split, seed)

    def describe(self, shuffle: Shuffle, seq_len: int, num_sequences: float) -> str:
        """See `data.reader.SequenceSource`."""
        del shuffle
        return f"{self.description}: {num_sequences:,.0f} different sequences of {seq_len:,} tokens"


@dataclass(frozen=True)
class OpenedSynthetic(OpenedData):
    """A task to train on, and other examples of it to validate on."""

    train: list[SyntheticSource]
    validation: list[SyntheticSource]

    def identity(self) -> dict[str, Any]:
        """See `OpenedData`."""
        config = self.train[0].config
        values = {
            name: getattr(config, name) for name in ("num_facts", "num_queries", "alphabet", "num_keys", "digits")
        }
        names = {"num_facts": "facts", "num_queries": "queries", "num_keys": "keys"}
        settings = {f"data.synthetic.{names.get(name, name)}": value for name, value in values.items()}
        tokenizer = load_tokenizer(config.tokenizer).info
        return {"data.synthetic.task": config.task.value, **settings, "data.tokenizer": tokenizer}

    def tokenizer_files(self) -> Path | None:
        """See `OpenedData`."""
        folder = Path(self.train[0].config.tokenizer)
        return folder if folder.is_dir() else None


def open_synthetic(config: DataConfig, *, vocab_size: int, validate: bool) -> OpenedSynthetic:
    """The task of a configuration.

    Raises:
        ConfigError: sequences too short for the task, or a vocabulary beyond the model's.
        DataError: a tokenizer that cannot be loaded.
    """
    settings = config.synthetic
    task = make_task(settings, load_tokenizer(settings.tokenizer))
    check_task_vocabulary(task, vocab_size)
    task.check(config.seq_len, "data.seq_len")
    held_out = [SyntheticSource(settings, task, "validation")] if validate else []
    return OpenedSynthetic([SyntheticSource(settings, task, "training")], held_out, [])
