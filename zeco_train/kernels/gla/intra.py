"""What happens between the tokens of one chunk: scores and their gradients.

Two tokens of a chunk are split at exactly one size of blocks, 32, 16, …, 1 tokens, at the start of the later block. The
decay between them is a product of two factors, each of one token alone and at most 1:

    exp(b_i − b_j) = exp(b_i − b_r) · exp(b_r − b_j),      r = last token of the earlier block,  j <= r < i

At one size a token lies in an earlier or in a later block, never in both, so it has one factor exp(−|b_t − b_r|), and
all pairs of that size are one matrix product, of which the mask of the size keeps its own. Seven exponentials for a
channel of a token and six products; no exponent is above 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.kernels.gla.tiles import (
    head_offset,
    load_pieces,
    load_rows,
    load_tile,
    state_pointers,
    store_tile,
)


@triton.jit
def _pairs(block, C: tl.constexpr):
    """[C, C] mask of the (later, earlier) pairs that blocks of `block` tokens split."""
    rows = tl.arange(0, C)
    later = (rows // block) % 2 == 1
    pair = rows // (2 * block)
    return (pair[:, None] == pair[None, :]) & later[:, None] & (~later)[None, :]


@triton.jit
def _factors(b, sums, block, start, T, H, K, first_key, C: tl.constexpr, BK: tl.constexpr):
    """[C, BK], exp(−|b_t − b_r|) for blocks of `block` tokens."""
    rows = tl.arange(0, C)
    reference = (rows // (2 * block)) * 2 * block + block - 1
    return tl.exp(-tl.abs(sums - load_rows(b, reference, start, T, H, K, first_key, BK)))


@triton.jit
def scores_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    b,  # [B, T, H, K] fp32, sums of g inside chunks
    pieces,  # [T] int32, read with DOCUMENTS
    scores,  # [N, B, H, C, C], written: scale · Σ_K q_i ⊙ k_j ⊙ exp(b_i − b_j) for j <= i, else 0
    scale,
    T,
    H,
    K,
    BH,
    C: tl.constexpr,
    BK: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program makes the scores of one chunk of one head."""
    chunk = tl.program_id(0)
    batch_head = tl.program_id(1)
    q += head_offset(batch_head, T, H, K)
    k += head_offset(batch_head, T, H, K)
    b += head_offset(batch_head, T, H, K)
    start = chunk * C
    rows = tl.arange(0, C)

    total = tl.zeros([C, C], tl.float32)
    for first_key in range(0, K, BK):
        queries = load_tile(q, start, T, H, K, first_key, C, BK)
        keys = load_tile(k, start, T, H, K, first_key, C, BK)
        sums = load_tile(b, start, T, H, K, first_key, C, BK)
        wide_queries = queries.to(tl.float32)
        wide_keys = keys.to(tl.float32)
        own = tl.sum(wide_queries * wide_keys, axis=1)
        total += tl.where(rows[:, None] == rows[None, :], own[:, None], 0.0)
        for level in range(6):
            block = 32 >> level
            factors = _factors(b, sums, block, start, T, H, K, first_key, C, BK)
            later = (wide_queries * factors).to(queries.dtype)
            earlier = (wide_keys * factors).to(queries.dtype)
            products = tl.dot(later, tl.trans(earlier), input_precision=PRECISION)
            total += tl.where(_pairs(block, C), products, 0.0)
    if DOCUMENTS:
        own_pieces, _, _ = load_pieces(pieces, start, T, C)
        total = tl.where(own_pieces[:, None] == own_pieces[None, :], total, 0.0)
    index = (chunk.to(tl.int64) * BH + batch_head) * C * C
    pointers = scores + index + rows[:, None] * C + rows[None, :]
    tl.store(pointers, (total * scale).to(scores.dtype.element_ty))


