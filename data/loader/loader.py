"""Loads one rank's shards of sequences; each batch is a pure function of one integer.

A store's documents form a token stream (data.store.documents), in stored order or reshuffled every epoch. Sequence i
of an epoch is tokens [i · seq_len, (i + 1) · seq_len) of its stream; its labels are shifted by one, so the last label
of one sequence is the first token of the next. Tokens after the last whole sequence and its label are dropped from that
epoch: sequences never continue into the next epoch, which may have the same documents.

The sequences of an epoch are shuffled, several stores are mixed (`Mixture`), and the result is one endless stream. Each
step takes the next `global_batch` sequences, across epoch borders if need be. A sequence may be cut in time into
segments (docs/mathematics.md); each is sharded over the ranks that share the sequence, and is a separate batch. The
only state to checkpoint is `consumed`, the number of sequences taken so far, whatever the ranks and segments.
"""

from __future__ import annotations

import bisect
import itertools
import math
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from data.config import Shuffle, check_batch
from data.loader.batches import Batch, DataSplit, Reader, SequenceSource
from data.randomness import Permutation
from zeco_train.system import background


def as_integers(weights: Sequence[float]) -> list[int]:
    """The smallest integers with the same ratios as `weights`, which are read as decimals by their repr."""
    fractions = [Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    integers = [int(fraction * scale) for fraction in fractions]
    return [number // math.gcd(*integers) for number in integers]


class Mixture:
    """Distributes the positions 0, 1, 2, … of a run's stream over stores in proportion to their weights.

    Positions are grouped into blocks of b = ⌈1 / the smallest share⌉. Store j gets ⌊t·b·W_j⌋ − ⌊t·b·W_{j−1}⌋ of the
    first t·b positions, W being the running sum of the shares: after every block it is within one of its exact share,
    without drift, in integer arithmetic. (b is large enough that no store's count ever decreases.) Positions are
    shuffled within a block, by `seed`, so that no period of the training loop, such as the logging interval, always
    hits the same store. Each store's indices 0, 1, 2, … occur exactly once, in order except for that shuffle.
    """

    def __init__(self, weights: Sequence[int], seed: int) -> None:
        assert weights, weights
        assert min(weights) > 0, weights
        self._seed = seed
        self._sums = [sum(weights[: j + 1]) for j in range(len(weights))]
        self.shares = [Fraction(weight, self._sums[-1]) for weight in weights]
        self.block = -(-self._sums[-1] // min(weights))

    def place(self, position: int) -> tuple[int, int]:
        """The store of the sequence at `position`, and the sequence's index within that store."""
        if len(self._sums) == 1:
            return 0, position
        block, slot = divmod(position, self.block)
        slot = Permutation(self.block, self._seed, block, of="stores")(slot)
        before, after = self._dealt(block), self._dealt(block + 1)
        store = next(j for j in range(len(self._sums)) if slot < after[j] - before[j])
        if store == 0:
            return 0, before[0] + slot
        return store, before[store] - before[store - 1] + slot - (after[store - 1] - before[store - 1])

    def _dealt(self, blocks: int) -> list[int]:
        return [blocks * self.block * partial // self._sums[-1] for partial in self._sums]


class Place(NamedTuple):
    """Address of a sequence of the endless stream: the store, its epoch, and the sequence in that epoch."""

    source: int
    epoch: int
    sequence: int


class SequenceLoader:
    """The training batches of one rank. `batch` is a pure function of its arguments.

    The step that begins after `consumed` sequences takes positions consumed … consumed + global_batch − 1 of the
    stream. Data-parallel rank d takes the d-th contiguous part, and each micro-step the next `micro_batch` of it. The
    segments of a micro-batch are consecutive parts of the same sequences.

    Raises ConfigError as `check_seq_len` and `check_batch` of data.config.
    """

    def __init__(
        self,
        sources: Sequence[SequenceSource],
        split: DataSplit,
        *,
        seed: int,
        global_batch: int,
        shuffle: Shuffle = Shuffle.sequences,
    ) -> None:
        check_batch(global_batch, split.micro_batch, split.dp_size)
        # One per store.
        self.readers = [source.reader(split, shuffle, seed, number) for number, source in enumerate(sources)]
        self.mixture = Mixture([source.weight for source in sources], seed)
        counts = [reader.num_sequences for reader in self.readers]
        self._first_ids = [0, *itertools.accumulate(counts)]
        self.num_sequences = self._first_ids[-1]
        self.global_batch, self.micro_batch, self.segments = global_batch, split.micro_batch, split.segments
        self.micro_steps = global_batch // (split.dp_size * split.micro_batch)
        self._first = split.dp_rank * (global_batch // split.dp_size)
        # Cached: the same for all micro-batches of a step, and synthetic examples must be generated to count it.
        self._step_labels = lru_cache(maxsize=2)(self._count_step_labels)

    def place(self, position: int) -> Place:
        source, index = self.mixture.place(position)
        return Place(source, *self.readers[source].find(index))

    def sequence_id(self, place: Place) -> int:
        """Number of a sequence over all stores, independent of the epoch."""
        return self._first_ids[place.source] + place.sequence

    def batch(self, consumed: int, micro_step: int, segment: int = 0) -> Batch:
        """Segment `segment` of this rank's micro-batch `micro_step`, in the step after `consumed` sequences.

        Raises DataError if a store has changed or cannot be read.
        """
        assert consumed >= 0, consumed
        assert 0 <= micro_step < self.micro_steps, (micro_step, self.micro_steps)
        start = consumed + self._first + micro_step * self.micro_batch
        places = [self.place(start + i) for i in range(self.micro_batch)]
        shards = [self.readers[place.source].shard(place.epoch, place.sequence, segment) for place in places]
        ids = [self.sequence_id(place) for place in places]
        # Any reader will do: stacking depends on the split only, which all readers share.
        return self.readers[0].batch(shards, ids, segment, self._step_labels(consumed))

    def reader_of(self, sequence_id: int) -> Reader:
        return self.readers[bisect.bisect_right(self._first_ids, sequence_id) - 1]

    def _count_step_labels(self, consumed: int) -> int | None:
        if not any(reader.has_labels for reader in self.readers):
            return None
        places = [self.place(consumed + i) for i in range(self.global_batch)]
        return sum(self.readers[place.source].num_labels(place.epoch, place.sequence) for place in places)


class PrefetchingLoader:
    """Yields a run's micro-batches in order, segment by segment, prefetched by a background thread.

    `consumed` sequences were taken before the first step. `ahead` segments are read ahead: all of a micro-batch's, if
    the caller takes it whole.
    """

    def __init__(self, loader: SequenceLoader, consumed: int, ahead: int = 1) -> None:
        self._loader = loader
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=ahead)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = background.start(self._run, consumed, name="prefetch", stop=self._stop.set)

    def next(self) -> Batch:
        """The next segment; re-raises an error of the background thread, on this and every later call."""
        if self._stop.is_set():
            raise RuntimeError("the loader is closed")
        if self._error is None:
            item = self._queue.get()
            if not isinstance(item, BaseException):
                return item
            # The thread has ended, so a later call would wait forever: raise the same error again.
            self._error = item
        raise self._error

    def again(self, consumed: int, micro_step: int, segment: int = 0) -> Batch:
        """`SequenceLoader.batch`, out of order."""
        return self._loader.batch(consumed, micro_step, segment)

    def close(self) -> None:
        """Stop the thread, and wait up to 5 s for a read in progress."""
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
        except BaseException as error:  # re-raised by `next`
            self._put(error)

    def _put(self, item: Batch | BaseException) -> bool:
        # With a timeout, to notice `close`: a plain `put` would block forever once no batch is taken any more.
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False


def validation_batches(reader: Reader, *, max_sequences: int | None = None) -> Iterator[Batch]:
    """One rank's validation batches: every sequence once over all data-parallel ranks, in fixed order.

    All ranks yield the same number of batches, as collectives require; surplus ones are padding (`Batch.is_padding`).
    All segments of one group of sequences come before the next group.
    """
    split = reader.split
    count = reader.num_sequences if max_sequences is None else min(reader.num_sequences, max_sequences)
    for start in range(0, count, split.dp_size * split.micro_batch):
        first = start + split.dp_rank * split.micro_batch
        ids = list(range(first, min(first + split.micro_batch, count)))
        for segment in range(split.segments):
            # Padding: any sequence will do, since the batch is run for its collectives only.
            batch = reader.read(ids or [0], segment)
            yield batch if ids else replace(batch, sequence_ids=[], is_padding=True)
