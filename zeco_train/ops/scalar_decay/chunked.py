"""Chunked linear attention with one decay a head in PyTorch: the passes of one rank (docs/mathematics.md).

    forward     local states S[n] → scan | scores A = scale · q kᵀ ⊙ decays | R → o = scale · decay · q S[n] + A v
    backward    local gradients dS[n] → scan | states again, gradients through A | D_in → dq, dk, dv, dg

The R = H / G heads of a group share queries and keys, so their states lie side by side as columns of one matrix of
K × (R·V): each product with queries or keys is one product of the group. A head's decay multiplies its columns of the
values, never the keys, which would then be other ones for each head, and its matrix of decays, C × C, the scores. So
nothing has K numbers a token and head. Letters: N chunks, C tokens each.

    tokens of a group   [B, T, G, K] → [N, B, G, C, K]        values   [B, T, H, V] → [N, B, G, C, R, V]
    log-decays          [B, T, H] → [B, T, G, R], so that the functions of `zeco_train.ops.chunks` give [N, B, G, C, R]
    states              [N + 1, B, G, K, R, V], at the seam [B, H, K, V]

Arithmetic and states are fp64 if v is, else fp32. The chunkwise form is that of Dao & Gu 2024 (arXiv 2405.21060,
section 6); its split over ranks is ZeCO's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.chunks import (
    BoundaryStates,
    ChunkDecays,
    accumulate_states,
    block_sizes,
    chunk_decays,
    chunk_log_decays,
    halves,
    matrices,
    merge_blocks,
    to_chunks,
    to_tokens,
    token_decays,
)
from zeco_train.ops.passes import BackwardBase, ForwardBase, Passes, check_state


def decay_matrix(g: Tensor, doc_ids: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The decays between the tokens of each chunk, without division: from a token (column) to a later one (row).

    g [B, T, G, R] → [N, B, G, R, C, C]: exp(g_{j+1} + … + g_i) for j ≤ i without a restart in (j, i], else 0.
    """
    from_start = token_decays(g, doc_ids, dtype)
    decays = ChunkDecays(from_start, torch.ones_like(from_start))
    *outer, chunk, heads = from_start.shape
    matrix = from_start.new_zeros(*outer, heads, chunk, chunk)
    matrix.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    # Two tokens are split at exactly one size of blocks; their decay is a factor of the later times one of the earlier.
    for block in block_sizes(chunk):
        # [N, B, G, pairs, block, R] → [N, B, G, R, block, pairs]
        later, earlier = (
            x.movedim(-1, -3).mT for x in (halves(decays.from_start, block)[1], halves(decays.to_end, block)[0])
        )
        squares = matrix.unflatten(-1, (-1, 2 * block)).unflatten(-3, (-1, 2 * block))
        of_pairs = squares.diagonal(dim1=-4, dim2=-2)[..., block:, :block, :]
        of_pairs.copy_(later[..., :, None, :] * earlier[..., None, :, :])
        merge_blocks(decays, block)
    return matrix


