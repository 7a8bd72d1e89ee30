"""Sequences longer than memory: states at segment boundaries (docs/mathematics.md).

A segment depends on the tokens before it only through one state per layer, and on those after it only through that
state's gradient. So the segments of a sequence go through the model one after another, each spread over all ranks:

    forward, without autograd, segments 0 … M−2       carry_out of one is carry_in of the next; each layer's R is kept
    forward with autograd and backward, M−1 … 0       R is replayed; the gradient of carry_in is that of the carry_out
                                                      of the segment before

The gradient is exact; peak memory is that of one segment. The cost is a second forward pass, as with full
recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from zeco_train.ops.seam import StateInput, StateOutput


@dataclass
class LayerStates:
    """The states at the borders of one segment, [B, H, K, V] each, in one list: layer by layer, all of a layer's.

    Attributes:
        incoming: R of the first pass, for replay; None in a first pass.
        carry_in: states before the segment; None at the start of a sequence.
        want_carry: whether the states after the segment are needed.
        received, carry_out: R and the states after the segment, appended by the layers.
    """

    incoming: Sequence[Tensor] | None = None
    carry_in: Sequence[Tensor] | None = None
    want_carry: bool = False
    received: list[Tensor] = field(default_factory=list)
    carry_out: list[Tensor] = field(default_factory=list)

    def state_inputs(self, first: int, count: int) -> tuple[StateInput, ...]:
        """The inputs of a layer's states: `count` of the list, from `first` on."""
        found = []
        for index in range(first, first + count):
            incoming, carry_in = (None if x is None else x[index] for x in (self.incoming, self.carry_in))
            found.append(StateInput(incoming, carry_in, self.want_carry))
        return tuple(found)

    def keep(self, state_output: StateOutput) -> None:
        """Append the next state."""
        self.received.append(state_output.received)
        self.carry_out.append(state_output.carry_out)
