"""Chunked gated linear attention in PyTorch: the phases of one rank, forward and backward (docs/mathematics.md).

Each phase is a plain function of tensors: no autograd, no communication. The passes combine them. A forward is

    chunk_states = local_states(k, v, g, doc_ids)
    R = exclusive scan of (chunk_states.state, chunk_states.log_decay) over the ranks
    scores = intra_scores(q, k, g, doc_ids, scale)                       # while the scan is under way
    o = outputs(q, v, g, scores, chunk_states, R, doc_ids, scale)

and a backward, with R saved and `chunk_states` recomputed,

    chunk_grads = local_state_grads(q, do, g, doc_ids, scale)
    D_in = exclusive scan of (chunk_grads.state_grad, chunk_states.log_decay) from the last rank down
    intra = intra_grads(q, k, v, g, do, doc_ids, scale)                  # while the scan is under way
    dq, dk, dv, dg = input_grads(q, k, v, g, do, chunk_states, R, chunk_grads, D_in, intra, doc_ids, scale)

Shapes: q, k, g [B, T, H, K]; v, o [B, T, H, V]; a state [B, H, K, V]; a log-decay [B, H, K]; T is any number of tokens.
q, k, v, do share a dtype; g is fp32 or fp64. Arithmetic and states are fp64 if v is, else fp32. `doc_ids` marks where
the state restarts (`zeco_train.ops.documents`); None means no restarts. Operands are checked before (`Operator.check`).

The chunkwise form is that of Yang et al. 2024 (arXiv 2312.06635, section 4.2 and appendix C); its split over ranks is
ZeCO's. Time and memory are linear in T: per chunk a state, at most 64 × 64 scores, and a few copies of its tokens.
The products of token pairs are those of `zeco_train.ops.pairs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.chunks import add_later_tokens, matrices, to_chunks, to_tokens
from zeco_train.ops.documents import find_restarts
from zeco_train.ops.gla.chunk_states import ChunkStateGrads, ChunkStates, local_state_grads, local_states
from zeco_train.ops.pairs import own_scores, pair_grads, pair_scores
from zeco_train.ops.passes import Passes


@dataclass(frozen=True)
class IntraGrads:
    """Gradients through the pairs of tokens inside chunks, [N, B, H, C, D] in the dtype of the states.

    Attributes:
        dq: D = K. dk: D = K. dv: D = V.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor


def intra_scores(q: Tensor, k: Tensor, g: Tensor, doc_ids: Tensor | None, scale: float) -> Tensor:
    """Compute the scores of the tokens of each chunk: step 3 of the forward.

        A_ij = scale · Σ_K q_i ⊙ k_j ⊙ exp(g_{j+1} + … + g_i)  for j <= i without a restart in (j, i],  else 0

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K].
        g: [B, T, H, K], fp32 or fp64, finite, at most 0.
        doc_ids: [T], see `zeco_train.ops.documents`; B must be 1 with them.
        scale: factor of the outputs.

    Returns:
        [N, B, H, C, C] in fp64 if q is fp64, else fp32; rows are queries.
    """
    dtype = accumulation_dtype(q.dtype)
    return pair_scores(to_chunks(q, dtype), to_chunks(k, dtype), g, doc_ids).mul_(scale)


def intra_grads(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, do: Tensor, doc_ids: Tensor | None, scale: float
) -> IntraGrads:
    """Compute the intra-chunk parts of dq, dk and dv: step 3 of the backward.

        dA = scale · do vᵀ,    dq_i = Σ_j dA_ij k_j ⊙ decay_ij,    dk_j = Σ_i dA_ij q_i ⊙ decay_ij,    dv = Aᵀ do

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K].
        v: [B, T, H, V].
        g: [B, T, H, K], fp32 or fp64.
        do: [B, T, H, V], gradient of o.
        doc_ids: [T], see `zeco_train.ops.documents`.
        scale: factor of the outputs.
    """
    dtype = accumulation_dtype(v.dtype)
    queries, keys = to_chunks(q, dtype), to_chunks(k, dtype)
    output_grads = matrices(to_chunks(do, dtype))
    score_grads = torch.bmm(output_grads, matrices(to_chunks(v, dtype)).mT).mul_(scale)
    scores, score_grads = own_scores(queries, keys), score_grads.view(*queries.shape[:-1], -1)
    dq, dk = pair_grads(queries, keys, score_grads, g, doc_ids, scores)
    dv = torch.bmm(matrices(scores.mul_(scale)).mT, output_grads)
    return IntraGrads(dq, dk, dv.view(*queries.shape[:-1], -1))


