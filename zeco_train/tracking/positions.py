"""Loss by position in log-spaced buckets over a sequence, which shows the gain from longer context."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeco_train.ops.loss import TokenScores
from zeco_train.system.files import jsonable
from zeco_train.system.numbers import IGNORE_INDEX

MeanAndError = tuple[Tensor, Tensor]

# One bucket per octave up to this position, which has few tokens; two per octave after it.
_FINE_FROM = 16
# Upper bound on the length of a sequence.
_LONGEST = 1 << 50


def bucket_edges(seq_len: int) -> list[int]:
    """Borders of the buckets: 0, 1, 2, 4, 8, 16, 23, 32, 45, 64 … `seq_len`; bucket i is [edges[i], edges[i + 1])."""
    edges = [0, 1, 2, 4, 8]
    half_octaves = 2 * int(math.log2(max(seq_len, 2))) + 2
    edges += [round(_FINE_FROM * 2 ** (step / 2)) for step in range(half_octaves)]
    # A last bucket that would be too narrow is merged into the one before it.
    return [edge for edge in edges if edge <= seq_len / 2**0.25] + [seq_len]


@dataclass(frozen=True)
class PositionLosses:
    """Mean token losses by position, in nats.

    Attributes:
        edges: [buckets + 1], positions in the sequence from 0.
        losses: [buckets]; NaN for buckets without counted labels.
        errors: [buckets], standard errors of the losses over sequences; NaN for a single sequence.
    """

    edges: list[int]
    losses: list[float]
    errors: list[float]

    @classmethod
    def of_sums(cls, parts: Sequence[PositionSums], weights: Sequence[float]) -> PositionLosses:
        """The weighted mean of several stores' losses."""
        losses, errors = weighted([part.by_bucket() for part in parts], weights)
        return cls(parts[0].edges, losses.tolist(), errors.tolist())

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> PositionLosses:
        """Inverse of `as_dict`; null stands for NaN. `ValueError` names a malformed list."""
        edges = record.get("edges")
        if not isinstance(edges, list) or not all(type(edge) is int and 0 <= edge <= _LONGEST for edge in edges):
            raise ValueError("edges is not a list of positions")
        if len(edges) < 2 or any(after <= before for before, after in pairwise(edges)):
            raise ValueError("edges do not increase")
        losses, errors = (_numbers(record.get(name), name, len(edges) - 1) for name in ("losses", "errors"))
        return cls(edges, losses, errors)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, NaN as null."""
        return {"edges": self.edges, **jsonable({"losses": self.losses, "errors": self.errors}, lambda value: None)}


@dataclass(frozen=True)
class ValidationLoss:
    """Mean token losses, in nats.

    Attributes:
        mean: over all stores with their training weights; the training loss estimates the same quantity.
        by_store: per store of a mixture; empty for a single store.
        error: standard error of `mean` over sequences; None if a store has only one sequence.
        sequences, tokens: that it is of; `tokens` are those with a label that counts.
    """

    mean: float
    by_position: PositionLosses
    by_store: dict[str, float] = field(default_factory=dict)
    error: float | None = None
    sequences: int = 0
    tokens: int = 0

    @property
    def extent(self) -> str:
        """Sequences and tokens, for printed lines."""
        return f"of {self.sequences:,} sequence{'s' * (self.sequences != 1)}, {self.tokens:,} tokens"

    @property
    def perplexity(self) -> float:
        # math.exp raises an OverflowError above 709.
        return math.exp(self.mean) if self.mean < 700 else math.inf

    def as_dict(self) -> dict[str, Any]:
        own = {"loss": self.mean, "error": self.error, "perplexity": self.perplexity, "by_store": self.by_store}
        own |= {"sequences": self.sequences, "tokens": self.tokens}
        return own | {"by_position": self.by_position.as_dict()}


class PositionSums:
    """Sums of token losses and counts of labels, by sequence and bucket, over this rank's tokens."""

    def __init__(self, num_sequences: int, seq_len: int, device: torch.device) -> None:
        self.edges = bucket_edges(seq_len)
        self._sums = torch.zeros(2, num_sequences, len(self.edges) - 1, dtype=torch.float64, device=device)

    def add(self, sequences: Sequence[int], offset: int, scores: TokenScores) -> None:
        """Add a shard of sequences of these numbers: `scores` of [B, T], from `offset` on in each."""
        stop, rows = offset + scores.losses.shape[1], list(sequences)
        for bucket, (before, after) in enumerate(pairwise(self.edges)):
            piece = slice(max(before, offset) - offset, min(after, stop) - offset)
            if piece.start < piece.stop:
                # Sums of slices: adding by index is not deterministic on GPUs.
                self._sums[0, rows, bucket] += scores.losses[:, piece].sum(1, dtype=torch.float64)
                self._sums[1, rows, bucket] += (scores.predictions[:, piece] != IGNORE_INDEX).sum(1)

    @property
    def labels(self) -> int:
        return int(self._sums[1].sum())

    def reduce(self) -> None:
        """All-reduce the sums over all ranks. Collective."""
        dist.all_reduce(self._sums)

    def whole(self) -> MeanAndError:
        """Mean and error over all tokens: scalars."""
        return _mean_and_error(*self._sums.sum(2).cpu())

    def by_bucket(self) -> MeanAndError:
        """Mean and error per bucket: [buckets]."""
        return _mean_and_error(*self._sums.cpu())


def _numbers(values: object, name: str, count: int) -> list[float]:
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{name} is not a list of {count} numbers")
    for value in values:
        # A JSON integer may exceed any float, and bool is a subclass of int.
        if not (value is None or type(value) is float or (type(value) is int and abs(value) < _LONGEST)):
            raise ValueError(f"{name} has a value that is neither a number nor null")
    return [math.nan if value is None or not math.isfinite(value) else float(value) for value in values]


def _mean_and_error(sums: Tensor, counts: Tensor) -> MeanAndError:
    # Of [sequences, …], over tokens: m = Σ s / Σ c, and its standard error over sequences, a ratio estimator since
    # label counts differ: √(n / (n − 1) · Σ (s − m c)²) / Σ c; NaN for 0 / 0 and for n = 1.
    number, labels = len(sums), counts.sum(0)
    # Of one sequence the squares are 0 up to rounding, and rounding over 0 would be infinite.
    scale = number / (number - 1) if number > 1 else math.nan
    mean = sums.sum(0) / labels
    squares = (sums - mean * counts).square().sum(0)
    return mean, (squares * scale).sqrt() / labels


def weighted(parts: Sequence[MeanAndError], weights: Sequence[float]) -> MeanAndError:
    """Weighted mean of independent parts, and its error."""
    shares = [weight / sum(weights) for weight in weights]
    mean: Any = sum(share * mean for share, (mean, _) in zip(shares, parts, strict=True))
    error: Any = sum((share * error) ** 2 for share, (_, error) in zip(shares, parts, strict=True))
    return mean, error.sqrt()
