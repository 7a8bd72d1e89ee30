"""Activation recomputation in the backward pass.

`torch.utils.checkpoint` would repeat a block's forward pass unchanged, scan over ranks included: twice the
communication, in an order that need not be the same on all ranks. Here the state that a layer received is kept and
replayed in the second pass, which communicates nothing.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeco_train.ops.seam import Boundary, Place


class Block(Protocol):
    """A block that can be recomputed."""

    def __call__(
        self, x: Tensor, place: Place, boundary: Boundary, is_read: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map x [B, T, D] → y [B, T, D], received, carry_out. With `is_read=False` only y's gradients are valid."""
        ...


class Recompute(Enum):
    """What the backward pass recomputes: nothing; the MLPs; or whole blocks, of which then only the inputs are kept.

    States received from other ranks are always kept.
    """

    none = "none"
    selective = "selective"
    full = "full"


def recomputed(block: Block, x: Tensor, place: Place, boundary: Boundary) -> tuple[Tensor, Tensor, Tensor]:
    """`block(x, place, boundary)`, keeping only x and states for the backward pass.

    Args:
        block: deterministic; only x, `boundary.carry_in` and parameters need gradients.
        x: [B, T, D], requires grad.
        place: of the tokens; the caller keeps its scan alive.
        boundary: states at the boundaries of the layer's tokens.

    Returns:
        y [B, T, D], received and carry_out of the block.
    """
    return _Recomputed.apply(block, x, place, *boundary)


class _Recomputed(torch.autograd.Function):
    """Forward: the block without autograd. Backward: the block once more, with its state replayed, then its backward.

    The inner backward pass accumulates the parameters' gradients in `.grad` as usual.
    """

    @staticmethod
    def forward(ctx: Any, block: Block, x: Tensor, place: Place, *states: Any) -> tuple[Tensor, Tensor, Tensor]:
        boundary = Boundary(*states)
        y, received, carry_out = block(x, place, boundary)
        incoming_state = received if boundary.incoming_state is None else boundary.incoming_state
        ctx.save_for_backward(x, incoming_state, boundary.carry_in, place.pieces)
        ctx.block, ctx.scan, ctx.want_carry = block, place.scan, boundary.want_carry
        ctx.mark_non_differentiable(received)
        # Undefined gradients stay None: an output without gradient is left out of the inner backward pass.
        ctx.set_materialize_grads(False)
        return y, received, carry_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, _: None, dcarry_out: Tensor | None) -> tuple[Any, ...]:
        x, incoming_state, carry_in, pieces = ctx.saved_tensors
        # A new leaf: the inner backward pass stops here, and its `.grad` is returned to the outer one.
        x = x.detach().requires_grad_()
        if carry_in is not None:
            # Index 4: carry_in, by its position among the arguments of `forward`.
            carry_in = carry_in.detach().requires_grad_(ctx.needs_input_grad[4])
        with torch.enable_grad():
            place = Place(ctx.scan, pieces)
            y, _, carry_out = ctx.block(x, place, Boundary(incoming_state, carry_in, ctx.want_carry), is_read=False)
        pairs = [(y, dy), (carry_out, dcarry_out)]
        outputs, grads = zip(*((output, grad) for output, grad in pairs if grad is not None), strict=True)
        torch.autograd.backward(outputs, grads)
        dcarry_in = None if carry_in is None else carry_in.grad
        return None, x.grad, None, None, dcarry_in, None
