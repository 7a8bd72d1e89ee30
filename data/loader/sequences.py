"""The documents of a store as sequences: one rank's shards of them, in each epoch's order."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from data.config import Shuffle, check_seq_len
from data.loader.batches import DataSplit, Reader, SequenceSource, Shard
from data.loader.masking import MaskedReader, MaskIds, TaskConfig, find_mask_ids
from data.randomness import Permutation
from data.store.documents import Documents, DocumentStream, sequence_borders


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
        epoch, place = super().find(index)
        if self._shuffle is Shuffle.none:
            return epoch, place
        return epoch, Permutation(self.num_sequences, self._seed, epoch, f"sequences{self._suffix}")(place)

    def shard(self, epoch: int, sequence: int, segment: int) -> Shard:
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
