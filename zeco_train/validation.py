"""The loss over held-out sequences: of each store, of the mixture that a run trains on, and by position."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from data.loader import validation_batches
from data.reader import DataSplit, Reader, SequenceSource
from zeco_train.forward import SequenceForward
from zeco_train.positions import PositionLosses, PositionSums


@dataclass(frozen=True)
class ValidationLoss:
    """Mean token losses, in nats.

    Attributes:
        mean: over all stores, each with its weight in training: what the training loss is an estimate of.
        by_position: the same by position in the sequence.
        by_store: of each store of a mixture; empty where there is one store only.
        error: standard error of `mean`, from how sequences differ; None where a store has one sequence only.
    """

    mean: float
    by_position: PositionLosses
    by_store: dict[str, float] = field(default_factory=dict)
    error: float | None = None

    @property
    def perplexity(self) -> float:
        """Of a token."""
        return math.exp(self.mean) if self.mean < 700 else math.inf

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "loss": self.mean,
            "error": self.error,
            "perplexity": self.perplexity,
            "by_store": self.by_store,
            "by_position": self.by_position.as_dict(),
        }


class Validation:
    """Held-out sequences, as they are stored.

    Args:
        sources: their stores; may be none.
        split: this rank's part of them.
        max_sequences: at most so many of each store, the first ones.
    """

    def __init__(self, sources: Sequence[SequenceSource], split: DataSplit, max_sequences: int) -> None:
        self._sources, self._max_sequences, self._split = sources, max_sequences, split
        self._readers = [source.reader(split) for source in sources]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held out."""
        return not self._readers

    def coverage(self) -> list[str]:
        """What of each store is taken and what is left out, in a line each."""
        seq_len, lines = self._split.seq_len, []
        for reader in self._readers:
            tokens, taken = reader.documents.num_tokens, self._taken(reader)
            line = f"{reader.documents.store.path}: {taken:,} of {reader.num_sequences:,} held-out sequences"
            left = [f"{reader.num_sequences - taken:,} sequences by train.eval_sequences={self._max_sequences}"]
            left = left if taken < reader.num_sequences else []
            # The label of the last token is one more.
            behind = tokens - reader.num_sequences * seq_len - 1
            left += [f"{behind:,} tokens behind the last whole one"] if behind else []
            of = f"{line} of {seq_len:,} tokens, {taken * seq_len / (tokens - 1):.1%} of its tokens"
            lines.append(f"{of}; left out: {', '.join(left)}" if left else of)
        return lines

    @torch.no_grad()
    def loss(self, forward: SequenceForward, proceed: Callable[[], bool] = lambda: True) -> ValidationLoss | None:
        """The losses with the model as it is. Collective.

        Args:
            forward: of the model.
            proceed: asked before each micro-batch; must say the same on all ranks.

        Returns:
            None if there is nothing held out, or if it was told not to proceed.
        """
        sums = []
        for reader in self._readers:
            of_store = self._sums(reader, forward, proceed)
            if of_store is None:
                return None
            sums.append(of_store)
        if not sums:
            return None
        seq_len, weights = self._split.seq_len, [source.weight for source in self._sources]
        shares = [weight / sum(weights) for weight in weights]
        by_sequence = [of_store.sums.sum(1).cpu() / seq_len for of_store in sums]
        means = [losses.mean().item() for losses in by_sequence]
        errors = [(losses.std() / math.sqrt(len(losses))).item() for losses in by_sequence if len(losses) > 1]
        names = [source.name for source in self._sources if source.name]
        return ValidationLoss(
            sum(share * mean for share, mean in zip(shares, means, strict=True)),
            PositionLosses.weighted([PositionLosses.of_sums(s.edges, s.sums) for s in sums], weights),
            dict(zip(names, means, strict=True)) if names else {},
            math.hypot(*(s * e for s, e in zip(shares, errors, strict=True))) if len(errors) == len(means) else None,
        )

    def _taken(self, reader: Reader) -> int:
        return min(reader.num_sequences, self._max_sequences)

    def _sums(
        self, reader: Reader, forward: SequenceForward, proceed: Callable[[], bool]
    ) -> PositionSums | None:
        """The summed losses of a store's sequences over all ranks; None if told not to proceed."""
        sums = PositionSums(self._taken(reader), self._split.seq_len, forward.mesh.device)
        batches = validation_batches(reader, max_sequences=self._max_sequences)
        while segments := list(islice(batches, self._split.segments)):
            if not proceed():
                return None
            for batch, scores in zip(segments, forward.scores(segments, self._split.seq_len), strict=True):
                if not batch.is_padding:
                    sums.add(batch.sequence_ids, batch.offset, scores.losses)
        dist.all_reduce(sums.sums)
        return sums