class _Chunks:
    """The operands of a rank by chunks, and its states from a zero start.

    queries, keys [N, B, G, C, K]; log_decays [B, T, G, R], by tokens; decays inside chunks, [N, B, G, C, R]; `total`
    and its logarithm over each chunk, [N, B, G, 1, R, 1], as factors of states. decayed_values and
    decayed_output_grads, [N, B, G, C, R, V], are set by `local_states` and `local_state_grads`.
    """

    def __init__(self, operands: Sequence[Tensor], scale: float, doc_ids: Tensor | None) -> None:
        q, k, self.v, g = operands
        self.scale, self.doc_ids = scale, doc_ids
        self.groups, self.dtype = q.shape[2], accumulation_dtype(self.v.dtype)
        self.queries, self.keys = to_chunks(q, self.dtype), to_chunks(k, self.dtype)
        self.log_decays = g.unflatten(2, (self.groups, -1))
        self.decays: ChunkDecays = chunk_decays(self.log_decays, doc_ids, self.dtype)
        log_total = chunk_log_decays(self.log_decays, doc_ids, self.dtype)
        self._factors = self.decays.total[..., None, :, None], log_total[..., None, :, None]

    def by_heads(self, x: Tensor) -> Tensor:
        """[B, T, H, V] → [N, B, G, R, C, V]."""
        return to_chunks(x, self.dtype).unflatten(2, (self.groups, -1))

    def _side_by_side(self, x: Tensor) -> Tensor:
        """[B, T, H, V] → [N, B, G, C, R, V]."""
        chunks = to_chunks(x.unflatten(2, (self.groups, -1)).flatten(3), self.dtype)
        return chunks.unflatten(-1, (-1, x.shape[-1]))

    def local_states(self) -> BoundaryStates:
        self.decayed_values = self.decays.to_end[..., None] * self._side_by_side(self.v)
        return accumulate_states(self.keys, self.decayed_values, *self._factors, reverse=False)

    def local_state_grads(self, do: Tensor) -> BoundaryStates:
        self.decayed_output_grads = (self.decays.from_start[..., None] * self._side_by_side(do)).mul_(self.scale)
        return accumulate_states(self.queries, self.decayed_output_grads, *self._factors, reverse=True)

    def corrected(self, local: BoundaryStates, incoming: Tensor, name: str) -> Tensor:
        """[N + 1, B, G, K, R, V], the true states, in place; incoming [B, H, K, V]."""
        _, batch, _, key_dim, heads, value_dim = local.states.shape
        check_state(incoming, name, torch.Size((batch, self.groups * heads, key_dim, value_dim)))
        return local.take_corrected(incoming.unflatten(1, (self.groups, heads)).movedim(2, -2))

    def products(self) -> Tensor:
        """[N, B, G, 1, C, C], scale · q kᵀ of each group."""
        scores = torch.bmm(matrices(self.queries), matrices(self.keys).mT).mul_(self.scale)
        return scores.view(*self.queries.shape[:3], 1, *scores.shape[-2:])

    def decay_matrix(self) -> Tensor:
        """[N, B, G, R, C, C]."""
        return decay_matrix(self.log_decays, self.doc_ids, self.dtype)


def _at(local: BoundaryStates, boundary: int) -> Tensor:
    """[B, H, K, V], the state at a boundary: a copy, since a scan may read it after `states` are overwritten."""
    return local.states[boundary].movedim(-2, 2).clone(memory_format=torch.contiguous_format).flatten(1, 2)


def _product(x: Tensor, y: Tensor) -> Tensor:
    return torch.bmm(matrices(x), matrices(y)).view(*x.shape[:-1], y.shape[-1])


@dataclass(eq=False)
class _ScalarDecayForward(ForwardBase):
    fixed: bool = False

    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        if self.fixed:
            operands = _expanded(operands)
        self._chunks = _Chunks(operands, self.scale, self.doc_ids)
        self._states = self._chunks.local_states()
        self.state = _at(self._states, -1)
        # All channels of a key decay alike; the scan takes one decay for each.
        total = self._states.log_decays[-1].flatten(1)
        self.transition = total[..., None].expand(-1, -1, operands[0].shape[-1]).contiguous()

    def overlap(self) -> None:
        self._scores = self._chunks.decay_matrix().mul_(self._chunks.products())

    def outputs(self, incoming_state: Tensor) -> Tensor:
        chunks = self._chunks
        states = chunks.corrected(self._states, incoming_state, "incoming_state")
        seen = _product(chunks.queries, states[:-1].flatten(-2)).unflatten(-1, states.shape[-2:])
        o = _product(self._scores, chunks.by_heads(chunks.v))
        o.addcmul_(seen.transpose(-3, -2), chunks.decays.from_start.mT[..., None], value=chunks.scale)
        return to_tokens(o.flatten(2, 3), chunks.v.shape[1], chunks.v.dtype)


