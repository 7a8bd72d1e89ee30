"""The loss over held-out sequences: of each store, and of the mixture that a run trains on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
import torch.distributed as dist

from data.loader import validation_batches
from data.reader import DataSplit, SequenceSource
from zeco_train.loss import IGNORE_INDEX
from zeco_train.step import TrainingStep


@dataclass(frozen=True)
class ValidationLoss:
    """Mean token losses, in nats.

    Attributes:
        mean: over all stores, each with its weight in training: what the training loss is an estimate of.
        by_store: of each store of a mixture; empty where there is one store only.
    """

    mean: float
    by_store: dict[str, float] = field(default_factory=dict)


class Validation:
    """Held-out sequences, as they are stored.

    Args:
        sources: their stores; may be none.
        split: this rank's part of them.
        max_sequences: at most so many of each store, the first ones.
    """

    def __init__(self, sources: Sequence[SequenceSource], split: DataSplit, max_sequences: int) -> None:
        self._sources, self._max_sequences, self._segments = sources, max_sequences, split.segments
        self._readers = [source.reader(split) for source in sources]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held out."""
        return not self._readers

    @torch.no_grad()
    def loss(self, step: TrainingStep, proceed: Callable[[], bool]) -> ValidationLoss | None:
        """The losses with the model as it is. Collective.

        Args:
            step: of the model.
            proceed: asked before each micro-batch; must say the same on all ranks.

        Returns:
            None if there is nothing held out, or if it was told not to proceed.
        """
        losses = []
        for reader in self._readers:
            total = torch.zeros(2, dtype=torch.float64, device=step.mesh.device)
            batches = validation_batches(reader, max_sequences=self._max_sequences)
            while segments := list(islice(batches, self._segments)):
                if not proceed():
                    return None
                loss = step.loss(segments)
                if not segments[0].is_padding:
                    counted = sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in segments)
                    total += torch.stack([loss, loss.new_tensor(counted)])
            dist.all_reduce(total)
            losses.append((total[0] / total[1]).item())
        if not losses:
            return None
        weights = [source.weight for source in self._sources]
        mean = sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights)
        names = [source.name for source in self._sources if source.name]
        return ValidationLoss(mean, dict(zip(names, losses, strict=True)) if names else {})
