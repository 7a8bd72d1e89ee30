"""Chunks of the delta rules in WY form: their systems, and states and gradients of states at their boundaries.

In a chunk of C tokens, S the state before it, with k̄_i = k_i ⊙ (decay from the chunk's start through i), k̃_i = k_i ⊙
(decay after i to its end) and E_ij the decay between two tokens, 0 across a restart (FLA's chunk form: Yang et al.
2024, arXiv 2406.06484, section 3; by channel arXiv 2510.26692):

    L_ij = β_i Σ_K k_i ⊙ k_j ⊙ E_ij  (i > j)        (I + L) W = β k̄,    (I + L) U = β v
    N    = U − W S                                   the "new values", what each token adds to the state
    S'   = decay ⊙ S + k̃ᵀ N                          the state after the chunk
    M    = Diag(decay) − k̃ᵀ W                        the chunk's transition: S' = M S + k̃ᵀ U

Shapes: N chunks as well, where it is a length; X = B·H. The loops here are the only ones over chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.chunks import ChunkDecays, chunk_decays, matrices, to_chunks
from zeco_train.ops.pairs import pair_grads, pair_scores
from zeco_train.ops.passes import check_state
from zeco_train.ops.scalar_decay.chunked import decay_matrix

# Products of the token pairs inside chunks, with the decays between them. Scores are Σ_K x_i ⊙ y_j ⊙ E_ij for j <= i,
# else 0, of x, y [N, B, H, C, K]; grads the gradients of x and y through them, given the scores' for j <= i.


# With one decay a head, g [B, T, H, 1]: one product, and a matrix of decays.
class _HeadPairs:
    def __init__(self, g: Tensor, doc_ids: Tensor | None, dtype: torch.dtype) -> None:
        self._decays = decay_matrix(g, doc_ids, dtype).squeeze(3)

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.mT).mul_(self._decays)

    def grads(self, x: Tensor, y: Tensor, score_grads: Tensor) -> tuple[Tensor, Tensor]:
        score_grads = score_grads * self._decays
        return score_grads @ y, score_grads.mT @ x


# With a decay for each channel, g [B, T, H, K].
class _ChannelPairs:
    def __init__(self, g: Tensor, doc_ids: Tensor | None) -> None:
        self._g, self._doc_ids = g, doc_ids

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        return pair_scores(x, y, self._g, self._doc_ids)

    def grads(self, x: Tensor, y: Tensor, score_grads: Tensor) -> tuple[Tensor, Tensor]:
        return pair_grads(x, y, score_grads, self._g, self._doc_ids)


class Chunks:
    """The keys, values and decays of a rank by chunks, and the solutions of their systems; fp64 if v is, else fp32."""

    def __init__(self, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, doc_ids: Tensor | None) -> None:
        self.dtype = dtype = accumulation_dtype(v.dtype)
        self.doc_ids = doc_ids
        by_channel = g.dim() == 4
        g = g if by_channel else g[..., None]
        # [N, B, H, C, K], [N, B, H, C, V], and β, [N, B, H, C, 1].
        self.keys, self.values = self.by_heads(k, v.shape[2]), to_chunks(v, dtype)
        self.strengths = to_chunks(beta[..., None], dtype)
        # Inside chunks, [N, B, H, C, K], or C × 1 with one decay a head.
        self.decays: ChunkDecays = chunk_decays(g, doc_ids, dtype)
        self.pairs = _ChannelPairs(g, doc_ids) if by_channel else _HeadPairs(g, doc_ids, dtype)
        # Σ_K k_i ⊙ k_j ⊙ E_ij for j < i, and L, [N, B, H, C, C].
        self.products = self.pairs.scores(self.keys, self.keys).tril_(-1)
        self.system = self.strengths * self.products
        right = torch.cat([self.decays.from_start * self.keys, self.values], -1).mul_(self.strengths)
        solved = _by_chunk(self._solve(right, transposed=False))
        # [N, X, C, K], [N, X, C, V], k̃ [N, X, C, K], and the decay of a state over each chunk, [N, X, K or 1, 1].
        self.w, self.u = solved.split((self.keys.shape[-1], v.shape[-1]), -1)
        self.end_keys = _by_chunk(self.decays.to_end * self.keys)
        self.total = self.decays.total.flatten(1, 2)[..., None]
        self._state_shape = torch.Size((v.shape[0], v.shape[2], k.shape[3], v.shape[3]))

    def by_heads(self, x: Tensor, heads: int) -> Tensor:
        """Queries or keys of each head, [B, T, G, K] → [N, B, H, C, K]; consecutive heads share a group's."""
        of_groups = to_chunks(x, self.dtype)
        shared = heads // of_groups.shape[2]
        return of_groups if shared == 1 else of_groups.repeat_interleave(shared, dim=2)

    def solve_transposed(self, x: Tensor) -> Tensor:
        """(I + L)⁻ᵀ x of each chunk, [N, X, C, V] → [N, B, H, C, V]."""
        return self._solve(x.view(*self.system.shape[:-1], -1), transposed=True)

    def _solve(self, right: Tensor, *, transposed: bool) -> Tensor:
        # Only the part beside the diagonal is read, which is taken to be 1.
        system = self.system.mT if transposed else self.system
        return torch.linalg.solve_triangular(system, right, upper=transposed, unitriangular=True)

    def state(self) -> Tensor:
        """State of all chunks from a zero start, [B, H, K, V]."""
        state = self.keys.new_zeros(self._state_shape).flatten(0, 1)
        for w, u, keys, total in zip(self.w, self.u, self.end_keys, self.total, strict=True):
            added = torch.baddbmm(u, w, state, alpha=-1)
            state = state.mul_(total).baddbmm_(keys.mT, added)
        return state.view(self._state_shape)

    def transition(self) -> Tensor:
        """Transition of all chunks, [B, H, K, K]: as much work as a state of K columns."""
        batch, heads, key_dim, _ = self._state_shape
        columns = self.keys.new_zeros(batch * heads, key_dim, key_dim)
        # Nothing to compute where a restart cuts it off and the host can see that, that is, on CPUs.
        if self.doc_ids is None or self.doc_ids.device.type != "cpu" or not bool(self.doc_ids[-1] > 0):
            columns.diagonal(dim1=-2, dim2=-1).fill_(1.0)
            for w, keys, total in zip(self.w, self.end_keys, self.total, strict=True):
                columns = columns.mul(total).baddbmm_(keys.mT, torch.bmm(w, columns), alpha=-1)
        return columns.view(batch, heads, key_dim, key_dim)

    def states_from(self, incoming: Tensor) -> tuple[Tensor, Tensor]:
        """States at all boundaries [N + 1, X, K, V], and the new values N of all tokens [N, X, C, V].

        `incoming` [B, H, K, V] is the state before the first chunk.
        """
        check_state(incoming, "incoming_state", self._state_shape)
        num_chunks = len(self.w)
        states = self.u.new_empty(num_chunks + 1, *incoming.flatten(0, 1).shape)
        states[0] = incoming.flatten(0, 1)
        added = self.u.new_empty(self.u.shape)
        for n in range(num_chunks):
            torch.baddbmm(self.u[n], self.w[n], states[n], alpha=-1, out=added[n])
            torch.mul(self.total[n], states[n], out=states[n + 1])
            states[n + 1].baddbmm_(self.end_keys[n].mT, added[n])
        return states, added


