"""The loss over held-out sequences: per store, for the training mixture, and by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import torch

from data.loader import validation_batches
from data.loader.batches import DataSplit, Reader, SequenceSource
from zeco_train.tracking.positions import PositionLosses, PositionSums, ValidationLoss, weighted
from zeco_train.training.forward import SequenceForward


class Validation:
    """Evaluates the loss on held-out sequences, in stored order: of each store at most the first `max_sequences`.

    Attributes:
        unlabelled: descriptions of the stores without a label, which are left out.
    """

    def __init__(self, sources: Sequence[SequenceSource], split: DataSplit, max_sequences: int) -> None:
        self._max_sequences, self._split = max_sequences, split
        self._sources, self._readers, self.unlabelled = list[SequenceSource](), list[Reader](), list[str]()
        for source in sources:
            reader = source.reader(split)
            if any(reader.num_labels(0, number) for number in range(self._taken(reader))):
                self._sources.append(source)
                self._readers.append(reader)
            else:
                self.unlabelled.append(reader.description)

    @property
    def is_empty(self) -> bool:
        return not self._readers

    def coverage(self, key: str = "train.eval_sequences") -> list[str]:
        """One line per store: the sequences used and those left out; `key` is the setting that limits them."""
        lines = []
        for reader in self._readers:
            taken, left = self._taken(reader), []
            if reader.is_endless:
                lines.append(f"{reader.description}: {taken:,} held-out sequences of {self._split.seq_len:,} tokens")
                continue
            if taken < reader.num_sequences:
                left.append(f"{reader.num_sequences - taken:,} sequences by {key}={self._max_sequences}")
            if reader.tokens_behind:
                left.append(f"{reader.tokens_behind:,} tokens behind the last whole one")
            what = f"{taken:,} of {reader.num_sequences:,} held-out sequences of {self._split.seq_len:,} tokens"
            lines.append(f"{reader.description}: {what}; left out: {', '.join(left) or 'nothing'}")
        return lines

    @torch.no_grad()
    def loss(self, forward: SequenceForward, proceed: Callable[[], bool] = lambda: True) -> ValidationLoss | None:
        """Compute the losses with the model's current weights; None if nothing is held out. Collective.

        `proceed` is called before each micro-batch and must return the same on all ranks; where it returns False, the
        result is None.
        """
        sums = []
        for reader in self._readers:
            of_store = self._sums(reader, forward, proceed)
            if of_store is None:
                return None
            sums.append(of_store)
        if not sums:
            return None
        weights = [source.weight for source in self._sources]
        wholes = [of_store.whole() for of_store in sums]
        names = [source.name for source in self._sources if source.name]
        mean, error = weighted(wholes, weights)
        return ValidationLoss(
            mean.item(),
            PositionLosses.of_sums(sums, weights),
            {name: loss.item() for name, (loss, _) in zip(names, wholes, strict=True)} if names else {},
            None if error.isnan() else error.item(),
            sum(self._taken(reader) for reader in self._readers),
            sum(of_store.labels for of_store in sums),
        )

    def _taken(self, reader: Reader) -> int:
        return min(reader.num_sequences, self._max_sequences)

    def _sums(self, reader: Reader, forward: SequenceForward, proceed: Callable[[], bool]) -> PositionSums | None:
        # Over all ranks; None if `proceed` returned False.
        sums = PositionSums(self._taken(reader), self._split.seq_len, forward.mesh.device)
        batches = validation_batches(reader, max_sequences=self._max_sequences)
        while segments := list(islice(batches, self._split.segments)):
            if not proceed():
                return None
            for batch, scores in zip(segments, forward.scores(segments), strict=True):
                # Padding is computed like the rest, for matching collectives.
                if not batch.is_padding:
                    sums.add(batch.sequence_ids, batch.position.start, scores)
        sums.reduce()
        return sums