def outputs(
    q: Tensor,
    v: Tensor,
    g: Tensor,
    scores: Tensor,
    chunk_states: ChunkStates,
    incoming_state: Tensor,
    doc_ids: Tensor | None,
    scale: float,
) -> Tensor:
    """Compute the outputs: step 4 of the forward.

        S[n] += exp(G[n]) ⊙ R,    o_i = scale · (q_i ⊙ decay through i in its chunk)ᵀ S[n] + Σ_j A_ij v_j

    Args:
        q: [B, T, H, K].
        v: [B, T, H, V].
        g: [B, T, H, K], read only for its shape: its decays are in `chunk_states`.
        scores: A of `intra_scores`.
        chunk_states: of `local_states`; consumed: its `states` are overwritten.
        incoming_state: R, [B, H, K, V].
        doc_ids: [T], see `zeco_train.ops.documents`.
        scale: factor of the outputs.

    Returns:
        o: [B, T, H, V] in the dtype of v.

    Raises:
        ValueError: a received state of another shape.
    """
    dtype = accumulation_dtype(v.dtype)
    states = chunk_states.take_corrected(incoming_state)
    queries = chunk_states.decays.from_start * to_chunks(q, dtype)
    o = torch.bmm(matrices(scores), chunk_states.values)
    o.baddbmm_(matrices(queries), matrices(states[:-1]), alpha=scale)
    o = o.view(*scores.shape[:-1], -1)
    return to_tokens(o, v.shape[1], v.dtype)


