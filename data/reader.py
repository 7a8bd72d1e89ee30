"""Interface between sequence sources and the loader: one rank's shards of segments, and batches of them."""

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

# Uses of token stores, see `OpenedData.stores`.
TRAINING, VALIDATION = "training", "validation"


@dataclass(frozen=True)
class Batch:
    """One rank's part of a segment of a micro-batch; L = seq_len / (segments · sp_size).

    Attributes:
        input_ids: [B, L] int64.
        labels: [B, L] int64: labels[b, t] is the token after input_ids[b, t], also across shards, segments, sequences,
            and documents (see `DataSplit`); of a masked-token task (`data.masking`) the original token at t. −100 for
            labels excluded from the loss.
        cu_seqlens: [pieces + 1] int64 from 0 to L, the documents' pieces on this shard; None without
            `reset_state_at_document`.
        before: tokens of the first piece's document (without documents: of the sequence) on earlier shards, those of
            earlier segments included.
        offset: position of the first token in the whole sequence.
        sequence_ids: numbers of the sequences within their epochs; those of a second store continue after those of the
            first. Empty for padding.
        is_padding: in validation only: run for matching collectives, and excluded from the loss.
        segment: number of the segment, from 0.
        step_labels: number of counted labels in the step's global batch; None if every token has one.
        borders: [documents + 1] int64 from 0 to the whole sequence's length, the borders of all its documents, for
            softmax attention; None without `reset_state_at_document`.
        pieces, positions: see `SequenceShard.known_pieces` and `known_positions`.
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
    borders: Tensor | None = None
    pieces: Tensor | None = None
    positions: Tensor | None = None


@dataclass(frozen=True)
class DataSplit:
    """This rank's part of each step's sequences.

    Attributes:
        seq_len: tokens of a whole sequence, over the ranks that share it and over its segments.
        micro_batch: sequences per data-parallel rank in one forward and backward.
        dp_rank, dp_size: this rank's index among the parts of a step's sequences, and their number.
        sp_rank, sp_size: this rank's index among the equal shards of a segment, and their number.
        reset_state_at_document: return cu_seqlens; requires micro_batch 1.
        segments: number of equal parts in time of a sequence; 1 for none.
        labels_across_documents: whether the last tokens of documents have labels, see `DataConfig`.

    Raises:
        ConfigError: `seq_len` is not divisible, or `micro_batch` > 1 with document resets.
    """

    seq_len: int
    micro_batch: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    sp_rank: int = 0
    sp_size: int = 1
    reset_state_at_document: bool = False
    segments: int = 1
    labels_across_documents: bool = True

    def __post_init__(self) -> None:
        assert 0 <= self.dp_rank < self.dp_size, (self.dp_rank, self.dp_size)
        assert 0 <= self.sp_rank < self.sp_size, (self.sp_rank, self.sp_size)
        assert self.segments >= 1, self.segments
        check_seq_len(self.seq_len, self.sp_size, segments=self.segments)
        check_reset(self.reset_state_at_document, self.micro_batch)

    @property
    def length(self) -> int:
        """Number of tokens of this rank's shard of a segment."""
        return self.seq_len // (self.segments * self.sp_size)

    def offset(self, segment: int) -> int:
        """Position in the sequence of this rank's first token of a segment."""
        assert 0 <= segment < self.segments, (segment, self.segments)
        return (segment * self.sp_size + self.sp_rank) * self.length


class Shard(NamedTuple):
    """One rank's part of a segment of a sequence, see `Batch`.

    `tokens` is [L + 1], including the label of the last; `counts` is [L] bool, a mask of the counted labels, None for
    all; `labels` is [L], labels other than the next tokens, None for those.
    """

    tokens: NDArray[np.int64]
    cu_seqlens: Tensor | None
    before: int
    counts: NDArray[np.bool_] | None = None
    labels: NDArray[np.int64] | None = None
    borders: Tensor | None = None


class Reader(ABC):
    """Reads one sequence-parallel rank's shards of a source's sequences.

    Attributes:
        split: this rank's part of the sequences.
        num_sequences: sequences per epoch.
        description: name of the source in messages.
        has_labels: some labels are masked.
        is_endless: sequences never repeat; `num_sequences` is only a large number.
        tokens_behind: unused tokens of an epoch, after the last whole sequence and its label.
    """

    split: DataSplit
    num_sequences: int
    description: str
    has_labels = False
    is_endless = False
    tokens_behind = 0

    def find(self, index: int) -> tuple[int, int]:
        """Epoch and number of the `index`-th sequence in this source's endless stream."""
        return divmod(index, self.num_sequences)

    @abstractmethod
    def shard(self, epoch: int, sequence: int, segment: int) -> Shard:
        """This rank's shard of a segment of a sequence, plus one token: the label of the last.

        Raises:
            DataError: a store has changed or cannot be read.
        """

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
        assert not self.split.reset_state_at_document or len(shards) == 1, sequence_ids
        tokens = torch.from_numpy(np.stack([shard.tokens for shard in shards]))
        # Copy even a single row: masked labels are overwritten.
        labels = tokens[:, 1:].clone()
        for row, shard in zip(labels, shards, strict=True):
            if shard.labels is not None:
                row.copy_(torch.from_numpy(shard.labels))
            if shard.counts is not None:
                row[torch.from_numpy(~shard.counts)] = IGNORE_INDEX
        return Batch(
            input_ids=tokens[:, :-1].contiguous(),
            labels=labels,
            cu_seqlens=shards[0].cu_seqlens,
            before=shards[0].before,
            borders=shards[0].borders,
            offset=self.split.offset(segment),
            sequence_ids=sequence_ids,
            segment=segment,
            step_labels=step_labels,
        )


class SequenceSource(Protocol):
    """Source of sequences."""

    @property
    def weight(self) -> int:
        """Sampling weight relative to the run's other sources."""
        ...

    @property
    def name(self) -> str:
        """Label of its metrics; empty for a single source."""
        ...

    def reader(self, split: DataSplit, *, shuffle: Shuffle = Shuffle.none, seed: int = 0, number: int = 0) -> Reader:
        """Create a reader, see `data.loader.SequenceReader`."""

    def describe(self, shuffle: Shuffle, seq_len: int, num_sequences: float) -> str:
        """One-line summary of the data read by a run of `num_sequences` sequences."""


@dataclass(frozen=True)
class OpenedData(ABC):
    """Training and validation sources of a run.

    Attributes:
        train: every source of the run.
        validation: the held-out sources that have at least one sequence.
        unvalidated: names of the training sources without one.
    """

    train: Sequence[SequenceSource]
    validation: Sequence[SequenceSource]
    unvalidated: list[str]

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The properties of the sources that determine the token order."""

    @abstractmethod
    def tokenizer_files(self) -> Path | None:
        """The folder of the tokenizer's files, if it has any and they exist."""

    def stores(self) -> dict[str, TokenStore]:
        """The token stores in use, keyed by TRAINING or VALIDATION and number: "training store 0".

        Empty for a synthetic task.
        """
        return {}