@triton.jit
def intra_grads_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    b,  # [B, T, H, K] fp32, sums of g inside chunks
    do,  # [B, T, H, V]
    pieces,  # [T] int32, read with DOCUMENTS
    states,  # [N + 1, B, H, K, V]: the true states before the chunks
    scores,  # [N, B, H, C, C], written: as in `scores_kernel`
    dq,  # [B, T, H, K], written, complete
    dk,  # [B, T, H, K], written: the part that stays inside the chunk
    terms,  # [B, T, H, K] fp32, written: q ⊙ dq − k ⊙ dk with this dk
    scale,
    T,
    H,
    K,
    V,
    BH,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program works on one chunk of one head. Nothing here depends on later tokens' gradients of states:

    dA = scale · do vᵀ,    dq_i = Σ_j dA_ij k_j ⊙ exp(b_i − b_j) + scale · exp(b_i) ⊙ S do_i,
    dk_j = Σ_i dA_ij q_i ⊙ exp(b_i − b_j)
    """
    chunk = tl.program_id(0)
    batch_head = tl.program_id(1)
    q += head_offset(batch_head, T, H, K)
    k += head_offset(batch_head, T, H, K)
    b += head_offset(batch_head, T, H, K)
    dq += head_offset(batch_head, T, H, K)
    dk += head_offset(batch_head, T, H, K)
    terms += head_offset(batch_head, T, H, K)
    v += head_offset(batch_head, T, H, V)
    do += head_offset(batch_head, T, H, V)
    start = chunk * C
    rows = tl.arange(0, C)
    index = chunk.to(tl.int64) * BH + batch_head

    score_grads = tl.zeros([C, C], tl.float32)
    for first_value in range(0, V, BV):
        output_grads = load_tile(do, start, T, H, V, first_value, C, BV)
        values = load_tile(v, start, T, H, V, first_value, C, BV)
        score_grads += tl.dot(output_grads, tl.trans(values), input_precision=PRECISION)
    score_grads *= scale
    if DOCUMENTS:
        own_pieces, before, _ = load_pieces(pieces, start, T, C)
        score_grads = tl.where(own_pieces[:, None] == own_pieces[None, :], score_grads, 0.0)
    own_grads = tl.sum(tl.where(rows[:, None] == rows[None, :], score_grads, 0.0), axis=1)
    score_grads = score_grads.to(q.dtype.element_ty)

    total = tl.zeros([C, C], tl.float32)
    for first_key in range(0, K, BK):
        sums = load_tile(b, start, T, H, K, first_key, C, BK)
        query_grads = tl.zeros([C, BK], tl.float32)
        for first_value in range(0, V, BV):
            output_grads = load_tile(do, start, T, H, V, first_value, C, BV)
            pointers, inside = state_pointers(states, index, K, V, first_key, first_value, BK, BV)
            state = tl.load(pointers, mask=inside, other=0.0).to(output_grads.dtype)
            query_grads += tl.dot(output_grads, tl.trans(state), input_precision=PRECISION)
        from_start = tl.exp(sums) * scale
        if DOCUMENTS:
            from_start = tl.where((own_pieces == before)[:, None], from_start, 0.0)
        query_grads *= from_start

        queries = load_tile(q, start, T, H, K, first_key, C, BK)
        keys = load_tile(k, start, T, H, K, first_key, C, BK)
        wide_queries = queries.to(tl.float32)
        wide_keys = keys.to(tl.float32)
        own = tl.sum(wide_queries * wide_keys, axis=1)
        total += tl.where(rows[:, None] == rows[None, :], own[:, None], 0.0)
        query_grads += own_grads[:, None] * wide_keys
        key_grads = own_grads[:, None] * wide_queries
        for level in range(6):
            block = 32 >> level
            pairs = _pairs(block, C)
            factors = _factors(b, sums, block, start, T, H, K, first_key, C, BK)
            later = (wide_queries * factors).to(queries.dtype)
            earlier = (wide_keys * factors).to(queries.dtype)
            products = tl.dot(later, tl.trans(earlier), input_precision=PRECISION)
            total += tl.where(pairs, products, 0.0)
            pair_grads = tl.where(pairs, score_grads, 0.0).to(queries.dtype)
            query_grads += factors * tl.dot(pair_grads, earlier, input_precision=PRECISION)
            key_grads += factors * tl.dot(tl.trans(pair_grads), later, input_precision=PRECISION)
        store_tile(dq, query_grads, start, T, H, K, first_key, C, BK)
        store_tile(dk, key_grads, start, T, H, K, first_key, C, BK)
        store_tile(terms, wide_queries * query_grads - wide_keys * key_grads, start, T, H, K, first_key, C, BK)
    if DOCUMENTS:
        total = tl.where(own_pieces[:, None] == own_pieces[None, :], total, 0.0)
    pointers = scores + index * C * C + rows[:, None] * C + rows[None, :]
    tl.store(pointers, (total * scale).to(scores.dtype.element_ty))
