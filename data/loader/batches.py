"""Interface between sequence sources and the loader: one rank's shards of segments, and batches of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.config import Shuffle, check_seq_len
from data.store import TokenStore
from zeco_train.ops.position import SequencePosition, even_bounds
from zeco_train.system.numbers import IGNORE_INDEX

# Uses of token stores, see `OpenedData.stores`.
TRAINING, VALIDATION = "training", "validation"


@dataclass(frozen=True)
class Batch:
    """One rank's part of a segment of a micro-batch."""

    input_ids: Tensor  # [B, T] int64
    # [B, T] int64: labels[b, t] is the token after input_ids[b, t], also across shards, segments, sequences, and
    # documents; of a masked-token task (data.loader.masking) the original token at t. −100 for labels excluded from the
    # loss.
    labels: Tensor
    position: SequencePosition  # of the tokens in their sequences, with documents for `reset_state_at_document`
    # Numbers of the sequences within their epochs; those of a second store continue after those of the first. Empty for
    # padding.
    sequence_ids: list[int]
    is_padding: bool = False  # in validation only: run for matching collectives, and excluded from the loss
    step_labels: int | None = None  # number of counted labels in the step's global batch; None if every token has one


@dataclass(frozen=True)
class DataSplit:
    """This rank's part of each step's sequences.

    All shards of all segments of a sequence are equally long, or differ by one token. Raises ConfigError for fewer
    tokens than shards.
    """

    seq_len: int  # over all ranks and segments
    micro_batch: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    sp_rank: int = 0
    sp_size: int = 1
    reset_state_at_document: bool = False
    segments: int = 1
    labels_across_documents: bool = True  # whether the last tokens of documents have labels

    def __post_init__(self) -> None:
        assert 0 <= self.dp_rank < self.dp_size, (self.dp_rank, self.dp_size)
        assert 0 <= self.sp_rank < self.sp_size, (self.sp_rank, self.sp_size)
        assert self.segments >= 1, self.segments
        check_seq_len(self.seq_len, self.sp_size, segments=self.segments)

    def range(self, segment: int) -> tuple[int, int]:
        """Positions of this rank's first token of a segment, and after its last."""
        start, stop = self._bounds(segment, self.sp_rank, self.sp_rank + 1)
        return start, stop

    def position(self, segment: int, documents: Sequence[Tensor] | None = None) -> SequencePosition:
        return SequencePosition(
            self._bounds(segment, 0, self.sp_size),
            self.sp_rank,
            seq_len=self.seq_len,
            documents=documents,
            segment=segment,
            num_segments=self.segments,
        )

    def _bounds(self, segment: int, rank: int, stop: int) -> list[int]:
        assert 0 <= segment < self.segments, (segment, self.segments)
        first = segment * self.sp_size
        return even_bounds(self.seq_len, self.segments * self.sp_size, first + rank, first + stop)


class Shard(NamedTuple):
    """One rank's part of a segment of a sequence."""

    tokens: NDArray[np.int64]  # [T + 1], including the label of the last
    counts: NDArray[np.bool_] | None = None  # [T], which labels count; None: all
    labels: NDArray[np.int64] | None = None  # [T]; None: the next tokens
    documents: Tensor | None = None  # [documents + 1] borders of the whole sequence's; None: states are not reset


class Reader(ABC):
    """Reads one sequence-parallel rank's shards of a source's sequences."""

    split: DataSplit
    num_sequences: int  # of an epoch
    description: str  # the source in messages
    has_labels = False  # some labels are masked
    is_endless = False  # sequences never repeat; `num_sequences` is only a large number
    tokens_behind = 0  # unused tokens of an epoch, after the last whole sequence and its label

    def find(self, index: int) -> tuple[int, int]:
        """Epoch and number of the `index`-th sequence in this source's endless stream."""
        return divmod(index, self.num_sequences)

    @abstractmethod
    def shard(self, epoch: int, sequence: int, segment: int) -> Shard:
        """This rank's shard of a segment of a sequence. Raises DataError if a store has changed or cannot be read."""

    def num_labels(self, epoch: int, sequence: int) -> int:
        """Number of counted labels in a whole sequence."""
        return self.split.seq_len

    def read(self, sequence_ids: list[int], segment: int = 0) -> Batch:
        """This rank's batch of a segment of sequences of the first epoch."""
        return self.batch([self.shard(0, i, segment) for i in sequence_ids], sequence_ids, segment)

    def batch(
        self, shards: Sequence[Shard], sequence_ids: list[int], segment: int, step_labels: int | None = None
    ) -> Batch:
        """Stack shards, possibly of several sources, into a batch."""
        tokens = torch.from_numpy(np.stack([shard.tokens for shard in shards]))
        # Copy even a single row: masked labels are overwritten.
        labels = tokens[:, 1:].clone()
        for row, shard in zip(labels, shards, strict=True):
            if shard.labels is not None:
                row.copy_(torch.from_numpy(shard.labels))
            if shard.counts is not None:
                row[torch.from_numpy(~shard.counts)] = IGNORE_INDEX
        documents = [shard.documents for shard in shards if shard.documents is not None]
        return Batch(
            input_ids=tokens[:, :-1].contiguous(),
            labels=labels,
            position=self.split.position(segment, documents or None),
            sequence_ids=sequence_ids,
            step_labels=step_labels,
        )


@dataclass(frozen=True)
class SequenceSource(ABC):
    """Source of sequences."""

    weight: int = field(default=1, kw_only=True)  # of its sequences, relative to the run's other sources
    name: str = field(default="", kw_only=True)  # label of its metrics; empty for a single source

    @abstractmethod
    def reader(self, split: DataSplit, shuffle: Shuffle = Shuffle.none, seed: int = 0, number: int = 0) -> Reader:
        """A reader of this rank's part.

        `seed` and `number`, the source's in a mixture, determine the order of the sequences and whatever is random in
        them.
        """

    @abstractmethod
    def describe(self, shuffle: Shuffle, seq_len: int, num_sequences: float) -> str:
        """One-line summary of the data read by a run of `num_sequences` sequences."""


@dataclass(frozen=True)
class OpenedData(ABC):
    """Training and validation sources of a run."""

    train: Sequence[SequenceSource]
    validation: Sequence[SequenceSource]  # those that have at least one sequence
    unvalidated: list[str]  # names of the training sources without one

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The properties of the sources that determine the token order."""

    @abstractmethod
    def tokenizer_files(self) -> Path | None:
        """The folder of the tokenizer's files, if it has any and they exist."""

    def stores(self) -> dict[str, TokenStore]:
        """The token stores in use, keyed by TRAINING or VALIDATION and number: "training store 0"."""
        return {}
