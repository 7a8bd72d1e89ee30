"""Interactions between the tokens of one chunk: scores and their gradients.

Two tokens of a chunk are split at exactly one size of blocks, 32, 16, …, 1 tokens, at the start of the later block. The
decay between them is a product of two factors, each of one token alone and at most 1:

    exp(b_i − b_j) = exp(b_i − b_r) · exp(b_r − b_j),      r = last token of the earlier block,  j <= r < i

At each size a token is a query if it lies in the later block of its pair, else a key. So each size needs only one tile
X [C, K] of queries and keys, by row, times their factors:

    X Xᵀ         scores of the pairs that the size splits, and of others, which a mask drops
    Y = G X      factors ⊙ Y: dq in the rows of queries, −dk in those of keys
    X ⊙ Y        q ⊙ dq − k ⊙ dk

G [C, C] has the gradients dA of the size's pairs below the diagonal, −dAᵀ above it, and 0 elsewhere. Half of a product
is masked, but each factor is computed once, and tensor cores are not the bottleneck.

Where no channel decays by more than e^-60 between the chunk's middle token and either end, that token is r for all
pairs. Some factors then exceed 1. Rounding is relative, and in the pairs that are kept a large factor meets a small
one, so the error is the same. One product takes the place of six, and two exponentials that of six. Such chunks, if no
document starts inside, are called plain (`states`); with GLA's initial gates all are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.kernels import jit
from zeco_train.ops.gla.kernels.tiles import (
    head_offset,
    load_doc_ids,
    load_tile,
    round_to_bf16,
    split_decays,
    split_pairs,
)


@jit
def join(queries, keys):
    """bf16 queries and keys as upper and lower halves of 32 bits.

    Both stay in registers through all sizes. Joined, they take half as many, and one instruction extracts either, by
    role, as fp32.
    """
    upper = queries.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    return upper | keys.to(tl.uint16, bitcast=True).to(tl.uint32)


if triton.knobs.runtime.interpret:

    @jit
    def _take(joined, is_query):
        """fp32 queries or keys of `join`, by row."""
        return tl.where(is_query[:, None], joined & 0xFFFF0000, joined << 16).to(tl.float32, bitcast=True)
else:

    @jit
    def _take(joined, is_query):
        """fp32 queries or keys of `join`, by row: two bytes of it, above two of 0."""
        which = tl.where(is_query, 0x3244, 0x1044)[:, None].to(tl.uint32)
        joined, which = tl.broadcast(joined, which)
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;", "=f,r,r", [joined, which], dtype=tl.float32, is_pure=True, pack=1
        )


@jit
def decayed(
    b, sums, joined, queries, keys, shift, start, T, H, K, first_key, C: tl.constexpr, BK: tl.constexpr,
    JOINED: tl.constexpr,
):  # fmt: skip
    """For blocks of 2^shift tokens: [C], which tokens are queries; [C, BK], the factors; [C, BK], X."""
    is_query, factors = split_decays(b, sums, shift, start, T, H, K, first_key, C, BK)
    if JOINED:
        tokens = round_to_bf16(_take(joined, is_query) * factors)
    else:
        tokens = (tl.where(is_query[:, None], queries, keys).to(tl.float32) * factors).to(queries.dtype)
    return is_query, factors, tokens


@jit
def scores_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    b,  # [B, T, H, K] fp32, sums of g inside chunks
    queries,  # [B, T, H, K]: q* of `operands_kernel`, as the next two
    keys,  # [B, T, H, K]: k*
    kinds,  # [N, B, H] int32
    doc_ids,  # [T] int32, read with DOCUMENTS
    scores,  # [N, B, H, C, C], written: scale · Σ_K q_i ⊙ k_j ⊙ exp(b_i − b_j) where j <= i, else 0
    scale,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    BH,
    C: tl.constexpr,
    BK: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
    JOINED: tl.constexpr,
):
    """One program computes the scores of one chunk of one head. JOINED: see `join`; bf16 only."""
    chunk = tl.program_id(0)
    batch_head = tl.program_id(1)
    index = chunk.to(tl.int64) * BH + batch_head
    start = chunk * C
    rows = tl.arange(0, C)
    offset = head_offset(batch_head, T, H, K)
    total = tl.zeros([C, C], tl.float32)
    kind = tl.load(kinds + index)
    if kind > 0:
        for first_key in range(0, K, BK):
            own_queries = load_tile(queries + offset, start, T, H, K, first_key, C, BK)
            own_keys = load_tile(keys + offset, start, T, H, K, first_key, C, BK)
            total = tl.dot(own_queries, tl.trans(own_keys), total, input_precision=PRECISION)
        total = tl.where(rows[:, None] >= rows[None, :], total, 0.0)
    else:
        for first_key in range(0, K, BK):
            own_queries = load_tile(q + offset, start, T, H, K, first_key, C, BK)
            own_keys = load_tile(k + offset, start, T, H, K, first_key, C, BK)
            sums = load_tile(b + offset, start, T, H, K, first_key, C, BK)
            self = tl.sum(own_queries.to(tl.float32) * own_keys.to(tl.float32), axis=1)[:, None]
            total = tl.where(rows[:, None] == rows[None, :], total + self, total)
            joined = join(own_queries, own_keys) if JOINED else own_queries
            # log₂ C sizes of blocks
            for shift in range(tl.where(kind < 0, 0, 6)):
                _, _, tokens = decayed(
                    b + offset, sums, joined, own_queries, own_keys, shift, start, T, H, K, first_key, C, BK, JOINED
                )
                products = tl.dot(tokens, tl.trans(tokens), input_precision=PRECISION)
                total = tl.where(split_pairs(shift, C) & (rows[:, None] > rows[None, :]), total + products, total)
        total *= scale
        if DOCUMENTS:
            own, _, _ = load_doc_ids(doc_ids, start, T, C)
            total = tl.where(own[:, None] == own[None, :], total, 0.0)
    tl.store(scores + index * C * C + rows[:, None] * C + rows[None, :], total.to(scores.dtype.element_ty))
