"""Methods that cut the heads into parts: the messages of one part travel while another is computed.

Parts change no bit of a result, and no rank sends more. A method writes a pass over some heads as a generator, which
yields wherever it would wait for messages. All parts first send what they can; then each in turn waits, computes, and
sends its results, which arrive during the next part's compute.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from zeco_train.collectives.wire import Wire
from zeco_train.ops.softmax.span import Attended, AttendedHeads, Span
from zeco_train.sp.attention.method import ShardedAttention
from zeco_train.sp.attention.routes import Bounds

# Of a rank, from which on a part's compute is longer than the launches of its messages; an estimate, not measured.
LEAST_TOKENS = 8192
NUM_PARTS = 4

T = TypeVar("T")
# A pass over some heads: yields while its messages travel, returns its result.
Steps = Generator[None, None, T]


class PipelinedAttention(ShardedAttention):
    """A pass over parts of the heads: at most `num_parts`, or as many as pay."""

    def __init__(self, wire: Wire, *, num_parts: int | None = None) -> None:
        super().__init__(wire)
        self._num_parts = num_parts

    @abstractmethod
    def forward_steps(
        self, q: Tensor, k: Tensor, v: Tensor, span: Span, bounds: Bounds, scale: float
    ) -> Steps[Attended | AttendedHeads]:
        """`forward` of some heads."""

    @abstractmethod
    def backward_steps(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, span: Span, bounds: Bounds, scale: float
    ) -> Steps[tuple[Tensor, Tensor, Tensor]]:
        """`backward` of some heads."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, span: Span, bounds: Bounds, scale: float
    ) -> Attended | AttendedHeads:
        parts = zip(*(self._in_parts(x, k.shape[2], bounds) for x in (q, k, v)), strict=True)
        found = _in_turns([self.forward_steps(qp, kp, vp, span, bounds, scale) for qp, kp, vp in parts])
        return type(found[0])(*(_joined(part, 2 if part[0].dim() == 4 else 1) for part in zip(*found, strict=True)))

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, span: Span, bounds: Bounds, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse, key_heads = attended.lse.transpose(1, 2), do.shape[2] // q.shape[2] * k.shape[2]
        cut = (self._in_parts(x, key_heads, bounds) for x in (do, q, k, v, attended.o, lse))
        steps = [
            self.backward_steps(dop, qp, kp, vp, Attended(op, lsep.transpose(1, 2)), span, bounds, scale)
            for dop, qp, kp, vp, op, lsep in zip(*cut, strict=True)
        ]
        dq, dk, dv = (_joined(grads, 2) for grads in zip(*_in_turns(steps), strict=True))
        return dq, dk, dv

    def _in_parts(self, x: Tensor, key_heads: int, bounds: Bounds) -> Sequence[Tensor]:
        # [B, T, heads, …] in parts of the heads, those of queries as those of the keys that they read: as many for each
        # rank that the heads are spread over, since fewer heads of keys than ranks would be repeated.
        # The mean, which is the same on all ranks, whose shards may differ.
        tokens = (bounds[-1] - bounds[0]) // self.wire.size
        return x.chunk(num_parts(key_heads, self.heads_over, tokens, self.num_nodes, self._num_parts), 2)


def num_parts(key_heads: int, step: int, tokens: int, nodes: int, most: int | None = None) -> int:
    """Number of parts of `key_heads` heads, each a multiple of `step`; at most `most`, by default as many as pay.

    Within a node parts do not pay: NCCL's kernels take multiprocessors from the attention, whose kernels have fewer
    blocks for the same work. With four parts a forward and backward pass takes 1.10 to 1.16 times as long at 16k tokens
    a rank, 1.03 to 1.07 times at 64k (2 H200).
    """
    most = most or (NUM_PARTS if tokens >= LEAST_TOKENS and nodes > 1 else 1)
    return next(n for n in range(most, 0, -1) if n == 1 or key_heads % (n * step) == 0)


def _in_turns(steps: Sequence[Steps[T]]) -> list[T]:
    # Run all, each up to its next wait in turn; their results.
    found: dict[int, T] = {}
    while len(found) < len(steps):
        for index, each in enumerate(steps):
            if index not in found:
                try:
                    next(each)
                except StopIteration as end:
                    found[index] = end.value
    return [found[index] for index in range(len(steps))]


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    # A single part is not copied.
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
