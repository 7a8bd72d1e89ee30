"""Consecutive queries of a sequence and the keys that each of them reads.

A query reads the keys from the start of its document, or from `window` − 1 tokens before it if that is later, up to its
own. So one position per query describes every mask here: the first key that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype


@dataclass(frozen=True)
class Span:
    """Queries [start, stop) of a sequence."""

    start: int
    stop: int
    borders: Tensor | None = None  # [documents + 1] int64 on the CPU, of the whole sequence; None: one document
    window: int | None = None  # keys that a query reads at most, itself among them; None: no limit

    @property
    def first_key(self) -> int:
        """Position of the first key that any of these queries reads."""
        # It never falls, so one query is enough.
        return int(self.part(self.start, self.start + 1).first_keys()) if self.stop > self.start else self.start

    def first_keys(self) -> Tensor:
        """[queries] int64 on the CPU: position of the first key that each query reads; it never falls."""
        positions = torch.arange(self.start, self.stop)
        first = torch.zeros_like(positions)
        if self.borders is not None:
            first = self.borders[torch.searchsorted(self.borders, positions, right=True) - 1]
        return first if self.window is None else torch.maximum(first, positions - (self.window - 1))

    def inner_borders(self) -> list[int]:
        """Positions at which documents begin among these queries, the first query's not counted."""
        if self.borders is None:
            return []
        return self.borders[(self.borders > self.start) & (self.borders < self.stop)].tolist()

    def part(self, start: int, stop: int) -> Span:
        """The queries [start, stop) of these."""
        return Span(start, stop, self.borders, self.window)

    def visible(self, key_start: int, key_stop: int, device: torch.device) -> Tensor:
        """[queries, keys] bool: which keys [key_start, key_stop) each query reads."""
        keys = torch.arange(key_start, key_stop, device=device)
        positions = torch.arange(self.start, self.stop, device=device)
        first = self.first_keys().to(device)
        return (keys >= first[:, None]) & (keys <= positions[:, None])


class Attended(NamedTuple):
    """Attention of a span to some keys."""

    o: Tensor  # [B, N, H, V], softmax over these keys; 0 for a query that reads none of them
    lse: Tensor  # [B, H, N] fp32 (fp64 for fp64), log of the sum of exp(scores) over them; −inf for such a query

    @classmethod
    def by_no_keys(cls, q: Tensor, v: Tensor) -> Self:
        """What queries [B, N, H, D] attend to where they read none of the keys."""
        batch, num_queries, heads, _ = q.shape
        lse = q.new_full((batch, heads, num_queries), -torch.inf, dtype=accumulation_dtype(q.dtype))
        return cls(q.new_zeros(batch, num_queries, heads, v.shape[3]), lse)
