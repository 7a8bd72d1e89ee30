"""States at the boundaries of chunks and their gradients, and the decays inside chunks, for one decay a head.

The R = H / G heads of a group share queries and keys, so their states lie side by side as columns of one matrix of
K × (R·V): each product with queries or keys is one product of the group. A head's decay multiplies its columns of the
values, never the keys, which would then be other ones for each head. Letters: N chunks, C tokens each.

    tokens of a group   [B, T, G, K] → [N, B, G, C, K]        values   [B, T, H, V] → [N, B, G, C, R, V]
    log-decays          [B, T, H] → [B, T, G, R], so that the functions of `zeco_train.ops.chunks` give [N, B, G, C, R]
    states              [N + 1, B, G, K, R, V], at the seam [B, H, K, V]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeco_train.ops.chunks import ChunkDecays, block_sizes, halves, matrices, merge_blocks, to_chunks, token_decays
from zeco_train.ops.passes import check_state


@dataclass(frozen=True)
class BoundaryStates:
    """States before each chunk and after the last from a zero start, or their gradients from a zero end.

    Attributes:
        states: [N + 1, B, G, K, R, V], fp32 (fp64 where the values are).
        log_decays: [N + 1, B, G, R], summed g between the zero start (or end) and each boundary; −inf past a restart.
            Summed from that side: a difference would lose digits, and is NaN at a restart.
    """

    states: Tensor
    log_decays: Tensor

    def at(self, boundary: int) -> Tensor:
        """[B, H, K, V], the state at a boundary: a copy, since a scan may read it after `states` are overwritten."""
        return self.states[boundary].movedim(-2, 2).clone(memory_format=torch.contiguous_format).flatten(1, 2)

    def take_corrected(self, incoming: Tensor, name: str) -> Tensor:
        """[N + 1, B, G, K, R, V], true states: S[n] + exp(log_decays[n]) R, for the incoming state R [B, H, K, V].

        They overwrite `states`, the largest tensor of the operator.
        """
        _, batch, groups, key_dim, heads, value_dim = self.states.shape
        check_state(incoming, name, torch.Size((batch, groups * heads, key_dim, value_dim)))
        of_groups = incoming.to(self.states.dtype).unflatten(1, (groups, heads)).movedim(2, -2)
        return self.states.addcmul_(per_head(self.log_decays.exp()), of_groups)


def accumulate_states(keys: Tensor, values: Tensor, total: Tensor, log_decays: Tensor, reverse: bool) -> BoundaryStates:
    """Compute the states at all boundaries from a zero start, or from a zero end: the only loop over chunks.

        S[0] = 0,    S[n+1] = total[n] S[n] + Σ_j k_j v_jᵀ over chunk n
        S[N] = 0,    S[n] = total[n] S[n+1] + Σ_j k_j v_jᵀ over chunk n                          (reverse)

    Args:
        keys: [N, B, G, C, K]; queries for gradients.
        values: [N, B, G, C, R, V], already decayed to the end of their chunk (reverse: to its start).
        total: [N, B, G, R], decay of a state over the whole chunk.
        log_decays: [N, B, G, R], its logarithm, −inf for 0.
        reverse: from the end.
    """
    num_chunks, *outer, _, key_dim = keys.shape
    states = keys.new_empty(num_chunks + 1, *outer, key_dim, *values.shape[-2:])
    filled = states[:-1] if reverse else states[1:]
    # `matrices` of contiguous states is a view, so this writes into them.
    torch.bmm(matrices(keys).mT, matrices(values.flatten(-2)), out=matrices(filled.flatten(-2)))
    states[-1 if reverse else 0].zero_()
    decays, zero = per_head(total).unbind(0), torch.zeros_like(log_decays[:1])
    if reverse:
        for n in reversed(range(num_chunks)):
            states[n].addcmul_(decays[n], states[n + 1])
        return BoundaryStates(states, torch.cat([log_decays.flip(0).cumsum(0).flip(0), zero]))
    for n, decay in enumerate(decays):
        states[n + 1].addcmul_(decay, states[n])
    return BoundaryStates(states, torch.cat([zero, log_decays.cumsum(0)]))


def per_head(x: Tensor) -> Tensor:
    """View one number a head as a factor of states, [..., R] → [..., 1, R, 1]."""
    return x[..., None, :, None]


def wide_chunks(v: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """The values of each group's heads side by side, [B, T, H, V] → [N, B, G, C, R, V]."""
    chunks = to_chunks(v.unflatten(2, (groups, -1)).flatten(3), dtype)
    return chunks.unflatten(-1, (-1, v.shape[-1]))


def decay_matrix(g: Tensor, doc_ids: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The decays between the tokens of each chunk, without division: from a token (column) to a later one (row).

    Two tokens are split at exactly one size of blocks (`zeco_train.ops.chunks`); there their decay is the product of a
    factor for the later and one for the earlier.

    Args:
        g: [B, T, G, R] log-decays.
        doc_ids: [T], see `zeco_train.ops.documents`.
        dtype: of the result.

    Returns:
        [N, B, G, R, C, C]: exp(g_{j+1} + … + g_i) for j ≤ i without a restart in (j, i], else 0.
    """
    from_start = token_decays(g, doc_ids, dtype)
    decays = ChunkDecays(from_start, torch.ones_like(from_start))
    *outer, chunk, heads = from_start.shape
    matrix = from_start.new_zeros(*outer, heads, chunk, chunk)
    matrix.diagonal(dim1=-2, dim2=-1).fill_(1.0)
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