class ChunkGrads:
    """Gradients of the states at the boundaries of chunks.

    dN = Pᵀ do + k̃ dS'        dS = decay ⊙ dS' + (scale · q̄)ᵀ do − Wᵀ dN
    """

    def __init__(self, chunks: Chunks, q: Tensor, do: Tensor, scale: float) -> None:
        self._chunks = chunks
        self.queries, self.output_grads = chunks.by_heads(q, do.shape[2]), to_chunks(do, chunks.dtype)
        # P, scale · Σ_K q_i ⊙ k_j ⊙ E_ij, [N, B, H, C, C].
        self.scores = chunks.pairs.scores(self.queries, chunks.keys).mul_(scale)
        self._seen = _by_chunk(scale * chunks.decays.from_start * self.queries)
        self._of_chunks = _by_chunk(self.output_grads)
        through = torch.bmm(matrices(self.scores).mT, matrices(self.output_grads))
        self._through_scores = through.view(self._of_chunks.shape)

    def grads_from(self, incoming: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the states at all boundaries [N + 1, X, K, V], and of the new values of all tokens [N, X, C, V].

        `incoming` [B, H, K, V] is the gradient of the state after the last chunk.
        """
        chunks, num_chunks = self._chunks, len(self._seen)
        grads = self._through_scores.new_empty(num_chunks + 1, *incoming.flatten(0, 1).shape)
        grads[-1] = incoming.flatten(0, 1)
        of_added = torch.empty_like(self._through_scores)
        for n in reversed(range(num_chunks)):
            torch.baddbmm(self._through_scores[n], chunks.end_keys[n], grads[n + 1], out=of_added[n])
            torch.mul(chunks.total[n], grads[n + 1], out=grads[n])
            grads[n].baddbmm_(self._seen[n].mT, self._of_chunks[n])
            grads[n].baddbmm_(chunks.w[n].mT, of_added[n], alpha=-1)
        return grads, of_added


# [N, B, H, I, J] → [N, B·H, I, J], contiguous.
def _by_chunk(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1, *x.shape[-2:]).contiguous()
