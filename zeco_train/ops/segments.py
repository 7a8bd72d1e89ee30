"""Sequences longer than memory: what crosses the borders of a segment (docs/mathematics.md).

All that a segment's tokens need of those before them is one state a layer, and all that they need of those after them
is its gradient. So the segments of a sequence go through the model one after another, each spread over all ranks:

    forward, without autograd, segments 0 … M−2       carry_out of one is carry_in of the next; each layer's R is kept
    forward with autograd and backward, M−1 … 0       R is replayed; the gradient of carry_in is that of the carry_out
                                                      of the segment before

The gradient is exact; memory is that of one segment. The price is a second forward pass, as with full recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from zeco_train.ops.seam import Boundary, Crossing


@dataclass
class LayerStates:
    """The states at the borders of one segment, [B, H, K, V] each, by layer.

    Attributes:
        incoming: R of the first pass, to be replayed; None in a first pass.
        carry_in: the states before the segment; None before a sequence.
        want_carry: whether the states after the segment are asked for.
        received, carry_out: R and the states after the segment, as the layers gave them.
    """

    incoming: Sequence[Tensor] | None = None
    carry_in: Sequence[Tensor] | None = None
    want_carry: bool = False
    received: list[Tensor] = field(default_factory=list)
    carry_out: list[Tensor] = field(default_factory=list)

    def boundary(self, layer: int) -> Boundary:
        """What the layer is to be told."""
        incoming, carry_in = (None if x is None else x[layer] for x in (self.incoming, self.carry_in))
        return Boundary(incoming, carry_in, self.want_carry)

    def keep(self, crossing: Crossing) -> None:
        """Take what the next layer gave."""
        self.received.append(crossing.received)
        self.carry_out.append(crossing.carry_out)
