"""Batches of one rank's slices of sequences, as a pure function of one integer.

Sequence i is tokens [i · seq_len, (i + 1) · seq_len) of the stream; its labels are the tokens one further, so the last
label of one sequence is the first token of the next. A sequence may be cut in time into segments (DESIGN, section 3);
each segment is spread over the ranks that share the sequence, and is read as a batch of its own. The endless stream of
sequences runs through one random order of all sequences an epoch; a step takes the next `global_batch` of it (and may
cross the border of an epoch). All that a run must remember is `consumed`, the number of sequences taken before,
whatever the number of ranks and of segments.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from data.config import check_batch, check_reset, check_seq_len
from data.documents import shard_cu_seqlens
from data.permutation import Permutation
from data.store import TokenStore
from zeco_train.errors import DataError


@dataclass(frozen=True)
class Batch:
    """One rank's part of a segment of a micro-batch; L = seq_len / (segments · sp_size).

    Attributes:
        input_ids: [B, L] int64.
        labels: [B, L] int64: labels[b, t] is the token after input_ids[b, t], also across shards, segments, sequences.
        cu_seqlens: [pieces + 1] int64 from 0 to L, the documents' pieces on this shard; None without
            `reset_state_at_document`.
        continues: the first piece continues a document (without documents: the sequence) from an earlier shard, which
            for the first rank is the last rank's shard of the segment before.
        offset: position of the first token in the whole sequence.
        sequence_ids: which sequences these are; empty for padding.
        is_padding: in validation only: run it so that all ranks do the same, and count nothing of it.
        segment: which segment of the sequences, from 0.
    """

    input_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor | None
    continues: bool
    offset: int
    sequence_ids: list[int]
    is_padding: bool = False
    segment: int = 0


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


class SequenceReader:
    """Reads one sequence-parallel rank's slices of sequences from a store.

    Raises:
        ConfigError: sequences longer than the store.
    """

    def __init__(self, store: TokenStore, split: DataSplit) -> None:
        check_seq_len(split.seq_len, split.sp_size, store.num_tokens, split.segments)
        self.store, self.split = store, split
        self.num_sequences = (store.num_tokens - 1) // split.seq_len

    def read(self, sequence_ids: list[int], segment: int = 0) -> Batch:
        """Read this rank's tokens of a segment of the sequences, and one more of each: the label of the last."""
        split, length, offset = self.split, self.split.length, self.split.offset(segment)
        tokens = np.empty((len(sequence_ids), length + 1), dtype=np.int64)
        for row, sequence_id in zip(tokens, sequence_ids, strict=True):
            start = sequence_id * split.seq_len + offset
            row[:] = self.store.read(start, start + length + 1)
        cu_seqlens, continues = None, offset > 0
        if split.reset_state_at_document:
            assert len(sequence_ids) == 1, sequence_ids
            start, doc_offsets = sequence_ids[0] * split.seq_len, self.store.doc_offsets
            cu_seqlens, continues = shard_cu_seqlens(doc_offsets, start, split.seq_len, offset, length)
        return Batch(
            input_ids=torch.from_numpy(tokens[:, :-1].copy()),
            labels=torch.from_numpy(tokens[:, 1:].copy()),
            cu_seqlens=cu_seqlens,
            continues=continues,
            offset=offset,
            sequence_ids=sequence_ids,
            segment=segment,
        )


