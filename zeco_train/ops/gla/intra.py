"""Interactions between the tokens of one chunk: the phases that need no other rank and overlap the scans.

Pairs of different tokens are grouped by pairs of blocks, of 1, 2, 4, … tokens, up to half a chunk: two tokens of a
chunk are split at exactly one size, at the start of the later block, and the decay between them is the product of a
factor for the later token and one for the earlier (see `zeco_train.ops.chunks`). So each size is one batch of matrix
products, and peak memory is a few times that of the tokens. Products of blocks below 16 tokens are batched into
products of 16 rows, which is cheaper than many tiny ones; only their diagonal blocks are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.chunks import ChunkDecays, block_sizes, halves, matrices, merge_blocks, to_chunks, token_decays
from zeco_train.ops.gla.checks import check_inputs

# Minimum rows of a matrix product, if each half of the chunk has that many; a multiple of every smaller block.
_ROWS = 16


@dataclass(frozen=True)
class IntraGrads:
    """Gradients through the pairs of tokens inside chunks, [N, B, H, C, D] in the dtype of the states.

    Attributes:
        dq: D = K. dk: D = K. dv: D = V.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class _BlockPairs:
    """Queries and keys of all pairs of blocks of one size, decayed to the start of the later block.

    Attributes:
        block: tokens of a block.
        queries: [N, B, H, C / 2, K], tokens of the later blocks. keys: the same, of the earlier blocks.
        query_decay: [N, B, H, C / (2·block), block, K], a view. key_decay: the same.
    """

    block: int
    queries: Tensor
    keys: Tensor
    query_decay: Tensor
    key_decay: Tensor


def intra_scores(q: Tensor, k: Tensor, g: Tensor, pieces: Tensor | None, scale: float) -> Tensor:
    """Compute the scores of the tokens of each chunk: step 3 of the forward.

        A_ij = scale · Σ_K q_i ⊙ k_j ⊙ exp(g_{j+1} + … + g_i)  for j <= i without a restart in (j, i],  else 0

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K].
        g: [B, T, H, K], fp32 or fp64, finite, at most 0.
        pieces: [T], see `zeco_train.ops.documents`; B must be 1 with them.
        scale: factor of the outputs.

    Returns:
        [N, B, H, C, C] in fp64 if q is fp64, else fp32; rows are queries.

    Raises:
        ValueError: shapes or dtypes do not fit; the message names the tensor.
    """
    check_inputs(pieces, q=q, k=k, g=g)
    dtype = accumulation_dtype(q.dtype)
    queries, keys = to_chunks(q, dtype), to_chunks(k, dtype)
    scores = _own_scores(queries, keys)
    for pairs in _block_pairs(queries, keys, g, pieces):
        _put_blocks(scores, _rows(pairs.queries, pairs.block) @ _rows(pairs.keys, pairs.block).mT, pairs.block)
    return scores.mul_(scale)


def intra_grads(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, do: Tensor, pieces: Tensor | None, scale: float
) -> IntraGrads:
    """Compute the intra-chunk parts of dq, dk and dv: step 3 of the backward.

        dA = scale · do vᵀ,    dq_i = Σ_j dA_ij k_j ⊙ decay_ij,    dk_j = Σ_i dA_ij q_i ⊙ decay_ij,    dv = Aᵀ do

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K].
        v: [B, T, H, V].
        g: [B, T, H, K], fp32 or fp64.
        do: [B, T, H, V], gradient of o.
        pieces: [T], see `zeco_train.ops.documents`.
        scale: factor of the outputs.

    Raises:
        ValueError: shapes or dtypes do not fit; the message names the tensor.
    """
    check_inputs(pieces, q=q, k=k, v=v, g=g, do=do)
    dtype = accumulation_dtype(v.dtype)
    queries, keys = to_chunks(q, dtype), to_chunks(k, dtype)
    output_grads = matrices(to_chunks(do, dtype))
    score_grads = torch.bmm(output_grads, matrices(to_chunks(v, dtype)).mT).mul_(scale)

    scores = _own_scores(queries, keys)
    own_grads = score_grads.diagonal(dim1=-2, dim2=-1).view(*queries.shape[:-1], 1)
    # Separate allocations: of one chunk and one head they are returned as is, and a custom op's outputs must not alias.
    dq, dk = (score_grads.new_empty(queries.shape) for _ in range(2))
    torch.mul(keys, own_grads, out=dq)
    torch.mul(queries, own_grads, out=dk)
    for pairs in _block_pairs(queries, keys, g, pieces):
        later, earlier = _rows(pairs.queries, pairs.block), _rows(pairs.keys, pairs.block)
        _put_blocks(scores, later @ earlier.mT, pairs.block)
        block_grads = _take_blocks(score_grads, pairs.block)
        shape = pairs.query_decay.shape
        halves(dq, pairs.block)[1].addcmul_((block_grads @ earlier).view(shape), pairs.query_decay)
        halves(dk, pairs.block)[0].addcmul_((block_grads.mT @ later).view(shape), pairs.key_decay)

    dv = torch.bmm(matrices(scores.mul_(scale)).mT, output_grads)
    return IntraGrads(dq, dk, dv.view(*queries.shape[:-1], -1))


