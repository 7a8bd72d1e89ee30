"""What one rank reads of sequences, whatever they come from: shards of segments, and batches of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.config import Shuffle, check_reset, check_seq_len
from data.store import TokenStore
from zeco_train.system.labels import IGNORE_INDEX

# The uses of token stores, see `OpenedData.stores`.
TRAINING, VALIDATION = "training", "validation"


@dataclass(frozen=True)
class Batch:
    """One rank's part of a segment of a micro-batch; L = seq_len / (segments · sp_size).

    Attributes:
        input_ids: [B, L] int64.
        labels: [B, L] int64: labels[b, t] is the token after input_ids[b, t], also across shards, segments, sequences;
            −100 where it does not count.
        cu_seqlens: [pieces + 1] int64 from 0 to L, the documents' pieces on this shard; None without
            `reset_state_at_document`.
        before: tokens of the first piece's document (without documents: of the sequence) on earlier shards, which for
            the first rank are those of the segments before.
        offset: position of the first token in the whole sequence.
        sequence_ids: which sequences these are, within their epochs; those of a second store are counted on from those
            of the first. Empty for padding.
        is_padding: in validation only: run it so that all ranks do the same, and count nothing of it.
        segment: which segment of the sequences, from 0.
        step_labels: labels of the step's global batch that count; None where every token has one.
    """

    input_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor | None
    before: int
    offset: int
    sequence_ids: list[int]
    is_padding: bool = False
    segment: int = 0
    step_labels: int | None = None


@dataclass(frozen=True)
class DataSplit:
    """Which part of every step's sequences is this rank's.

    Attributes:
        seq_len: tokens of a whole sequence, over the ranks that share it and over its segments.
        micro_batch: sequences of a data-parallel rank in one forward and backward.
        dp_rank, dp_size: which of how many parts of a step's sequences.
        sp_rank, sp_size: which of how many equal shards of a segment.
        reset_state_at_document: give the borders of documents; then one sequence at a time.
        segments: equal parts in time of a sequence; 1 where the whole sequence is one.

    Raises:
        ConfigError: a `seq_len` that does not divide, or a `micro_batch` that documents do not allow.
    """

    seq_len: int
    micro_batch: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    sp_rank: int = 0
    sp_size: int = 1
    reset_state_at_document: bool = False
    segments: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.dp_rank < self.dp_size, (self.dp_rank, self.dp_size)
        assert 0 <= self.sp_rank < self.sp_size, (self.sp_rank, self.sp_size)
        assert self.segments >= 1, self.segments
        check_seq_len(self.seq_len, self.sp_size, segments=self.segments)
        check_reset(self.reset_state_at_document, self.micro_batch)

    @property
    def length(self) -> int:
        """Tokens of this rank's shard of a segment."""
        return self.seq_len // (self.segments * self.sp_size)

    def offset(self, segment: int) -> int:
        """Position in the sequence of the first token of this rank's shard of a segment."""
        assert 0 <= segment < self.segments, (segment, self.segments)
        return (segment * self.sp_size + self.sp_rank) * self.length


class Shard(NamedTuple):
    """One rank's part of a segment of a sequence, see `Batch`.

    `tokens` is [L + 1], with the label of the last; `counts` is [L] bool, the labels that count, None for all.
    """

    tokens: NDArray[np.int64]
    cu_seqlens: Tensor | None
    before: int
    counts: NDArray[np.bool_] | None = None


class Reader(ABC):
    """Reads one sequence-parallel rank's slices of the sequences of a source.

    Attributes:
        split: which slices.
        num_sequences: of an epoch.
        description: what messages call the source.
        has_labels: some tokens' labels do not count.
        is_endless: sequences never come again; `num_sequences` is only a large number.
        tokens_behind: of an epoch, behind the last whole sequence and its label, which no sequence has.
    """

    split: DataSplit
    num_sequences: int
    description: str
    has_labels = False
    is_endless = False
    tokens_behind = 0

    def find(self, index: int) -> tuple[int, int]:
        """Epoch and sequence of the `index`-th of the endless stream of this source's sequences."""
        return divmod(index, self.num_sequences)

    @abstractmethod
    def shard(self, epoch: int, sequence: int, segment: int) -> Shard:
        """This rank's tokens of a segment of a sequence, and one more: the label of the last.

        Raises:
            DataError: a store has changed or cannot be read.
        """

    def num_labels(self, epoch: int, sequence: int) -> int:
        """How many labels of a whole sequence count."""
        return self.split.seq_len

    def read(self, sequence_ids: list[int], segment: int = 0) -> Batch:
        """This rank's part of a segment of sequences of the first epoch."""
        return self.batch([self.shard(0, i, segment) for i in sequence_ids], sequence_ids, segment)

    def batch(
        self, shards: Sequence[Shard], sequence_ids: list[int], segment: int, step_labels: int | None = None
    ) -> Batch:
        """The batch of some shards, which may be of several sources."""
        assert not self.split.reset_state_at_document or len(shards) == 1, sequence_ids
        tokens = torch.from_numpy(np.stack([shard.tokens for shard in shards]))
        # A copy, also of a single row: labels that do not count are written over.
        labels = tokens[:, 1:].clone()
        for row, shard in zip(labels, shards, strict=True):
            if shard.counts is not None:
                row[torch.from_numpy(~shard.counts)] = IGNORE_INDEX
        return Batch(
            input_ids=tokens[:, :-1].contiguous(),
            labels=labels,
            cu_seqlens=shards[0].cu_seqlens,
            before=shards[0].before,
            offset=self.split.offset(segment),
            sequence_ids=sequence_ids,
            segment=segment,
            step_labels=step_labels,
        )


class SequenceSource(Protocol):
    """What sequences come from.

    Attributes:
        weight: of its sequences, relative to the weights of the run's other sources.
        name: what figures about it are called; empty where it is the only one.
    """

    @property
    def weight(self) -> int: ...

    @property
    def name(self) -> str: ...

    def reader(self, split: DataSplit, *, shuffle: Shuffle = Shuffle.none, seed: int = 0, number: int = 0) -> Reader:
        """Reads it, see `data.loader.SequenceReader`."""

    def describe(self, shuffle: Shuffle, seq_len: int, num_sequences: float) -> str:
        """What a run that takes `num_sequences` sequences reads of it, in a line."""


@dataclass(frozen=True)
class OpenedData(ABC):
    """What a run trains and validates on.

    Attributes:
        train: every source of the run.
        validation: what is held out of those that have a sequence for it.
        unvalidated: the names of the training sources that have none.
    """

    train: Sequence[SequenceSource]
    validation: Sequence[SequenceSource]
    unvalidated: list[str]

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What of the sources decides which tokens come when."""

    @abstractmethod
    def tokenizer_files(self) -> Path | None:
        """The folder of the tokenizer's own files, if it has any and they are here."""

    def stores(self) -> dict[str, TokenStore]:
        """The token stores that are read, by their use, TRAINING or VALIDATION, and number: "training store 0".

        A task has none.
        """
        return {}
