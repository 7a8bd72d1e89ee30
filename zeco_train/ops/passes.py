"""Interface of an operator's two passes on one rank: work before the scan, overlapping it, and after it.

    forward(operands, …)       → launch(state, transition)              | overlap() | wait → outputs(R)
    backward(operands, do, …)  → launch(state_grad, adjoint, reverse)   | overlap() | wait → operand_grads(D_in)

An implementation is a pair of such classes. Each object serves one pass and is used once, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class ForwardPass(Protocol):
    """One rank's forward pass.

    Attributes:
        state: [B, H, K, V], S_loc: this rank's contribution to the state after its tokens.
        transition: [B, H, K] or [B, H, K, K], how they change an incoming state (`zeco_train.ops.seam`). A matrix
            is costly: it may be computed when first read, and is not read where no state passes through this rank.
    """

    state: Tensor

    @property
    def transition(self) -> Tensor:
        """See the class."""
        ...

    def overlap(self) -> None:
        """Compute the scores inside chunks, which need no other rank."""
        ...

    def outputs(self, incoming_state: Tensor) -> Tensor:
        """Compute o, [B, T, H, V] in the dtype of v, given R, [B, H, K, V]."""
        ...

    @property
    def saved(self) -> tuple[Tensor, ...]:
        """New tensors to save for the backward pass, see `Passes`; called after `outputs`."""
        ...


class BackwardPass(Protocol):
    """One rank's backward pass.

    Attributes:
        state_grad: [B, H, K, V], D_loc: gradient with respect to the incoming state from this rank's outputs alone.
    """

    state_grad: Tensor

    def overlap(self) -> None:
        """Recompute the states and compute the gradients inside chunks, which need no other rank."""
        ...

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        """The gradient of each operand, in their order, shaped like the operand, given D_in, [B, H, K, V]."""
        ...


# (operands, scale, doc_ids) → the pass, see `Passes`.
StartForward = Callable[[Sequence[Tensor], float, Tensor | None], ForwardPass]
# (operands, do, saved, incoming_state, scale, doc_ids) → the pass.
StartBackward = Callable[
    [Sequence[Tensor], Tensor, Sequence[Tensor], Tensor | None, float, Tensor | None], BackwardPass
]


def nothing_saved(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`Passes.saved_like` of passes that save only operands and R."""
    del operands
    return ()


class Passes(NamedTuple):
    """An implementation of an operator on one rank.

    The constructors of both passes compute the local state and transition, or the local state gradients, from:

    - operands, in the operator's order; for the backward pass without those replaced by saved tensors;
    - do, [B, T, H, V], the gradient of o, and the saved tensors (backward pass only);
    - incoming_state: R, [B, H, K, V], if needed (backward pass only);
    - scale: factor of the outputs;
    - doc_ids: [T], see `zeco_train.ops.documents`, for a batch of one (`zeco_train.ops.rows`); None without documents.

    Operands are checked before (`zeco_train.ops.operator.Operator.check`); a received state of another shape raises a
    ValueError that names it.

    Attributes:
        forward, backward: the passes.
        saved_like: operands → empty tensors like `ForwardPass.saved`.
        replaced: positions of the operands that are not saved for the backward pass. The first tensors of `saved`, as
            many as these, are passed to it in their place, each of the shape and dtype of the operand.
        needs_incoming: the backward pass takes R.
    """

    forward: StartForward
    backward: StartBackward
    saved_like: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] = nothing_saved
    replaced: tuple[int, ...] = ()
    needs_incoming: bool = True


def check_state(state: Tensor, name: str, shape: torch.Size) -> None:
    """Raise a ValueError naming the state if its shape is not [B, H, K, V] = `shape`."""
    if state.shape != shape:
        raise ValueError(f"{name}: expected shape [B, H, K, V] = {list(shape)}, got {list(state.shape)}")


def check_step(first: str, num_tokens: int, state: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check the token and the state of one step of generation, whose operands `Operator.step` checks.

    Args:
        first: name of the operand with `num_tokens` tokens, of which there must be one.
        num_tokens: see `first`.
        state: updated in place.
        shape: [B, H, K, V] of the state.
        dtype: of the state.

    Raises:
        ValueError: naming the tensor.
    """
    check_state(state, "state", torch.Size(shape))
    if num_tokens != 1:
        raise ValueError(f"{first}: expected one token of each sequence, got {num_tokens}")
    if state.dtype != dtype:
        raise ValueError(f"state: expected {dtype}, got {state.dtype}")
    if not state.is_contiguous():
        raise ValueError("state: expected a contiguous tensor, since it is updated in place")
