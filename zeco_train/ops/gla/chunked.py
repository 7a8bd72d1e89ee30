"""Chunked gated linear attention in PyTorch: the phases of one rank, forward and backward (docs/mathematics.md).

Phases before the scans, and beside them, are plain functions of tensors: no autograd, no communication. The passes
combine them around the exclusive scans over ranks, of (S_loc, G_tot) for R and of (D_loc, G_tot) in reverse for D_in:

    forward     local_states → scan | intra_scores | R → outputs
    backward    local_state_grads → scan | local_states again, intra_grads | D_in → gradients of the operands

q, k, g [B, T, H, K]; v, o, do [B, T, H, V], g fp32 or fp64; by chunks [N, B, H, C, …]. R, D_in [B, H, K, V]. `doc_ids`
as in `zeco_train.ops.position`. Arithmetic and states are fp64 if v is, else fp32.

The chunkwise form is that of Yang et al. 2024 (arXiv 2312.06635, section 4.2 and appendix C); its split over ranks is
ZeCO's. Time and memory are linear in T: per chunk a state, at most 64 × 64 scores, and a few copies of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.chunks import (
    BoundaryStates,
    ChunkDecays,
    accumulate_states,
    add_later_tokens,
    chunk_decays,
    chunk_decays_from_start,
    chunk_log_decays,
    chunk_size,
    matrices,
    to_chunks,
    to_tokens,
)
from zeco_train.ops.pairs import own_scores, pair_grads, pair_scores
from zeco_train.ops.passes import BackwardBase, ForwardBase, Passes, check_state, keeps_states
from zeco_train.ops.position import find_restarts


class ChunkStates(NamedTuple):
    """States at the boundaries of a rank's chunks from a zero start, in the accumulation dtype."""

    boundaries: BoundaryStates  # with states [N + 1, B, H, K, V], log_decays [N + 1, B, H, K, 1]
    state: Tensor  # [B, H, K, V], S_loc: a copy, since a scan may read it after the states are overwritten
    log_decay: Tensor  # [B, H, K], G_tot, a copy as well
    decays: ChunkDecays  # [N, B, H, C, K]
    values: Tensor  # [N·B·H, C, V], v by chunks


class ChunkStateGrads(NamedTuple):
    """Gradients of the states at the boundaries from a zero end; that at the end of chunk n is number n + 1."""

    boundaries: BoundaryStates
    state_grad: Tensor  # [B, H, K, V], D_loc, a copy
    output_grads: Tensor  # [N·B·H, C, V], do by chunks


