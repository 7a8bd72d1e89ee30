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
    """One rank's forward pass."""

    state: Tensor  # [B, H, K, V], S_loc: this rank's contribution to the state after its tokens

    # A matrix is costly: it may be computed when first read, and is not read where no state passes through this rank.
    @property
    def transition(self) -> Tensor:
        """[B, H, K] or [B, H, K, K], how these tokens change an incoming state (`zeco_train.ops.seam`)."""

    def overlap(self) -> None:
        """Compute the scores inside chunks, which need no other rank."""

    def outputs(self, incoming_state: Tensor) -> Tensor:
        """O, [B, T, H, V] in the dtype of v, given R, [B, H, K, V]."""

    @property
    def saved(self) -> tuple[Tensor, ...]:
        """New tensors to save for the backward pass; read after `outputs`."""


class BackwardPass(Protocol):
    """One rank's backward pass."""

    state_grad: Tensor  # [B, H, K, V], D_loc: gradient of the incoming state from this rank's outputs alone

    def overlap(self) -> None:
        """Recompute the states and compute the gradients inside chunks, which need no other rank."""

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        """The gradient of each operand, shaped like the operand, given D_in, [B, H, K, V]."""


# (operands, scale, doc_ids) → the pass. Doc_ids are [T] for a batch of one (`zeco_train.ops.rows`), or None.
StartForward = Callable[[Sequence[Tensor], float, Tensor | None], ForwardPass]
# (operands, do [B, T, H, V], saved, incoming_state R [B, H, K, V] if needed, scale, doc_ids) → the pass.
StartBackward = Callable[
    [Sequence[Tensor], Tensor, Sequence[Tensor], Tensor | None, float, Tensor | None], BackwardPass
]


class Passes(NamedTuple):
    """An implementation of an operator on one rank, by the constructors of both passes.

    They compute the local state and transition, or the local state gradient. Operands are checked before
    (`Operator.check`); a received state of another shape raises a ValueError that names it.
    """

    forward: StartForward
    backward: StartBackward
    # Empty tensors like `ForwardPass.saved`, of the operands.
    saved_like: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] = lambda operands: ()
    # Positions of the operands that are not saved for the backward pass. The first tensors of `saved` take their place,
    # each of the shape and dtype of the operand.
    replaced: tuple[int, ...] = ()
    needs_incoming: bool = True  # the backward pass takes R


def check_state(state: Tensor, name: str, shape: torch.Size) -> None:
    """Raise a ValueError naming the state if its shape is not [B, H, K, V] = `shape`."""
    if state.shape != shape:
        raise ValueError(f"{name}: expected shape [B, H, K, V] = {list(shape)}, got {list(state.shape)}")


def check_step(first: str, num_tokens: int, state: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check the token and the state [B, H, K, V] of one step of generation, whose operands `Operator.step` checks.

    `first` is the name of the operand that has `num_tokens` tokens. A ValueError names the tensor that does not fit.
    """
    check_state(state, "state", torch.Size(shape))
    if num_tokens != 1:
        raise ValueError(f"{first}: expected one token of each sequence, got {num_tokens}")
    if state.dtype != dtype:
        raise ValueError(f"state: expected {dtype}, got {state.dtype}")
    if not state.is_contiguous():
        raise ValueError("state: expected a contiguous tensor, since it is updated in place")