def input_grads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    do: Tensor,
    chunk_states: ChunkStates,
    incoming_state: Tensor,
    chunk_grads: ChunkStateGrads,
    incoming_grad: Tensor,
    intra: IntraGrads,
    doc_ids: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of the inputs: step 4 of the backward.

        S[n] += exp(G[n]) ⊙ R,    dS[n] += exp(suffix[n]) ⊙ D_in
        dq_i += scale · S[n] do_i ⊙ decay through i,    dk_j += dS[n+1] v_j ⊙ decay after j,
        dv_j += dS[n+1]ᵀ (k_j ⊙ decay after j),
        dg_t = Σ_{i >= t in the chunk} (q_i ⊙ dq_i − k_i ⊙ dk_i) + Σ_V S[n+1] ⊙ dS[n+1]        (`_decay_grads`)

    dg is a difference of sums: its rounding errors are relative to q ⊙ dq, however small the decays make dg itself.

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K].
        v: [B, T, H, V].
        g: [B, T, H, K], fp32 or fp64.
        do: [B, T, H, V], gradient of o, in the dtype of v.
        chunk_states: of `local_states`; consumed: its `states` are overwritten.
        incoming_state: R, [B, H, K, V], of the forward.
        chunk_grads: of `local_state_grads`; consumed: its `grads` are overwritten.
        incoming_grad: D_in, [B, H, K, V], gradient with respect to this rank's final state.
        intra: of `intra_grads`; consumed: its tensors are overwritten.
        doc_ids: [T], see `zeco_train.ops.documents`.
        scale: factor of the outputs.

    Returns:
        dq, dk, dv, dg: shapes and dtypes of q, k, v, g.

    Raises:
        ValueError: a received state of another shape.
    """
    dtype = accumulation_dtype(v.dtype)
    states, grads = chunk_states.take_corrected(incoming_state), chunk_grads.take_corrected(incoming_grad)
    queries, keys = to_chunks(q, dtype), to_chunks(k, dtype)
    _add_state_terms(intra, keys, chunk_states, states, chunk_grads, grads, scale)
    dq, dk, dv = intra.dq, intra.dk, intra.dv
    token_terms = dq.mul(queries).addcmul_(keys, dk, value=-1.0)
    # The last use of both: they are the largest tensors here, so the product overwrites one.
    boundary_terms = states[1:].mul_(grads[1:]).sum(-1)
    dg = _decay_grads(token_terms, boundary_terms, doc_ids)
    dq, dk, dv, dg = (
        to_tokens(grad, x.shape[1], x.dtype) for grad, x in zip((dq, dk, dv, dg), (q, k, v, g), strict=True)
    )
    if doc_ids is not None:
        dg.masked_fill_(find_restarts(doc_ids)[:, None, None], 0.0)
    return dq, dk, dv, dg


def _add_state_terms(
    intra: IntraGrads,
    keys: Tensor,
    chunk_states: ChunkStates,
    states: Tensor,
    chunk_grads: ChunkStateGrads,
    grads: Tensor,
    scale: float,
) -> None:
    """Add to dq, dk, dv what reaches them through the states at boundaries: the second and third line of `input_grads`.

    Args:
        intra: dq, dk, dv of `intra_grads`, added to in place.
        keys: [N, B, H, C, K].
        chunk_states: of `local_states`.
        states: [N + 1, B, H, K, V], the true ones.
        chunk_grads: of `local_state_grads`.
        grads: [N + 1, B, H, K, V], the true gradients with respect to them.
        scale: factor of the outputs.
    """
    dq, dk, dv, decays = intra.dq, intra.dk, intra.dv, chunk_states.decays
    seen = torch.bmm(chunk_grads.output_grads, matrices(states[:-1]).mT).view(dq.shape)
    dq.addcmul_(seen, decays.from_start, value=scale)
    reached = torch.bmm(chunk_states.values, matrices(grads[1:]).mT).view(dk.shape)
    dk.addcmul_(reached, decays.to_end)
    dv.view(-1, *dv.shape[-2:]).baddbmm_(matrices(decays.to_end * keys), matrices(grads[1:]))


def _decay_grads(token_terms: Tensor, boundary_terms: Tensor, doc_ids: Tensor | None) -> Tensor:
    """Compute dg: sums of the terms of a token and those after it, to its chunk's end, and of the term at that end.

    The boundary term makes each chunk's dg independent of the tokens after it, on this rank and on later ones: their
    effect is contained in the true state at the chunk's end and its true gradient. At the rank's end those are its
    final state and D_in; without them dg is wrong on every rank but the last. With documents the sum ends before the
    next restart, and the boundary term is left out there.

    Args:
        token_terms: [N, B, H, C, K], q ⊙ dq − k ⊙ dk; overwritten.
        boundary_terms: [N, B, H, K], Σ_V S[n+1] ⊙ dS[n+1].
        doc_ids: [T], see `zeco_train.ops.documents`.

    Returns:
        [N, B, H, C, K], correct except at a restart itself, where dg is 0.
    """
    # the boundary term enters at the chunk's last token, and the sum over later tokens hands it to all of them
    token_terms[..., -1, :] += boundary_terms
    return add_later_tokens(token_terms, doc_ids)


class GlaForward:
    """Forward pass in PyTorch, see `zeco_train.ops.passes.ForwardPass`."""

    def __init__(self, operands: Sequence[Tensor], scale: float, doc_ids: Tensor | None) -> None:
        self._q, self._k, self._v, self._g = operands
        self._scale, self._doc_ids = scale, doc_ids
        self._states = local_states(self._k, self._v, self._g, doc_ids)
        self.state, self.transition = self._states.state, self._states.log_decay
        self.saved: tuple[Tensor, ...] = ()

    def overlap(self) -> None:
        """Compute the scores inside chunks."""
        self._scores = intra_scores(self._q, self._k, self._g, self._doc_ids, self._scale)

    def outputs(self, incoming_state: Tensor) -> Tensor:
        """Compute o [B, T, H, V], given R [B, H, K, V]. Overwrites the chunk states."""
        inputs = self._q, self._v, self._g, self._scores, self._states
        return outputs(*inputs, incoming_state, self._doc_ids, self._scale)


class GlaBackward:
    """Backward pass in PyTorch, see `zeco_train.ops.passes.BackwardPass`."""

    def __init__(
        self,
        operands: Sequence[Tensor],
        do: Tensor,
        saved: Sequence[Tensor],
        incoming_state: Tensor | None,
        scale: float,
        doc_ids: Tensor | None,
    ) -> None:
        assert incoming_state is not None
        self._q, self._k, self._v, self._g = operands
        self._do, self._incoming, self._scale, self._doc_ids = do, incoming_state, scale, doc_ids
        self._grads = local_state_grads(self._q, do, self._g, doc_ids, scale)
        self.state_grad = self._grads.state_grad

    def overlap(self) -> None:
        """Recompute the chunk states, then the gradients inside chunks."""
        self._states = local_states(self._k, self._v, self._g, self._doc_ids)
        self._intra = intra_grads(self._q, self._k, self._v, self._g, self._do, self._doc_ids, self._scale)

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        """Compute dq, dk, dv, dg, given D_in [B, H, K, V]."""
        inputs = self._q, self._k, self._v, self._g, self._do, self._states, self._incoming, self._grads
        return input_grads(*inputs, incoming_grad, self._intra, self._doc_ids, self._scale)


CHUNKED = Passes(GlaForward, GlaBackward)
