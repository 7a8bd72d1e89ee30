"""The loss by position: what a model gains from more and more context, in log-spaced buckets over a sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# Up to here a bucket an octave, since few tokens lie there; then two.
_FINE_FROM = 16


def bucket_edges(seq_len: int) -> list[int]:
    """Borders of the buckets: 0, 1, 2, 4, 8, 16, 23, 32, 45, 64 … `seq_len`; bucket i is [edges[i], edges[i + 1])."""
    edges = [0, 1, 2, 4, 8]
    half_octaves = 2 * int(math.log2(max(seq_len, 2))) + 2
    edges += [round(_FINE_FROM * 2 ** (step / 2)) for step in range(half_octaves)]
    # The last one takes in what would be a sliver of a bucket.
    return [edge for edge in edges if edge <= seq_len / 2**0.25] + [seq_len]


@dataclass(frozen=True)
class PositionLosses:
    """Mean token losses by position, in nats.

    Attributes:
        edges: [buckets + 1], positions in the sequence from 0.
        losses: [buckets].
        errors: [buckets], standard errors of the losses, from how sequences differ; None with one sequence only.
    """

    edges: list[int]
    losses: list[float]
    errors: list[float] | None

    @classmethod
    def of_sums(cls, edges: Sequence[int], sums: Tensor) -> PositionLosses:
        """From the summed losses of each sequence in each bucket, [sequences, buckets]."""
        means = sums.cpu() / torch.tensor([after - before for before, after in pairwise(edges)])
        errors = (means.std(0) / math.sqrt(len(means))).tolist() if len(means) > 1 else None
        return cls(list(edges), means.mean(0).tolist(), errors)

    @classmethod
    def weighted(cls, parts: Sequence[PositionLosses], weights: Sequence[float]) -> PositionLosses:
        """The mean of several stores' losses, with their weights."""
        shares = torch.tensor([weight / sum(weights) for weight in weights], dtype=torch.float64)
        losses = (shares @ torch.tensor([part.losses for part in parts], dtype=torch.float64)).tolist()
        known = [part.errors for part in parts if part.errors is not None]
        errors = None
        if len(known) == len(parts):
            errors = (shares[:, None] * torch.tensor(known, dtype=torch.float64)).norm(dim=0).tolist()
        return cls(parts[0].edges, losses, errors)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> PositionLosses:
        """From what `as_dict` gave, where JSON may have put null for NaN. Raises KeyError or TypeError for others."""
        losses, errors = (_numbers(record[name]) for name in ("losses", "errors"))
        if losses is None:
            raise TypeError("no losses")
        return cls(list(record["edges"]), losses, errors)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"edges": self.edges, "losses": self.losses, "errors": self.errors}


def _numbers(values: Sequence[float | None] | None) -> list[float] | None:
    return None if values is None else [math.nan if value is None else float(value) for value in values]


class PositionSums:
    """Sums of token losses, by sequence and bucket, of this rank's tokens.

    Args:
        num_sequences: to be added in all.
        seq_len: of each.
        device: of the losses.
    """

    def __init__(self, num_sequences: int, seq_len: int, device: torch.device) -> None:
        self.edges = bucket_edges(seq_len)
        self.sums = torch.zeros(num_sequences, len(self.edges) - 1, dtype=torch.float64, device=device)

    def add(self, sequences: Sequence[int], offset: int, losses: Tensor) -> None:
        """Add a shard of some sequences.

        Args:
            sequences: B numbers, from 0.
            offset: position of the shard's first token in each sequence.
            losses: [B, T].
        """
        stop = offset + losses.shape[1]
        for bucket, (before, after) in enumerate(pairwise(self.edges)):
            first, beyond = max(before, offset) - offset, min(after, stop) - offset
            if first < beyond:
                # Sums of slices: adding by index is not deterministic on GPUs.
                self.sums[list(sequences), bucket] += losses[:, first:beyond].sum(1, dtype=torch.float64)
