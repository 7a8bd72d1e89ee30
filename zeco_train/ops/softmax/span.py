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


class KernelCall(NamedTuple):
    """What a kernel computes of a span: sequences of queries, each with its own sequence of keys.

    The last query of a sequence is aligned with its last key, and `left` counts from there.
    """

    queries: slice  # of the span
    keys: slice  # of the given keys
    # Sequences among them, for one row of the batch.
    query_borders: tuple[int, ...]
    key_borders: tuple[int, ...]
    causal: bool  # the keys end with the queries; else they are before all queries
    left: int  # keys before its aligned key that a query reads; −1: all


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

    def call(self, key_start: int, key_stop: int) -> KernelCall | None:
        """The pairs with keys [key_start, key_stop), which may not begin or end among the queries; None: no pair."""
        first = max(self.first_key, key_start)
        if first >= min(key_stop, self.stop):
            return None
        if key_start > self.start or self.start < key_stop < self.stop:
            among = f"begin or end among the queries {self.start} to {self.stop}"
            raise ValueError(f"keys {key_start} to {key_stop} {among}")
        if key_stop >= self.stop:
            inner = self.inner_borders()
            queries = 0, *(border - self.start for border in inner), self.stop - self.start
            keys = 0, *(border - first for border in inner), self.stop - first
            left = -1 if self.window is None else self.window - 1
            part = slice(first - key_start, self.stop - key_start)
            return KernelCall(slice(0, queries[-1]), part, queries, keys, True, left)
        # Keys before all queries: only the first document's queries read them, of which a window leaves the first ones.
        stop = next(iter(self.inner_borders()), self.stop)
        left = -1
        if self.window is not None:
            stop = min(stop, key_stop + self.window - 1)
            left = key_stop - stop + self.window - 1
        read, size = slice(first - key_start, key_stop - key_start), stop - self.start
        return KernelCall(slice(0, size), read, (0, size), (0, key_stop - first), False, left)

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

    @classmethod
    def merged(cls, a: Self, b: Self) -> Self:
        """Attention to the keys of both, in the dtype of the log-sum-exp; each query reads some of a's."""
        lse = torch.logaddexp(a.lse, b.lse)
        weights = ((x.lse - lse).exp().mT.unsqueeze(-1) for x in (a, b))
        o, more = (x.o.to(lse.dtype) * weight for x, weight in zip((a, b), weights, strict=True))
        return cls(o + more, lse)


class AttendedHeads(NamedTuple):
    """Attention of a rank's tokens, of which it has computed H / P heads of all ranks' tokens, M in all."""

    o: Tensor  # [B, T, H, V], of the rank's tokens
    lse: Tensor  # [B, H / P, M], of its heads, as the tensors below
    q: Tensor
    k: Tensor
    v: Tensor
    o_of_heads: Tensor