@dataclass(eq=False)
class _ScalarDecayBackward(BackwardBase):
    fixed: bool = False

    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        self._log_decays = operands[3]
        operands = _expanded(operands) if self.fixed else operands
        self._tokens = operands[:3]
        self._chunks = _Chunks(operands, self.scale, self.doc_ids)
        self._grads = self._chunks.local_state_grads(self.do)
        self.state_grad = _at(self._grads, 0)

    def overlap(self) -> None:
        # dA = do vᵀ ⊙ decays,    dq = Σ_heads dA k,    dk = Σ_heads dAᵀ q,    dv = Aᵀ do,        dA ⊙ q kᵀ for dg
        chunks = self._chunks
        self._states = chunks.local_states()
        products, scores = chunks.products(), chunks.decay_matrix()
        output_grads = chunks.by_heads(self.do)
        score_grads = _product(output_grads, chunks.by_heads(chunks.v).mT).mul_(scores)
        of_groups = score_grads.sum(3).mul_(chunks.scale)
        self._dq, self._dk = _product(of_groups, chunks.keys), _product(of_groups.mT, chunks.queries)
        self._dv = _product(scores.mul_(products).mT, output_grads)
        if not self.fixed:
            self._pair_terms = _sum_enclosing(score_grads.mul_(products))

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        chunks = self._chunks
        states = chunks.corrected(self._states, self.received, "incoming_state")
        grads = chunks.corrected(self._grads, incoming_grad, "incoming_grad")
        before, after = states[:-1].flatten(-2), grads[1:].flatten(-2)
        dq = self._dq.add_(_product(chunks.decayed_output_grads.flatten(-2), before.mT))
        dk = self._dk.add_(_product(chunks.decayed_values.flatten(-2), after.mT))
        reached = _product(chunks.keys, after).unflatten(-1, states.shape[-2:])
        dv = self._dv.addcmul_(reached.transpose(-3, -2), chunks.decays.to_end.mT[..., None])
        if self.fixed:
            dg = torch.zeros_like(self._log_decays)
        else:
            # [N, B, G, C, R] → [B, T, H].
            of_chunks = self._decay_grads(states, grads, reached)
            dg = to_tokens(of_chunks, self.do.shape[1], self._log_decays.dtype).flatten(2)
        gradients = zip((dq, dk, dv.flatten(2, 3)), self._tokens, strict=True)
        return (*(to_tokens(grad, x.shape[1], x.dtype) for grad, x in gradients), dg)

    def _decay_grads(self, states: Tensor, grads: Tensor, reached: Tensor) -> Tensor:
        """dg, [N, B, G, C, R]: sums of the terms of the loss that token's decay is in.

        For a token t of chunk n, with the decays between as in the forward pass:

            dg_t = Σ_{i >= t > j} scale · (do_i v_j) (q_i k_j) decay          pairs in the chunk, `_pair_terms`
                   + Σ_{i >= t} scale · q_iᵀ S[n] do_i decay                  from the state before it
                   + Σ_{j < t} k_jᵀ dS[n+1] v_j decay                         to the state after it
                   + Σ_KV S[n] ⊙ dS[n+1] decay                                through it: the boundary term

        Terms are added, never subtracted, so rounding errors are relative to terms that belong to dg_t. A restart is a
        factor 0. The states are overwritten; `reached` is k_jᵀ dS[n+1], [N, B, G, C, R, V].
        """
        chunks = self._chunks
        seen = _product(chunks.queries, states[:-1].flatten(-2)).view_as(chunks.decayed_output_grads)
        to_queries = seen.mul_(chunks.decayed_output_grads).sum(-1)
        from_keys = (reached * chunks.decayed_values).sum(-1)
        # The last use of both: they are the largest tensors here, so the product overwrites one.
        boundary_terms = chunks.decays.total * states[:-1].mul_(grads[1:]).sum((-3, -1))
        dg = to_queries.flip(-2).cumsum(-2).flip(-2)
        dg[..., 1:, :] += (from_keys.cumsum(-2) + self._pair_terms.mT)[..., :-1, :]
        return dg.add_(boundary_terms[..., None, :])


def _sum_enclosing(pair_terms: Tensor) -> Tensor:
    """Σ_{j <= t < i} x_ij of [..., C, C] → [..., C]: the pairs on both sides of the border after t."""
    return pair_terms.cumsum_(-1).tril_(-1).sum(-2)


def _expanded(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The operands with g [B, T, H], a view, in place of log_decay [H]."""
    q, k, v, log_decay = operands
    return q, k, v, log_decay.expand(v.shape[:3])


CHUNKED_SCALAR = Passes(_ScalarDecayForward, _ScalarDecayBackward)
CHUNKED_FIXED = Passes(partial(_ScalarDecayForward, fixed=True), partial(_ScalarDecayBackward, fixed=True))