class IntraGrads(NamedTuple):
    """Gradients through the token pairs inside chunks: dq, dk [N, B, H, C, K], dv [N, B, H, C, V]."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def local_states(k: Tensor, v: Tensor, g: Tensor, doc_ids: Tensor | None) -> ChunkStates:
    """S[0] = 0,    S[n+1] = exp(Σ g over chunk n) ⊙ S[n] + Σ_j (decay after j in chunk n ⊙ k_j) v_jᵀ."""
    dtype = accumulation_dtype(v.dtype)
    decays = chunk_decays(g, doc_ids, dtype)
    keys = decays.to_end * to_chunks(k, dtype)
    values = matrices(to_chunks(v, dtype))
    boundaries = accumulate_states(
        keys,
        values.view(*keys.shape[:-1], -1),
        decays.total[..., None],
        chunk_log_decays(g, doc_ids, dtype)[..., None],
        reverse=False,
    )
    states, log_decays = boundaries.states, boundaries.log_decays
    return ChunkStates(boundaries, states[-1].clone(), log_decays[-1, ..., 0].clone(), decays, values)


def local_state_grads(q: Tensor, do: Tensor, g: Tensor, doc_ids: Tensor | None, scale: float) -> ChunkStateGrads:
    """dS[N] = 0,    dS[n] = exp(Σ g over chunk n) ⊙ dS[n+1] + scale · Σ_i (decay through i in chunk n ⊙ q_i) do_iᵀ."""
    dtype = accumulation_dtype(do.dtype)
    from_start = chunk_decays_from_start(g, doc_ids, dtype)
    queries = (from_start * to_chunks(q, dtype)).mul_(scale)
    output_grads = matrices(to_chunks(do, dtype))
    boundaries = accumulate_states(
        queries,
        output_grads.view(*queries.shape[:-1], -1),
        from_start[..., -1, :, None],
        chunk_log_decays(g, doc_ids, dtype)[..., None],
        reverse=True,
    )
    return ChunkStateGrads(boundaries, boundaries.states[0].clone(), output_grads)


def intra_scores(q: Tensor, k: Tensor, g: Tensor, doc_ids: Tensor | None, scale: float) -> Tensor:
    """A_ij = scale · Σ_K q_i ⊙ k_j ⊙ exp(g_{j+1} + … + g_i) for j <= i without a restart in (j, i], else 0.

    [N, B, H, C, C] in the accumulation dtype; rows are queries.
    """
    dtype = accumulation_dtype(q.dtype)
    return pair_scores(to_chunks(q, dtype), to_chunks(k, dtype), g, doc_ids).mul_(scale)


def intra_grads(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, do: Tensor, doc_ids: Tensor | None, scale: float
) -> IntraGrads:
    """The intra-chunk parts of dq, dk and dv.

    dA = scale · do vᵀ,    dq_i = Σ_j dA_ij k_j ⊙ decay_ij,    dk_j = Σ_i dA_ij q_i ⊙ decay_ij,    dv = Aᵀ do
    """
    dtype = accumulation_dtype(v.dtype)
    queries, keys = to_chunks(q, dtype), to_chunks(k, dtype)
    output_grads = matrices(to_chunks(do, dtype))
    score_grads = torch.bmm(output_grads, matrices(to_chunks(v, dtype)).mT).mul_(scale)
    scores, score_grads = own_scores(queries, keys), score_grads.view(*queries.shape[:-1], -1)
    dq, dk = pair_grads(queries, keys, score_grads, g, doc_ids, scores)
    dv = torch.bmm(matrices(scores.mul_(scale)).mT, output_grads)
    return IntraGrads(dq, dk, dv.view(*queries.shape[:-1], -1))


class _GlaForward(ForwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        self._q, self._k, self._v, self._g = operands
        self._states = local_states(self._k, self._v, self._g, self.doc_ids)
        self.state, self.transition = self._states.state, self._states.log_decay

    def overlap(self) -> None:
        self._scores = intra_scores(self._q, self._k, self._g, self.doc_ids, self.scale)

    def outputs(self, incoming_state: Tensor) -> Tensor:
        # o_i = scale · (q_i ⊙ decay through i in its chunk)ᵀ S[n] + Σ_j A_ij v_j, with the true S[n].
        check_state(incoming_state, "incoming_state", self.state.shape)
        states = self._states.boundaries.take_corrected(incoming_state)
        if keeps_states():
            self.saved = (states,)
        queries = self._states.decays.from_start * to_chunks(self._q, states.dtype)
        o = torch.bmm(matrices(self._scores), self._states.values)
        o.baddbmm_(matrices(queries), matrices(states[:-1]), alpha=self.scale)
        return to_tokens(o.view(*self._scores.shape[:-1], -1), self._v.shape[1], self._v.dtype)


class _GlaBackward(BackwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        self._q, self._k, self._v, self._g = operands
        self._grads = local_state_grads(self._q, self.do, self._g, self.doc_ids, self.scale)
        self.state_grad = self._grads.state_grad

    def overlap(self) -> None:
        if self.saved:
            dtype = accumulation_dtype(self._v.dtype)
            self._decays = chunk_decays(self._g, self.doc_ids, dtype)
            self._values = matrices(to_chunks(self._v, dtype))
        else:
            self._states = local_states(self._k, self._v, self._g, self.doc_ids)
            self._decays, self._values = self._states.decays, self._states.values
        self._intra = intra_grads(self._q, self._k, self._v, self._g, self.do, self.doc_ids, self.scale)

    # From the true states and their true gradients, which overwrite those of the chunks:
    #
    #     dq_i += scale · S[n] do_i ⊙ decay through i,    dk_j += dS[n+1] v_j ⊙ decay after j,
    #     dv_j += dS[n+1]ᵀ (k_j ⊙ decay after j),
    #     dg_t = Σ_{i >= t in the chunk} (q_i ⊙ dq_i − k_i ⊙ dk_i) + Σ_V S[n+1] ⊙ dS[n+1]
    #
    # dg is a difference of sums: its rounding errors are relative to q ⊙ dq, however small the decays make dg itself.
    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        chunk_grads, scale = self._grads, self.scale
        check_state(self.received, "incoming_state", chunk_grads.state_grad.shape)
        check_state(incoming_grad, "incoming_grad", chunk_grads.state_grad.shape)
        states = self.saved[0] if self.saved else self._states.boundaries.take_corrected(self.received)
        grads = chunk_grads.boundaries.take_corrected(incoming_grad)
        queries, keys = to_chunks(self._q, states.dtype), to_chunks(self._k, states.dtype)
        dq, dk, dv, decays = *self._intra, self._decays
        seen = torch.bmm(chunk_grads.output_grads, matrices(states[:-1]).mT).view(dq.shape)
        dq.addcmul_(seen, decays.from_start, value=scale)
        reached = torch.bmm(self._values, matrices(grads[1:]).mT).view(dk.shape)
        dk.addcmul_(reached, decays.to_end)
        dv.view(-1, *dv.shape[-2:]).baddbmm_(matrices(decays.to_end * keys), matrices(grads[1:]))
        token_terms = dq.mul(queries).addcmul_(keys, dk, value=-1.0)
        # The last use of both: they are the largest tensors here, so the product overwrites the one that is never kept.
        boundary_terms = grads[1:].mul_(states[1:]).sum(-1)
        # The boundary term has the effect of the tokens after the chunk, on this rank and on later ones; without it dg
        # is wrong on every rank but the last. It enters at the chunk's last token, and the sum over later tokens, which
        # ends before a restart, hands it to all of them.
        token_terms[..., -1, :] += boundary_terms
        dg = add_later_tokens(token_terms, self.doc_ids)
        pairs = zip((dq, dk, dv, dg), (self._q, self._k, self._v, self._g), strict=True)
        dq, dk, dv, dg = (to_tokens(grad, x.shape[1], x.dtype) for grad, x in pairs)
        if self.doc_ids is not None:
            # There the decay is 0 whatever g is.
            dg.masked_fill_(find_restarts(self.doc_ids)[:, None, None], 0.0)
        return dq, dk, dv, dg


def _saved_like(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if not keeps_states():
        return ()
    _, k, v, _ = operands
    boundaries = -(-k.shape[1] // chunk_size(k.shape[1])) + 1
    shape = boundaries, k.shape[0], k.shape[2], k.shape[3], v.shape[3]
    return (v.new_empty(shape, dtype=accumulation_dtype(v.dtype)),)


CHUNKED = Passes(_GlaForward, _GlaBackward, _saved_like)