def _own_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """[N, B, H, C, C], unscaled scores of each token with itself on the diagonal, zero elsewhere."""
    own = (queries * keys).sum(-1)
    scores = own.new_zeros(*own.shape, own.shape[-1])
    scores.diagonal(dim1=-2, dim2=-1).copy_(own)
    return scores


def _block_pairs(queries: Tensor, keys: Tensor, g: Tensor, pieces: Tensor | None) -> Iterator[_BlockPairs]:
    """Yield the block pairs from small to large. Each overwrites the decays of the previous one."""
    from_start = token_decays(g, pieces, queries.dtype)
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
    """Rows of a product of blocks."""
    return max(block, min(_ROWS, chunk // 2))


def _rows(x: Tensor, block: int) -> Tensor:
    """Group tokens for a product, [N, B, H, C / 2, K] → [N·B·H·groups, rows, K]."""
    return x.view(-1, _num_rows(block, 2 * x.shape[-2]), x.shape[-1])


def _put_blocks(scores: Tensor, products: Tensor, block: int) -> None:
    """Copy the diagonal blocks of the products [·, rows, rows] to their positions in the scores [N, B, H, C, C]."""
    _score_blocks(scores, block).copy_(_diagonal_blocks(products, block, scores.shape[-1]))


def _take_blocks(scores: Tensor, block: int) -> Tensor:
    """The inverse of `_put_blocks`, with zeros outside of the diagonal blocks, [·, rows, rows]."""
    chunk = scores.shape[-1]
    rows = _num_rows(block, chunk)
    groups = scores.numel() // (chunk * chunk) * (chunk // 2 // rows)
    products = scores.new_zeros(groups, rows, rows) if block < rows else scores.new_empty(groups, rows, rows)
    _diagonal_blocks(products, block, chunk).copy_(_score_blocks(scores, block))
    return products


def _score_blocks(scores: Tensor, block: int) -> Tensor:
    """View of the scores of later blocks (rows) with earlier ones (columns): [N·B·H, groups, blocks, block, block]."""
    assert scores.is_contiguous()
    chunk = scores.shape[-1]
    rows = _num_rows(block, chunk)
    # the next pair of blocks lies 2·block rows down and as many columns right
    next_pair = 2 * block * (chunk + 1)
    size = (scores.numel() // (chunk * chunk), chunk // 2 // rows, rows // block, block, block)
    strides = (chunk * chunk, rows // block * next_pair, next_pair, chunk, 1)
    return scores.as_strided(size, strides, scores.storage_offset() + block * chunk)


def _diagonal_blocks(products: Tensor, block: int, chunk: int) -> Tensor:
    """View of the diagonal blocks of [·, rows, rows], shaped as in `_score_blocks`."""
    rows = products.shape[-1]
    blocks = products.unflatten(0, (-1, chunk // 2 // rows))
    blocks = blocks.unflatten(-1, (-1, block)).unflatten(-3, (-1, block))
    return blocks.diagonal(dim1=2, dim2=4).movedim(-1, 2)
