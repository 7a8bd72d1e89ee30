"""Chunked delta rules in PyTorch: the passes of one rank, forward and backward (docs/mathematics.md).

    forward     systems, (S_loc, M) → scan | scores P | R → states from R, o = scale · q̄ S + P N
    backward    systems, P, D_loc → scan | states from R again | D_in → gradients of states, dq, dk, dv, dg, dβ

One implementation serves the three rules: decays by channel, one a head, which nothing expands to K numbers a token,
and none, which are decays of 1. The transition M, a matrix [B, H, K, K], is kept by the forward pass, so that the
backward pass scans with its transpose. The equations of the WY form are in `chunk_states`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from zeco_train.ops.chunks import add_later_tokens, matrices, to_tokens
from zeco_train.ops.delta.chunk_states import ChunkGrads, Chunks
from zeco_train.ops.passes import BackwardBase, ForwardBase, Passes, check_state
from zeco_train.ops.position import find_restarts


class _DeltaForward(ForwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        self._q, k, self._v, g, beta = _with_decays(operands)
        self._chunks = Chunks(k, self._v, g, beta, self.doc_ids)
        self.state = self._chunks.state()

    @cached_property
    def transition(self) -> Tensor:
        return self._chunks.transition()

    def overlap(self) -> None:
        chunks = self._chunks
        self._queries = chunks.by_heads(self._q, self._v.shape[2])
        self._scores = chunks.pairs.scores(self._queries, chunks.keys)

    def outputs(self, incoming_state: Tensor) -> Tensor:
        chunks = self._chunks
        states, added = chunks.states_from(incoming_state)
        o = torch.bmm(matrices(self._scores), added.flatten(0, 1))
        o.baddbmm_(matrices(chunks.decays.from_start * self._queries), states[:-1].flatten(0, 1)).mul_(self.scale)
        return to_tokens(o.view(chunks.values.shape), self._v.shape[1], self._v.dtype)


class _DeltaBackward(BackwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        self._operands, self._gated = operands, len(operands) == 5
        q, k, v, g, beta = _with_decays(operands)
        self._chunks = Chunks(k, v, g, beta, self.doc_ids)
        self._grads = ChunkGrads(self._chunks, q, self.do, self.scale)
        grads, _ = self._grads.grads_from(torch.zeros_like(self.received))
        self.state_grad = grads[0].view(self.received.shape).clone()

    def overlap(self) -> None:
        self._states, self._added = self._chunks.states_from(self.received)

    # With S before and dS' after a chunk, the true ones, N its new values and dN their gradients:
    #
    #     X  = v − k̄ S,    Y = (I + L)⁻ᵀ dN,    dv = β Y,    dL = −Y Nᵀ below the diagonal,    dP = scale · do Nᵀ
    #     dβ = Σ_V Y ⊙ X + Σ_j dL_ij Σ_K k_i ⊙ k_j ⊙ E_ij
    #     dq = scale · decay from the start ⊙ do Sᵀ + Σ_j dP_ij k_j ⊙ E_ij
    #     dk = −decay from the start ⊙ dv Sᵀ + Σ_j β_i dL_ij k_j ⊙ E_ij                                  as rows,
    #          + decay to the end ⊙ N dS'ᵀ + Σ_i (dP_ij q_i + β_i dL_ij k_i) ⊙ E_ij                      as columns
    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        check_state(incoming_grad, "incoming_grad", self.received.shape)
        chunks, of_outputs = self._chunks, self._grads
        grads, of_added = of_outputs.grads_from(incoming_grad)
        shape = chunks.keys.shape
        before, after, added = (x.unflatten(1, shape[1:3]) for x in (self._states[:-1], grads[1:], self._added))
        solved = chunks.solve_transposed(of_added)
        dv = chunks.strengths * solved
        system_grads = (solved @ added.mT).neg_().tril_(-1)
        dbeta = (system_grads * chunks.products).sum(-1, keepdim=True)
        rest = chunks.values - (chunks.decays.from_start * chunks.keys) @ before
        dbeta += (solved * rest).sum(-1, keepdim=True)
        score_grads = (of_outputs.output_grads @ added.mT).mul_(self.scale)
        dq, columns = chunks.pairs.grads(of_outputs.queries, chunks.keys, score_grads)
        rows, more = chunks.pairs.grads(chunks.keys, chunks.keys, system_grads.mul_(chunks.strengths))
        dq.add_((of_outputs.output_grads @ before.mT).mul_(chunks.decays.from_start), alpha=self.scale)
        rows.sub_((dv @ before.mT).mul_(chunks.decays.from_start))
        columns.add_(more).add_((added @ after.mT).mul_(chunks.decays.to_end))
        found = [dq, rows + columns, dv, dbeta]
        if self._gated:
            terms = of_outputs.queries * dq + chunks.keys * (rows - columns)
            found.insert(3, self._decay_grads(terms, self._states[1:], grads[1:]))
        results = [self._to_operand(x, operand) for x, operand in zip(found, self._operands, strict=True)]
        if self._gated and self.doc_ids is not None:
            restarts = find_restarts(self.doc_ids)
            # [B, T, H] or [B, T, H, K]. Not by index, which waits for the GPU to count the restarts.
            results[3].masked_fill_(restarts.view(-1, *[1] * (results[3].dim() - 2)), 0.0)
        return tuple(results)

    # dg, [N, B, H, C, K] or C × 1: sums of q ⊙ dq + k ⊙ (dk as rows − dk as columns) over a token and those after it to
    # its chunk's end, whose boundary term, of true states after chunks and their gradients [N, X, K, V], stands for all
    # later chunks and ranks. With documents a sum ends before the next restart; at one it is rounding errors only.
    def _decay_grads(self, terms: Tensor, states: Tensor, grads: Tensor) -> Tensor:
        boundary_terms = sum_boundary_terms(states, grads).unflatten(1, terms.shape[1:3])
        if self._chunks.decays.total.shape[-1] == 1:
            terms, boundary_terms = terms.sum(-1, keepdim=True), boundary_terms.sum(-1, keepdim=True)
        terms[..., -1, :] += boundary_terms
        return add_later_tokens(terms, self.doc_ids)

    # [N, B, H, C, D] → the shape and dtype of the operand; summed over the heads that share queries and keys.
    def _to_operand(self, grad: Tensor, operand: Tensor) -> Tensor:
        if operand.dim() == 4 and operand.shape[2] != grad.shape[2]:
            grad = grad.unflatten(2, (operand.shape[2], -1)).sum(3)
        return to_tokens(grad, operand.shape[1], operand.dtype).view(operand.shape)


def sum_boundary_terms(states: Tensor, grads: Tensor) -> Tensor:
    """Σ_V S ⊙ dS at the ends of chunks, [N, X, K, V] → [N, X, K]; at a rank's end, its final state and D_in.

    The gradient of a chunk's decays through all that comes after it: without it dg is wrong on every rank but the last.
    """
    return (states * grads).sum(-1)


# q, k, v, g, β; of the rule without g, log-decays of 0, a view of one number.
def _with_decays(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    q, k, v, *g, beta = operands
    return q, k, v, g[0] if g else beta.new_zeros(1).expand(beta.shape), beta


CHUNKED = Passes(_DeltaForward, _DeltaBackward)
