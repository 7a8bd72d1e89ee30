"""Products of the token pairs inside chunks, with a decay between the two tokens by channel, and their gradients.

Two tokens of a chunk are split at exactly one size of blocks, 1, 2, 4, … tokens, at the start of the later block, and
the decay between them is a factor for the later token times one for the earlier (`zeco_train.ops.chunks`). So each size
is one batch of matrix products, and peak memory is a few times that of the tokens. Products of blocks below 16 tokens
are batched into products of 16 rows, which is cheaper than many tiny ones; only their diagonal blocks are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from zeco_train.ops.chunks import ChunkDecays, block_sizes, halves, merge_blocks, token_decays

# Minimum rows of a matrix product, if each half of the chunk has that many; a multiple of every smaller block.
_ROWS = 16


class _BlockPairs(NamedTuple):
    # Queries [N, B, H, C / 2, K] of the later and keys of the earlier blocks of `block` tokens, decayed to the start of
    # the later; and those decays, views [N, B, H, C / (2·block), block, K].

    block: int
    queries: Tensor
    keys: Tensor
    query_decay: Tensor
    key_decay: Tensor


def pair_scores(queries: Tensor, keys: Tensor, g: Tensor, doc_ids: Tensor | None) -> Tensor:
    """Compute the scores of the tokens of each chunk.

        A_ij = Σ_K q_i ⊙ k_j ⊙ exp(g_{j+1} + … + g_i)  for j <= i without a restart in (j, i],  else 0

    Queries and keys are [N, B, H, C, K], g [B, T, H, K], doc_ids [T]; the scores [N, B, H, C, C], rows are queries.
    """
    scores = own_scores(queries, keys)
    for pairs in _block_pairs(queries, keys, g, doc_ids):
        _put_blocks(scores, _rows(pairs.queries, pairs.block) @ _rows(pairs.keys, pairs.block).mT, pairs.block)
    return scores


def pair_grads(
    queries: Tensor, keys: Tensor, score_grads: Tensor, g: Tensor, doc_ids: Tensor | None, scores: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of queries and keys through the scores; on demand also the scores again.

        dq_i = Σ_j dA_ij k_j ⊙ decay_ij,    dk_j = Σ_i dA_ij q_i ⊙ decay_ij        over j <= i

    `score_grads` is dA, contiguous; only j <= i is read. `scores` are those of each token with itself, `own_scores`:
    the others are filled in; None: not wanted.
    """
    own_grads = score_grads.diagonal(dim1=-2, dim2=-1).view(*queries.shape[:-1], 1)
    # Separate allocations: of one chunk and one head they are returned as is, and a custom op's outputs must not alias.
    dq, dk = (score_grads.new_empty(queries.shape) for _ in range(2))
    torch.mul(keys, own_grads, out=dq)
    torch.mul(queries, own_grads, out=dk)
    for pairs in _block_pairs(queries, keys, g, doc_ids):
        later, earlier = _rows(pairs.queries, pairs.block), _rows(pairs.keys, pairs.block)
        if scores is not None:
            _put_blocks(scores, later @ earlier.mT, pairs.block)
        block_grads = _take_blocks(score_grads, pairs.block)
        shape = pairs.query_decay.shape
        halves(dq, pairs.block)[1].addcmul_((block_grads @ earlier).view(shape), pairs.query_decay)
        halves(dk, pairs.block)[0].addcmul_((block_grads.mT @ later).view(shape), pairs.key_decay)
    return dq, dk


def own_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """[N, B, H, C, C], scores of each token with itself on the diagonal, zero elsewhere."""
    own = (queries * keys).sum(-1)
    scores = own.new_zeros(*own.shape, own.shape[-1])
    scores.diagonal(dim1=-2, dim2=-1).copy_(own)
    return scores


def _block_pairs(queries: Tensor, keys: Tensor, g: Tensor, doc_ids: Tensor | None) -> Iterator[_BlockPairs]:
    # From small to large; each overwrites the decays of the previous one.
    from_start = token_decays(g, doc_ids, queries.dtype)
    decays = ChunkDecays(from_start, torch.ones_like(from_start))
    *outer, chunk, key_dim = queries.shape
    half = (*outer, chunk // 2, key_dim)
    for block in block_sizes(chunk):
        query_decay = halves(decays.from_start, block)[1]
        key_decay = halves(decays.to_end, block)[0]
        # decays first: the result inherits their chunk layout, so the reshape need not copy
        later_queries = query_decay * halves(queries, block)[1]
        earlier_keys = key_decay * halves(keys, block)[0]
        yield _BlockPairs(block, later_queries.reshape(half), earlier_keys.reshape(half), query_decay, key_decay)
        merge_blocks(decays, block)


def _num_rows(block: int, chunk: int) -> int:
    return max(block, min(_ROWS, chunk // 2))


def _rows(x: Tensor, block: int) -> Tensor:
    return x.view(-1, _num_rows(block, 2 * x.shape[-2]), x.shape[-1])


def _put_blocks(scores: Tensor, products: Tensor, block: int) -> None:
    # The diagonal blocks of the products [·, rows, rows] go to their positions in the scores [N, B, H, C, C].
    _score_blocks(scores, block).copy_(_diagonal_blocks(products, block, scores.shape[-1]))


def _take_blocks(scores: Tensor, block: int) -> Tensor:
    # The inverse of `_put_blocks`, with zeros outside of the diagonal blocks, [·, rows, rows].
    chunk = scores.shape[-1]
    rows = _num_rows(block, chunk)
    groups = scores.numel() // (chunk * chunk) * (chunk // 2 // rows)
    products = scores.new_zeros(groups, rows, rows) if block < rows else scores.new_empty(groups, rows, rows)
    _diagonal_blocks(products, block, chunk).copy_(_score_blocks(scores, block))
    return products


def _score_blocks(scores: Tensor, block: int) -> Tensor:
    # View of the scores of later blocks (rows) with earlier ones (columns), [N·B·H, groups, blocks, block, block].
    assert scores.is_contiguous()
    chunk = scores.shape[-1]
    rows = _num_rows(block, chunk)
    # the next pair of blocks lies 2·block rows down and as many columns right
    next_pair = 2 * block * (chunk + 1)
    size = (scores.numel() // (chunk * chunk), chunk // 2 // rows, rows // block, block, block)
    strides = (chunk * chunk, rows // block * next_pair, next_pair, chunk, 1)
    return scores.as_strided(size, strides, scores.storage_offset() + block * chunk)


def _diagonal_blocks(products: Tensor, block: int, chunk: int) -> Tensor:
    # View of the diagonal blocks of [·, rows, rows], shaped as in `_score_blocks`.
    rows = products.shape[-1]
    blocks = products.unflatten(0, (-1, chunk // 2 // rows))
    blocks = blocks.unflatten(-1, (-1, block)).unflatten(-3, (-1, block))
    return blocks.diagonal(dim1=2, dim2=4).movedim(-1, 2)
