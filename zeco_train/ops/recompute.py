"""Activation recomputation in the backward pass.

`torch.utils.checkpoint` would repeat a block's forward pass unchanged, scan over ranks included: twice the
communication, in an order that need not be the same on all ranks. Here the state that a layer received is kept and
replayed in the second pass, which communicates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.position import SequencePosition


class Recomputable(Protocol):
    """A block: x [B, T, D] → y [B, T, D], then received and carry_out of each state."""

    def __call__(
        self,
        x: Tensor,
        position: SequencePosition,
        state_inputs: Sequence[StateInput],
        shared: Tensor | None,
        output_needed: bool = True,
    ) -> tuple[Tensor, ...]:
        """With `output_needed=False` only y's gradients are valid."""
        ...


class Recompute(Enum):
    """What the backward pass recomputes.

    none: nothing. selective: each MLP with its norm, from its input (`Block._compute` in models/language_model.py).
    full: whole blocks, of which only the inputs are kept (`recomputed`). Received states are always kept.
    """

    none = "none"
    selective = "selective"
    full = "full"


def recomputed(
    block: Recomputable,
    x: Tensor,
    position: SequencePosition,
    state_inputs: Sequence[StateInput],
    shared: Tensor | None,
) -> tuple[Tensor, ...]:
    """`block(x, position, state_inputs, shared)`, keeping only x, `shared` and states for the backward pass.

    The block is deterministic; only x [B, T, D], `shared` (the layer's part of a parameter of the whole model), the
    state_inputs' `carry_in` and parameters need gradients. The caller keeps the position's `Exchange` alive.
    """
    incoming = (state_input.incoming_state for state_input in state_inputs)
    carries = (state_input.carry_in for state_input in state_inputs)
    want_carry = any(state_input.want_carry for state_input in state_inputs)
    return _Recomputed.apply(block, x, position, want_carry, shared, *incoming, *carries)


# Inputs of `_Recomputed.forward` before the states.
_BEFORE_STATES = 5


class _Recomputed(torch.autograd.Function):
    # Forward: the block without autograd. Backward: the block once more, with its states replayed, then its backward
    # pass, which accumulates the parameters' gradients in `.grad` as usual.

    @staticmethod
    def forward(
        ctx: Any,
        block: Recomputable,
        x: Tensor,
        position: SequencePosition,
        want_carry: bool,
        shared: Tensor | None,
        *states: Tensor | None,
    ) -> tuple[Tensor, ...]:
        count = len(states) // 2
        incoming, carries = states[:count], states[count:]
        y, *state_outputs = block(x, position, _state_inputs(incoming, carries, want_carry), shared)
        received = state_outputs[::2]
        kept = (new if old is None else old for new, old in zip(received, incoming, strict=True))
        ctx.save_for_backward(x, shared, *kept, *carries)
        ctx.block, ctx.position, ctx.want_carry = block, position, want_carry
        ctx.mark_non_differentiable(*received)
        # Undefined gradients stay None: an output without gradient is left out of the inner backward pass.
        ctx.set_materialize_grads(False)
        return y, *state_outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *dstate_outputs: Tensor | None) -> tuple[Any, ...]:
        x, shared, *states = ctx.saved_tensors
        count = len(states) // 2
        wanted = ctx.needs_input_grad
        # New leaves: the inner backward pass stops here, and their `.grad` is returned to the outer one.
        x = x.detach().requires_grad_()
        shared = None if shared is None else shared.detach().requires_grad_(wanted[_BEFORE_STATES - 1])
        carries = [
            None if carry is None else carry.detach().requires_grad_(is_wanted)
            for carry, is_wanted in zip(states[count:], wanted[_BEFORE_STATES + count :], strict=True)
        ]
        with torch.enable_grad():
            state_inputs = _state_inputs(states[:count], carries, ctx.want_carry)
            y, *state_outputs = ctx.block(x, ctx.position, state_inputs, shared, output_needed=False)
        pairs = [(y, dy), *zip(state_outputs[1::2], dstate_outputs[1::2], strict=True)]
        outputs, grads = zip(*((output, grad) for output, grad in pairs if grad is not None), strict=True)
        torch.autograd.backward(outputs, grads)
        dshared, *dcarries = (None if leaf is None else leaf.grad for leaf in (shared, *carries))
        return None, x.grad, None, None, dshared, *[None] * count, *dcarries


def _state_inputs(
    incoming: Sequence[Tensor | None], carries: Sequence[Tensor | None], want_carry: bool
) -> tuple[StateInput, ...]:
    return tuple(StateInput(state, carry, want_carry) for state, carry in zip(incoming, carries, strict=True))
