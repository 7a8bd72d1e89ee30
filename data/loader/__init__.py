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
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from data.config import Shuffle, check_batch, check_seq_len
from data.loader.batches import Batch, DataSplit, Reader, SequenceSource, Shard
from data.loader.masking import MaskedReader, MaskIds, TaskConfig, find_mask_ids
from data.randomness import Permutation
from data.store.documents import Documents, DocumentStream, sequence_borders
from zeco_train.system import background


@dataclass(frozen=True)
class Source(SequenceSource):
    """The documents of one store of a run; `masks`: the fraction of tokens to predict, and the ids that hide them."""

    documents: Documents
    masks: tuple[float, MaskIds] | None = field(default=None, kw_only=True)

    def reader(self, split: DataSplit, shuffle: Shuffle = Shuffle.none, seed: int = 0, number: int = 0) -> Reader:
        """A reader of the documents' sequences. Validation takes seed 0: its masks are alike in runs of any seed."""
        reader = SequenceReader(self.documents, split, shuffle, seed, number)
        return reader if self.masks is None else MaskedReader(reader, *self.masks, f"store {number}, seed {seed}")

    def describe(self, shuffle: Shuffle, seq_len: int, num_sequences: float) -> str:
        """Numbers of documents, tokens, sequences and epochs."""
        documents, store = self.documents, self.documents.store
        epoch = (documents.num_tokens - 1) // seq_len
        text = (
            f"{store.path}: {documents.num_documents:,} of {store.meta.num_documents:,} documents, "
            f"{documents.num_tokens:,} tokens; epoch (shuffle={shuffle.value}): {epoch:,} sequences, "
            f"{documents.num_tokens - epoch * seq_len:,} tokens behind the last one left out; "
            f"epochs in this run: {num_sequences / epoch:.4g}"
        )
        if self.masks is not None:
            text += f"; {self.masks[0]:.4g} of the tokens predicted, mask token {self.masks[1].mask}"
        return text


def for_task(sources: Sequence[SequenceSource], task: TaskConfig, vocab_size: int) -> list[SequenceSource]:
    """The sources as a task reads them. With a task that masks tokens they are token stores.

    Raises ConfigError as `find_mask_ids`.
    """
    if not task.is_masked:
        return list(sources)
    masked: list[SequenceSource] = []
    for source in sources:
        assert isinstance(source, Source), source  # a synthetic task is refused by the configuration
        ids = find_mask_ids(task.mask_token, source.documents.store.meta, vocab_size)
        masked.append(replace(source, masks=(task.mask_fraction, ids)))
    return masked


class SequenceReader(Reader):
    """Reads one sequence-parallel rank's shards of a store's sequences.

    Args:
        documents: the store's documents.
        split: this rank's part of the sequences.
        shuffle, seed: the order of documents and sequences in each epoch.
        number: the store's number in a mixture, so that stores of the same size have different orders.

    Raises:
        ConfigError: sequences longer than the store.
    """

    def __init__(
        self,
        documents: Documents,
        split: DataSplit,
        shuffle: Shuffle = Shuffle.none,
        seed: int = 0,
        number: int = 0,
    ) -> None:
        num_tokens = documents.num_tokens
        check_seq_len(split.seq_len, split.sp_size, num_tokens, split.segments, documents.description)
        self.documents, self.split, self.description = documents, split, str(documents.store.path)
        self.has_labels = not split.labels_across_documents
        self.num_sequences = (num_tokens - 1) // split.seq_len
        self.tokens_behind = (num_tokens - 1) % split.seq_len
        self._shuffle, self._seed, self._suffix = shuffle, seed, f" of store {number}" if number else ""
        self._lock = threading.Lock()
        self._streams: dict[int, DocumentStream] = {}

    def find(self, index: int) -> tuple[int, int]:
        """Epoch of a sequence, and its number in it; each epoch has its own order."""
        epoch, place = super().find(index)
        if self._shuffle is Shuffle.none:
            return epoch, place
        return epoch, Permutation(self.num_sequences, self._seed, epoch, f"sequences{self._suffix}")(place)

    def shard(self, epoch: int, sequence: int, segment: int) -> Shard:
        """This rank's shard of a segment of a sequence."""
        split, stream = self.split, self._stream(epoch)
        first, (start, stop) = sequence * split.seq_len, split.range(segment)
        start, stop = first + start, first + stop + 1
        pieces = stream.pieces(start, stop)
        tokens, counts = stream.read(pieces, start, stop), None
        if self.has_labels:
            counts = np.ones(len(tokens) - 1, np.bool_)
            # The last document may begin with the token after the shard, a label only.
            counts[pieces.offsets[1:-1] - start - 1] = False
        if not split.reset_state_at_document:
            return Shard(tokens, counts)
        whole = stream.pieces(first, first + split.seq_len)
        return Shard(tokens, counts, documents=sequence_borders(whole.offsets, first, split.seq_len))

    def num_labels(self, epoch: int, sequence: int) -> int:
        """Number of labels that count: a document's last token has none."""
        seq_len = self.split.seq_len
        if not self.has_labels:
            return seq_len
        documents = self._stream(epoch).pieces(sequence * seq_len, (sequence + 1) * seq_len + 1).documents
        return seq_len - (len(documents) - 1)

    def _stream(self, epoch: int) -> DocumentStream:
        key = epoch if self._shuffle is Shuffle.documents else 0
        with self._lock:  # `again` may read from another thread than the prefetcher
            if key not in self._streams:
                order = None
                if self._shuffle is Shuffle.documents:
                    of = f"documents{self._suffix}"
                    order = Permutation(self.documents.num_documents, self._seed, epoch, of)
                # Keep the neighbouring epochs: a step may cross the border.
                self._streams = {k: v for k, v in self._streams.items() if abs(k - key) <= 1}
                self._streams[key] = self.documents.stream(order)
            return self._streams[key]


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
        """Cumulative number of positions of stores 0 … j in the first `blocks` blocks, for each j."""
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
        """The sequence at a position of the endless stream."""
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
        """The reader of the store that holds a sequence."""
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
