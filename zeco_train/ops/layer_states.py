"""A layer's states at the borders of its tokens, and those of all layers at the borders of a segment.

Segments of a sequence in time, each over all ranks, go through the model one after another, with the memory of one,
exact gradients, and a second forward pass (docs/mathematics.md):

    forward, without autograd, segments 0 … M−2       carry_out of one is carry_in of the next; each layer's R is kept
    forward with autograd and backward, M−1 … 0       R is replayed; the gradient of carry_in is that of the carry_out
                                                      of the segment before
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class StateInput(NamedTuple):
    """One of a layer's states before its tokens; see `zeco_train.ops.mix.mix`, `zeco_train.ops.attend.attend_at`."""

    incoming_state: Tensor | None = None
    carry_in: Tensor | None = None
    want_carry: bool = False


class StateOutput(NamedTuple):
    """One of a layer's states, as received from other ranks and passed on."""

    received: Tensor  # [B, H, K, V], R, for a later replay; [0] in a replay
    carry_out: Tensor  # [B, H, K, V], the state after the whole sequence; [0] unless it was wanted


@dataclass
class LayerStates:
    """The states at the borders of one segment, [B, H, K, V] each, in one list: layer by layer, all of a layer's."""

    incoming: Sequence[Tensor] | None = None  # R of the first pass, for replay; None in a first pass
    carry_in: Sequence[Tensor] | None = None  # before the segment; None at the start of a sequence
    want_carry: bool = False  # the states after the segment are needed
    # Appended by the layers: R, and the states after the segment.
    received: list[Tensor] = field(default_factory=list)
    carry_out: list[Tensor] = field(default_factory=list)

    def state_inputs(self, first: int, count: int) -> tuple[StateInput, ...]:
        """The inputs of a layer's states: `count` of the list, from `first` on."""
        own = slice(first, first + count)
        incoming, carries = ([None] * count if x is None else x[own] for x in (self.incoming, self.carry_in))
        return tuple(StateInput(*pair, want_carry=self.want_carry) for pair in zip(incoming, carries, strict=True))

    def keep(self, state_output: StateOutput) -> None:
        self.received.append(state_output.received)
        self.carry_out.append(state_output.carry_out)
