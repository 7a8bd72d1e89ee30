"""Base class of the methods, and the method descriptor, the interface to the rest of the project."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from zeco_train.collectives.wire import Wire
from zeco_train.ops.softmax.attended import Attended
from zeco_train.ops.softmax.span import Span


class ShardedAttention(ABC):
    """An `AttentionMethod` over the ranks of a wire.

    Args:
        wire: of the ranks that share a sequence, in the order of their tokens; carries nothing else.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, span: Span, seq_len: int, scale: float) -> Attended:
        """See `zeco_train.ops.seam.AttentionMethod`."""

    @abstractmethod
    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, span: Span, seq_len: int, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `zeco_train.ops.seam.AttentionMethod`."""

    def spans(self, span: Span, seq_len: int) -> list[Span]:
        """The spans of all ranks, given that of this one.

        Raises:
            ValueError: this rank's tokens are not its share of the sequence.
        """
        size = self.wire.size
        borders = [seq_len * rank // size for rank in range(size + 1)]
        if (span.start, span.stop) != (first := borders[self.wire.rank], after := borders[self.wire.rank + 1]):
            has = f"{span.start} to {span.stop}"
            raise ValueError(
                f"attention over {size} ranks: rank {self.wire.rank} has tokens {has}, not {first} to {after}"
            )
        return [span.part(*pair) for pair in itertools.pairwise(borders)]


@dataclass(frozen=True, eq=False)
class MethodSpec:
    """Descriptor of a method, for settings, tables and plans.

    Attributes:
        name: as in `sp.attention=`.
        description: one line for `--help`.
        build: wire → the method.
        heads_problem: (heads of queries, heads of keys, ranks) → why they cannot be spread so, or None.
        elements_sent: (heads of queries, of keys, head dim, tokens of a rank, ranks) → sent per rank, forward.
        automatic: `auto` may choose it: all ranks have the same work.
    """

    name: str
    description: str
    build: Callable[[Wire], ShardedAttention]
    heads_problem: Callable[[int, int, int], str | None]
    elements_sent: Callable[[int, int, int, int, int], float]
    automatic: bool = True
