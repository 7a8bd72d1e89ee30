"""An operator, and the two passes of one rank as autograd drives them: what comes before the scan, beside it, after it.

    forward(operands, …)       → launch(state, transition)              | overlap() | wait → outputs(R)
    backward(operands, do, …)  → launch(state_grad, adjoint, reverse)   | overlap() | wait → operand_grads(D_in)

An implementation is a pair of such classes. Each object serves one pass and is used once, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from torch import Tensor


class ForwardPass(Protocol):
    """One rank's forward pass.

    Attributes:
        state: [B, H, K, V], S_loc: what this rank's tokens add to the state after them.
        transition: [B, H, K] or [B, H, K, K], how they change an incoming state (`zeco_train.ops.transition`).
    """

    state: Tensor
    transition: Tensor

    def overlap(self) -> None:
        """Do what needs no other rank: the scores inside chunks."""
        ...

    def outputs(self, incoming_state: Tensor) -> Tensor:
        """Make o, [B, T, H, V] in the dtype of v, given R, [B, H, K, V]."""
        ...

    @property
    def saved(self) -> tuple[Tensor, ...]:
        """New tensors for the backward pass, see `Passes`; asked for after `outputs`."""
        ...


class BackwardPass(Protocol):
    """One rank's backward pass.

    Attributes:
        state_grad: [B, H, K, V], D_loc: gradient with respect to the incoming state from this rank's outputs alone.
    """

    state_grad: Tensor

    def overlap(self) -> None:
        """Do what needs no other rank: states again, gradients inside chunks."""
        ...

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        """The gradient of each operand, in their order, like the operand, given D_in, [B, H, K, V]."""
        ...


# (operands, scale, pieces) → the pass, see `Passes`.
StartForward = Callable[[Sequence[Tensor], float, Tensor | None], ForwardPass]
# (operands, do, saved, incoming_state, scale, pieces) → the pass.
StartBackward = Callable[
    [Sequence[Tensor], Tensor, Sequence[Tensor], Tensor | None, float, Tensor | None], BackwardPass
]


def nothing_saved(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`Passes.saved_like` of passes that keep operands and R only."""
    del operands
    return ()


class Passes(NamedTuple):
    """An implementation of an operator on one rank.

    Both passes are started by what they are given, and make the local state and transition, or the local state
    gradients, at once:

    - operands, in the operator's order; to the backward pass without those in whose place the forward pass has saved
      something;
    - do, [B, T, H, V], the gradient of o, and what else the forward pass has saved;
    - incoming_state: R, [B, H, K, V], if it is needed;
    - scale: factor of the outputs;
    - pieces: [T], see `zeco_train.ops.documents`; None without documents.

    A shape or dtype that does not fit is a ValueError, whose message names the tensor.

    Attributes:
        forward, backward: the passes.
        saved_like: of the operands, empty tensors like `ForwardPass.saved`.
        replaced: positions of the operands that are not kept for the backward pass. As many tensors of `saved`, the
            first ones, are kept and given to it in their place, each of the shape and dtype of the operand.
        needs_incoming: the backward pass takes R.
    """

    forward: StartForward
    backward: StartBackward
    saved_like: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] = nothing_saved
    replaced: tuple[int, ...] = ()
    needs_incoming: bool = True


# recurrence(*operands, scale=K^-1/2, initial_state=0) → o, [B, T, H, V] in the dtype of v, and the state after the last
# token, [B, H, K, V] in fp64 or fp32; differentiable by autograd.
Recurrence = Callable[..., tuple[Tensor, Tensor]]


class Kind(Enum):
    """The kinds of transitions, see `zeco_train.ops.transition`."""

    diagonal = "diagonal"
    matrix = "matrix"


@dataclass(frozen=True)
class Operator:
    """What everybody else has to know of an operator.

    Attributes:
        operands: their names, in the order in which they are given; q, k, v first.
        kind: of its transition.
        select: the implementation for operands like these: the only place where a device or a dtype gets one. It takes
            those of a backward pass, too.
        naive: the recurrence, token by token: the oracle.
        step: of the operands of one token [B, 1, …] and the state, which it moves on in place: o, [B, 1, H, V].
        forward_flops: of H, K, V: FLOPs of the forward pass for one token.
        recomputed_flops: of H, K, V: FLOPs for one token that the backward pass computes a second time.
    """

    operands: tuple[str, ...]
    kind: Kind
    select: Callable[[Sequence[Tensor]], Passes]
    naive: Recurrence
    step: Callable[..., Tensor]
    forward_flops: Callable[[int, int, int], float]
    recomputed_flops: Callable[[int, int, int], float]

    def state_shape(self, operands: Sequence[Tensor]) -> tuple[int, int, int, int]:
        """(B, H, K, V)"""
        query, _, value, *_ = operands
        return value.shape[0], value.shape[2], query.shape[3], value.shape[3]

    def transition_shape(self, operands: Sequence[Tensor]) -> tuple[int, ...]:
        """(B, H, K) or (B, H, K, K)"""
        *outer, key_dim, _ = self.state_shape(operands)
        return (*outer, key_dim) if self.kind is Kind.diagonal else (*outer, key_dim, key_dim)
