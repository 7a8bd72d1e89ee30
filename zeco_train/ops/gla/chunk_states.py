"""The states at the boundaries of chunks and their gradients: the phases before the scans over ranks.

A *boundary* is the place before a chunk or after the last one: N chunks have N + 1 boundaries, n = 0 … N.
The loops here are the only ones over chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.chunks import (
    ChunkDecays,
    chunk_decays,
    chunk_decays_from_start,
    chunk_log_decays,
    matrices,
    to_chunks,
)
from zeco_train.ops.passes import check_state


@dataclass(frozen=True)
class ChunkStates:
    """States at the boundaries of a rank's chunks from a zero start, fp32 (fp64 where the values are).

    Attributes:
        states: [N + 1, B, H, K, V], the state before each chunk, and the one after all of this rank's tokens.
        prefix: [N + 1, B, H, K], summed g of the chunks before each boundary, −inf after a restart; the last is G_tot.
        state: [B, H, K, V], S_loc, this rank's contribution to the state after its tokens: a copy of the last of
            `states`, since a scan may read it after they are overwritten.
        log_decay: [B, H, K], G_tot, log of the factor by which the incoming state survives this rank's tokens: a copy
            of the last of `prefix`, so the backward pass can drop `prefix`.
        decays: the decays inside each chunk. values: [N·B·H, C, V], v by chunks. Kept for outputs and gradients.
    """

    states: Tensor
    prefix: Tensor
    state: Tensor
    log_decay: Tensor
    decays: ChunkDecays
    values: Tensor

    def take_corrected(self, incoming_state: Tensor) -> Tensor:
        """[N + 1, B, H, K, V], the true states: S[n] + exp(G[n]) ⊙ R, for the incoming state R [B, H, K, V].

        They overwrite `states`, the largest tensor of the operator.
        """
        check_state(incoming_state, "incoming_state", self.state.shape)
        return self.states.addcmul_(self.prefix.exp()[..., None], incoming_state.to(self.states.dtype))


@dataclass(frozen=True)
class ChunkStateGrads:
    """Gradients with respect to the states at the boundaries of a rank's chunks, from a zero end.

    Attributes:
        grads: [N + 1, B, H, K, V], the part that comes from this rank's outputs. Those at the end of chunk n are
            `grads[n + 1]`; the last one is zero.
        suffix: [N + 1, B, H, K], summed g of the chunks after each boundary, −inf before a restart; the last is 0.
            Summed from the end: a difference of prefixes would lose digits, and is NaN at a restart.
        state_grad: [B, H, K, V], D_loc, gradient with respect to the incoming state from this rank's outputs alone: a
            copy of the first of `grads`, since a scan may read it after they are overwritten.
        output_grads: [N·B·H, C, V], do by chunks, kept for the gradients.
    """

    grads: Tensor
    suffix: Tensor
    state_grad: Tensor
    output_grads: Tensor

    def take_corrected(self, incoming_grad: Tensor) -> Tensor:
        """[N + 1, B, H, K, V], true gradients: dS[n] + exp(suffix[n]) ⊙ D_in, for D_in [B, H, K, V].

        They overwrite `grads`. Entry 0 is then D_p = D_loc + exp(G_tot) ⊙ D_in, with respect to the incoming state.
        """
        check_state(incoming_grad, "incoming_grad", self.state_grad.shape)
        return self.grads.addcmul_(self.suffix.exp()[..., None], incoming_grad.to(self.grads.dtype))


def local_states(k: Tensor, v: Tensor, g: Tensor, doc_ids: Tensor | None) -> ChunkStates:
    """Compute the states at all boundaries from a zero start: step 1 of the forward.

        S[0] = 0,    S[n+1] = exp(Σ g over chunk n) ⊙ S[n] + Σ_j (decay after j in chunk n ⊙ k_j) v_jᵀ

    Args:
        k: [B, T, H, K].
        v: [B, T, H, V].
        g: [B, T, H, K], fp32 or fp64, finite, at most 0.
        doc_ids: [T], see `zeco_train.ops.documents`; B must be 1 with them.
    """
    dtype = accumulation_dtype(v.dtype)
    decays = chunk_decays(g, doc_ids, dtype)
    keys = decays.to_end * to_chunks(k, dtype)
    values = matrices(to_chunks(v, dtype))
    num_chunks, batch, heads, _, key_dim = keys.shape
    states = keys.new_empty(num_chunks + 1, batch, heads, key_dim, v.shape[-1])
    states[0].zero_()
    # `matrices` of contiguous states is a view, so this writes into them.
    torch.bmm(matrices(keys).mT, values, out=matrices(states[1:]))
    for n, decay in enumerate(decays.total[..., None].unbind(0)):
        states[n + 1].addcmul_(decay, states[n])
    log_decays = chunk_log_decays(g, doc_ids, dtype)
    prefix = torch.cat([torch.zeros_like(log_decays[:1]), log_decays.cumsum(0)])
    return ChunkStates(states, prefix, states[-1].clone(), prefix[-1].clone(), decays, values)


def local_state_grads(q: Tensor, do: Tensor, g: Tensor, doc_ids: Tensor | None, scale: float) -> ChunkStateGrads:
    """Compute the gradients at all boundaries from a zero end: step 1 of the backward.

        dS[N] = 0,    dS[n] = exp(Σ g over chunk n) ⊙ dS[n+1] + scale · Σ_i (decay through i in chunk n ⊙ q_i) do_iᵀ

    Args:
        q: [B, T, H, K].
        do: [B, T, H, V], gradient of o.
        g: [B, T, H, K], fp32 or fp64, finite, at most 0.
        doc_ids: [T], see `zeco_train.ops.documents`; B must be 1 with them.
        scale: factor of the outputs.
    """
    dtype = accumulation_dtype(do.dtype)
    from_start = chunk_decays_from_start(g, doc_ids, dtype)
    queries = (from_start * to_chunks(q, dtype)).mul_(scale)
    output_grads = matrices(to_chunks(do, dtype))
    num_chunks, batch, heads, _, key_dim = queries.shape
    grads = queries.new_empty(num_chunks + 1, batch, heads, key_dim, do.shape[-1])
    grads[-1].zero_()
    # Into a view, as in `local_states`.
    torch.bmm(matrices(queries).mT, output_grads, out=matrices(grads[:-1]))
    total = from_start[..., -1, :, None]
    for n in reversed(range(num_chunks)):
        grads[n].addcmul_(total[n], grads[n + 1])
    log_decays = chunk_log_decays(g, doc_ids, dtype)
    suffix = torch.cat([log_decays.flip(0).cumsum(0).flip(0), torch.zeros_like(log_decays[:1])])
    return ChunkStateGrads(grads, suffix, grads[0].clone(), output_grads)
