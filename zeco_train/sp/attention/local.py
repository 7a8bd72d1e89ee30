"""Softmax attention on one rank that has the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zeco_train.ops.softmax.attended import Attended
from zeco_train.ops.softmax.attention import attend, attend_backward
from zeco_train.ops.softmax.span import Span


class LocalAttention:
    """An `AttentionMethod` over one rank; `deterministic` as of `ShardedAttention`."""

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def forward(self, q: Tensor, k: Tensor, v: Tensor, span: Span, bounds: Sequence[int], scale: float) -> Attended:
        """See `zeco_train.ops.seam.AttentionMethod`."""
        return attend(q, k, v, span, span.start, scale)

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attended: Attended,
        span: Span,
        bounds: Sequence[int],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `zeco_train.ops.seam.AttentionMethod`."""
        return attend_backward(do, q, k, v, attended, span, span.start, scale, self.deterministic)

    def gather(self, tensors: Sequence[Tensor], bounds: Sequence[int]) -> list[Tensor]:
        """See `zeco_train.ops.seam.AttentionMethod`."""
        del bounds
        return list(tensors)
