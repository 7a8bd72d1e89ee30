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
        g: [B, T, H, K], log-decay ≤ 0 and finite; fp32 (fp64 for fp64 inputs). Not checked, for that would wait for
            the device: positive values give wrong results on GPUs.
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
    # Triton and streams take the current device, which need not be that of the tokens. Autocast would change the dtypes
    # of some of the products.
    with torch.cuda.device_of(q), torch.autocast(q.device.type, enabled=False):
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
        scale = q.shape[-1] ** -0.5
        documents = shard.documents(q.shape[1], q.device)

        passes = ops.select(q, g)
        local = passes.forward(q, k, v, g, documents, scale)
        pending = None
        if incoming_state is None:
            pending = shard.scan.launch(local.state, local.log_decay, carry_in=carry_in, want_carry=want_carry)
        local.overlap()
        carry_out = None
        if pending is not None:
            o = local.outputs(pending.wait())
            pending.finish()
            carry_out = pending.carry_out() if want_carry else None
        else:
            assert incoming_state is not None
            o = local.outputs(incoming_state)
            carry_out = torch.full_like(local.state, torch.nan) if want_carry else None

        ctx.save_for_backward(q, k, v, local.log_decay, *local.saved)
        ctx.shard, ctx.documents, ctx.scale, ctx.passes = shard, documents, scale, passes
        ctx.set_materialize_grads(False)
        return o, carry_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dcarry_out: Tensor | None) -> tuple[Any, ...]:
        q, k, v, log_decay, *saved = ctx.saved_tensors
        wants_dcarry_in = ctx.needs_input_grad[6]
        do = torch.zeros_like(v) if do is None else do

        # a backward pass may be run inside a region of autocast, too
        with torch.autocast(q.device.type, enabled=False):
            local = ctx.passes.backward(q, k, v, do, tuple(saved), ctx.documents, ctx.scale)
            pending = ctx.shard.scan.launch(
                local.state_grad, log_decay, reverse=True, carry_in=dcarry_out, want_carry=wants_dcarry_in
            )
            local.overlap()
            dq, dk, dv, dg = local.input_grads(pending.wait())
            pending.finish()
        dcarry_in = pending.carry_out() if wants_dcarry_in else None
        return dq, dk, dv, dg, None, None, dcarry_in, None