class SequenceLoader:
    """The training batches of one rank. `batch` is a pure function of its arguments.

    The step that begins after `consumed` sequences takes places consumed … consumed + global_batch − 1 of the stream.
    Data-parallel rank d takes the d-th contiguous part of them, and a micro-step the next `micro_batch` of that part.
    The segments of a micro-batch are the same sequences, read one part after another.

    Raises:
        ConfigError: as `check_seq_len` and `check_batch` of data.config.
    """

    def __init__(self, store: TokenStore, split: DataSplit, *, seed: int, global_batch: int) -> None:
        check_batch(global_batch, split.micro_batch, split.dp_size)
        self.reader = SequenceReader(store, split)
        self.global_batch, self.micro_batch, self.segments = global_batch, split.micro_batch, split.segments
        self.micro_steps = global_batch // (split.dp_size * split.micro_batch)
        self._first = split.dp_rank * (global_batch // split.dp_size)
        self._seed = seed

    @property
    def num_sequences(self) -> int:
        """Sequences of an epoch."""
        return self.reader.num_sequences

    def sequence_id(self, position: int) -> int:
        """The sequence at a place of the endless stream; epoch = position // num_sequences."""
        epoch, index = divmod(position, self.num_sequences)
        return Permutation(self.num_sequences, self._seed, epoch)(index)

    def sequence_ids(self, consumed: int, micro_step: int) -> list[int]:
        """The sequences of this rank's micro-batch."""
        assert consumed >= 0, consumed
        assert 0 <= micro_step < self.micro_steps, (micro_step, self.micro_steps)
        start = consumed + self._first + micro_step * self.micro_batch
        return [self.sequence_id(start + i) for i in range(self.micro_batch)]

    def batch(self, consumed: int, micro_step: int, segment: int = 0) -> Batch:
        """A segment of this rank's micro-batch `micro_step` of the step that begins after `consumed` sequences.

        Raises:
            DataError: the store has changed or cannot be read.
        """
        return self.reader.read(self.sequence_ids(consumed, micro_step), segment)


class PrefetchingLoader:
    """Gives the micro-batches of a run in order, each segment by segment, reading ahead on one background thread.

    Args:
        loader: what to read.
        consumed: sequences consumed before the first step.
        ahead: how many segments may wait; a caller that takes a whole micro-batch at once wants all of its segments.
    """

    def __init__(self, loader: SequenceLoader, consumed: int, ahead: int = 1) -> None:
        self._loader = loader
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=ahead)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(consumed,), name="prefetch", daemon=True)
        self._thread.start()

    def next(self) -> Batch:
        """The next segment of a micro-batch, or the first segment of the next micro-batch.

        An error of the background thread is raised here, and again at every later call.
        """
        if self._stop.is_set():
            raise RuntimeError("the loader is closed")
        if self._error is None:
            item = self._queue.get()
            if not isinstance(item, BaseException):
                return item
            self._error = item
        raise self._error

    def again(self, consumed: int, micro_step: int, segment: int = 0) -> Batch:
        """A segment of a micro-batch out of turn, see `SequenceLoader.batch`."""
        return self._loader.batch(consumed, micro_step, segment)

    def close(self) -> None:
        """Stop the thread, and wait a little for a read that is under way."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _run(self, consumed: int) -> None:
        loader = self._loader
        try:
            while True:
                for micro_step, segment in itertools.product(range(loader.micro_steps), range(loader.segments)):
                    if not self._put(loader.batch(consumed, micro_step, segment)):
                        return
                consumed += loader.global_batch
        except BaseException as error:  # whatever it is, the caller of `next` has to see it
            self._put(error)

    def _put(self, item: Batch | BaseException) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False


def validation_batches(store: TokenStore, split: DataSplit, *, max_sequences: int | None = None) -> Iterator[Batch]:
    """One rank's validation batches: every sequence once over all data-parallel ranks, in fixed order.

    All ranks give the same number of batches, as collectives need; what is too much is padding (`Batch.is_padding`).
    The segments of the same sequences come one after another, then those of the next.

    Args:
        max_sequences: take only the first so many sequences.

    Raises:
        DataError: the store is shorter than a sequence.
    """
    if store.num_tokens - 1 < split.seq_len:
        problem = f"its {store.num_tokens} tokens are too few for validation with data.seq_len={split.seq_len}"
        raise DataError(store.path, problem, "use a larger validation part or shorter sequences")
    reader = SequenceReader(store, split)
    count = reader.num_sequences if max_sequences is None else min(reader.num_sequences, max_sequences)
    for start in range(0, count, split.dp_size * split.micro_batch):
        first = start + split.dp_rank * split.micro_batch
        ids = list(range(first, min(first + split.micro_batch, count)))
        for segment in range(split.segments):
            batch = reader.read(ids or [0], segment)
            yield batch if ids else replace(batch, sequence_ids=[], is_padding=True)
