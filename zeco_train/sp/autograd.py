"""Gated linear attention over a sharded sequence: the one autograd Function that serves every backend.

The operator's phases (`zeco_train.ops`) are local to a rank; the only thing that crosses ranks is one exclusive scan
of states in the forward pass and one of state gradients, in reverse, in the backward pass (DESIGN, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeco_train import ops
from zeco_train.sp.base import SequenceShard


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    shard: SequenceShard,
    incoming_state: Tensor | None = None,
    carry_in: Tensor | None = None,
    want_carry: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Causal gated linear attention of this rank's tokens, exact over the whole sequence.

        S_t = exp(g_t) ⊙_K S_{t-1} + k_t v_tᵀ,    o_t = K^-1/2 · q_tᵀ S_t

    Args:
        q, k: [B, T, H, K], this rank's tokens; bf16, fp32 or fp64.
        v: [B, T, H, V], same dtype.
        g: [B, T, H, K], log-decay ≤ 0 and finite; fp32 (fp64 for fp64 inputs).
        shard: where these tokens lie, and the scan that joins them to the rest of the sequence.
        incoming_state: [B, H, K, V], the state R that a first forward pass received. It is replayed as a constant:
            the forward pass then communicates nothing, as recomputation requires. The backward pass still does.
        carry_in: [B, H, K, V], the state before the whole sequence: replicated over the ranks, zero if None. Its
            gradient is replicated too, never to be summed over ranks.
        want_carry: also return the state after the whole sequence. All ranks must agree.

    Returns:
        o, [B, T, H, V] in the dtype of v, and carry_out, [B, H, K, V], replicated, or None. With `incoming_state`
        the value of carry_out is not known here and is NaN: only its gradient edge is of use then.
    """
    return _GatedLinearAttention.apply(q, k, v, g, shard, incoming_state, carry_in, want_carry)


class _GatedLinearAttention(torch.autograd.Function):
    """Phases of one rank; `→` marks what crosses ranks.

    forward     local states → launch(S_loc, G_tot) | intra-chunk scores | wait → R, outputs, finish
    backward    local state gradients → launch(D_loc, G_tot, reverse) | states again, intra-chunk gradients
                | wait → D_in, input gradients, finish
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        shard: SequenceShard,
        incoming_state: Tensor | None,
        carry_in: Tensor | None,
        want_carry: bool,
    ) -> tuple[Tensor, Tensor | None]:
        phases = ops.select(q.device)
        scale = q.shape[-1] ** -0.5
        documents = shard.documents(q.shape[1], q.device)

        states = phases.local_states(k, v, g, documents)
        pending = None
        if incoming_state is None:
            pending = shard.scan.launch(states.state, states.log_decay, carry_in=carry_in, want_carry=want_carry)
        scores = phases.intra_scores(q, k, g, documents, scale)
        received = incoming_state if pending is None else pending.wait()
        o = phases.outputs(q, v, g, scores, states, received, documents, scale)
        carry_out = None
        if pending is not None:
            pending.finish()
            carry_out = pending.carry_out() if want_carry else None
        elif want_carry:
            carry_out = torch.full_like(states.state, torch.nan)

        ctx.save_for_backward(q, k, v, g, received, states.log_decay)
        ctx.shard, ctx.documents, ctx.scale = shard, documents, scale
        ctx.set_materialize_grads(False)
        return o, carry_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dcarry_out: Tensor | None) -> tuple[Any, ...]:
        q, k, v, g, received, log_decay = ctx.saved_tensors
        phases, documents, scale = ops.select(q.device), ctx.documents, ctx.scale
        wants_dcarry_in = ctx.needs_input_grad[6]
        do = torch.zeros_like(v) if do is None else do

        state_grads = phases.local_state_grads(q, do, g, documents, scale)
        pending = ctx.shard.scan.launch(
            state_grads.state_grad, log_decay, reverse=True, carry_in=dcarry_out, want_carry=wants_dcarry_in
        )
        states = phases.local_states(k, v, g, documents)
        intra = phases.intra_grads(q, k, v, g, do, documents, scale)
        incoming_grad = pending.wait()
        dq, dk, dv, dg = phases.input_grads(
            q, k, v, g, do, states, received, state_grads, incoming_grad, intra, documents, scale
        )
        pending.finish()
        dcarry_in = pending.carry_out() if wants_dcarry_in else None
        return dq, dk, dv, dg, None, None, dcarry_in, None
