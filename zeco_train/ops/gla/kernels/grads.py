"""dq, dk and dg, once the true states before the chunks and the gradients after them are known.

    dA = scale · do vᵀ
    dq_i = Σ_{j <= i} dA_ij k_j ⊙ exp(b_i − b_j) + scale · exp(b_i) ⊙ S do_i
    dk_j = Σ_{i >= j} dA_ij q_i ⊙ exp(b_i − b_j) + exp(b_end − b_j) ⊙ dS v_j
    dg_t = Σ_{i >= t} (q_i ⊙ dq_i − k_i ⊙ (dk_i of inside)) + Σ_{j < t} k_j ⊙ (dk_j beyond) + Σ_V exp(b_end) S ⊙ dS

Sums over the chunk's tokens; S: true state before the chunk, dS: gradient with respect to that after it. The terms of
dg are for the paths past token t: to a query of this chunk, from a key of this chunk to a later one, and from before
the chunk to after it. The usual form, Σ_V S_end ⊙ dS less the k ⊙ dk of tokens from t on, is the same number, but a
difference of larger ones.

A pair (i, j) enters the first sum at i and, with the other sign, at j. Both come from the same rounded factors, so that
they cancel in the sum over later tokens: otherwise their rounding errors would spread over a chunk's tokens, and where
decays are strong they exceed dg itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.ops.gla.kernels.intra import decayed, join
from zeco_train.ops.gla.kernels.tiles import (
    are_mild,
    decay,
    from_middle,
    head_offset,
    laid_out_like,
    load_doc_ids,
    load_last_row,
    load_tile,
    split_pairs,
    state_pointers,
    store_tile,
)


@triton.jit
def _product(x, y, T, PRECISION: tl.constexpr):
    """`x` y in a loop of one step: else eight warps would each hold whole rows, as another product follows."""
    total = tl.zeros([x.shape[0], y.shape[1]], tl.float32)
    for _ in range(tl.minimum(T, 1)):
        total = tl.dot(x, y, total, input_precision=PRECISION)
    return total


@triton.jit
def _sum_tokens(which, x, PARTS: tl.constexpr):
    """`tiles.sum_tokens` in a loop, for the same reason."""
    if PARTS == 0:
        return tl.dot(which.to(tl.float32), x, input_precision="tf32x3")
    total = tl.zeros([x.shape[0], x.shape[1]], tl.float32)
    for _ in range(PARTS):
        part = x.to(tl.bfloat16)
        total = tl.dot(which.to(tl.bfloat16), part, total)
        x -= part.to(tl.float32)
    return total


@triton.jit
def _chunk_grads(
    q,
    k,
    v,
    b,
    do,
    doc_ids,
    states,
    state_grads,
    dq,
    dk,
    dg,
    index,
    start,
    first_key,
    scale,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
    JOINED: tl.constexpr,
    MILD: tl.constexpr,
):
    """BK columns of the gradients of one chunk of one head, see `grads_kernel`."""
    rows = tl.arange(0, C)
    grads = tl.zeros([C, C], tl.float32)
    turned = tl.zeros([C, C], tl.float32)
    query_grads = tl.zeros([C, BK], tl.float32)
    key_grads = tl.zeros([C, BK], tl.float32)
    boundary = tl.zeros([BK, BK], tl.float32)
    for first_value in range(0, V, BV):
        output_grads = load_tile(do, start, T, H, V, first_value, C, BV)
        values = load_tile(v, start, T, H, V, first_value, C, BV)
        pointers, inside = state_pointers(states, index, K, V, first_key, first_value, BK, BV)
        state = tl.load(pointers, mask=inside, other=0.0)
        pointers, inside = state_pointers(state_grads, index, K, V, first_key, first_value, BK, BV)
        state_grad = tl.load(pointers, mask=inside, other=0.0)
        # Σ_V S ⊙ dS on its diagonal: a tile in registers, too, would be overwritten (lab/campaigns/buffers.py)
        boundary += tl.dot(state, tl.trans(state_grad), input_precision=PRECISION)
        query_grads += tl.dot(output_grads, tl.trans(state), input_precision=PRECISION)
        key_grads += tl.dot(values, tl.trans(state_grad), input_precision=PRECISION)
        grads += tl.dot(output_grads, tl.trans(values), input_precision=PRECISION)
        if not MILD:
            # a product of its own costs less than the transpose
            turned += tl.dot(values, tl.trans(output_grads), input_precision=PRECISION)

    channels = tl.arange(0, BK)
    passing = tl.sum(tl.where(channels[:, None] == channels[None, :], boundary, 0.0), axis=1)
    sums = load_tile(b, start, T, H, K, first_key, C, BK)
    queries = load_tile(q, start, T, H, K, first_key, C, BK)
    keys = load_tile(k, start, T, H, K, first_key, C, BK)
    # of the pairs of all sizes, G of `intra`
    pair_grads = tl.where(rows[:, None] >= rows[None, :], grads * scale, 0.0 if MILD else turned * -scale)
    if DOCUMENTS:
        own, before, end = load_doc_ids(doc_ids, start, T, C)
        pair_grads = tl.where(own[:, None] == own[None, :], pair_grads, 0.0)
    self_grads = tl.sum(tl.where(rows[:, None] == rows[None, :], pair_grads, 0.0), axis=1)

    sums = laid_out_like(sums, query_grads)
    queries = laid_out_like(queries, query_grads)
    keys = laid_out_like(keys, query_grads)
    total = load_last_row(b, start, T, H, K, first_key, C, BK)
    factors = decay(tl.where((rows < T - start)[:, None], total[None, :] - sums, 0.0))
    if DOCUMENTS:
        factors = tl.where((own == end)[:, None], factors, 0.0)
    key_grads *= factors
    leaving = keys.to(tl.float32) * key_grads
    factors = decay(sums) * scale
    if DOCUMENTS:
        factors = tl.where((own == before)[:, None], factors, 0.0)
    query_grads *= factors
    terms = queries.to(tl.float32) * query_grads
    passing *= decay(total)
    if DOCUMENTS:
        passing = tl.where(before == end, passing, 0.0)
    else:
        # one tile for both sums: tokens before t are all less those from t on
        passing += tl.sum(leaving, axis=0)
        terms -= leaving
    query_grads += self_grads[:, None] * keys.to(tl.float32)
    key_grads += self_grads[:, None] * queries.to(tl.float32)
    if MILD:
        # few tiles at a time, each stored once complete
        distances = from_middle(b, sums, start, T, H, K, first_key, C, BK)
        earlier = tl.where(rows[:, None] > rows[None, :], pair_grads, 0.0).to(queries.dtype)
        own_keys = (keys.to(tl.float32) * decay(-distances)).to(keys.dtype)
        factors = decay(distances)
        own_queries = (queries.to(tl.float32) * factors).to(queries.dtype)
        seen = _product(earlier, own_keys, T, PRECISION)
        query_grads += factors * seen
        store_tile(dq, query_grads, start, T, H, K, first_key, C, BK)
        terms += own_queries.to(tl.float32) * seen
        seen = _product(tl.trans(earlier), own_queries, T, PRECISION)
        key_grads += decay(-distances) * seen
        terms -= own_keys.to(tl.float32) * seen
    else:
        joined = join(queries, keys) if JOINED else queries
        for shift in range(6):
            is_query, factors, tokens = decayed(
                b, sums, joined, queries, keys, shift, start, T, H, K, first_key, C, BK, JOINED
            )
            size_grads = tl.where(split_pairs(shift, C), pair_grads, 0.0).to(tokens.dtype)
            seen = tl.dot(size_grads, tokens, input_precision=PRECISION)
            moved = factors * seen
            to_query = tl.where(is_query, 1.0, 0.0)[:, None]
            query_grads += to_query * moved
            key_grads += (to_query - 1.0) * moved
            terms += tokens.to(tl.float32) * seen
        store_tile(dq, query_grads, start, T, H, K, first_key, C, BK)
    store_tile(dk, key_grads, start, T, H, K, first_key, C, BK)

    parts: tl.constexpr = 2 if k.dtype.element_ty == tl.bfloat16 else 0
    later = rows[:, None] <= rows[None, :]
    if DOCUMENTS:
        # not past a restart: terms of the next document add up to 0 only within its rounding
        later = later & (own[:, None] == own[None, :])
    decay_grads = passing[None, :] + _sum_tokens(later, terms, parts)
    if DOCUMENTS:
        decay_grads += _sum_tokens(rows[:, None] > rows[None, :], leaving, parts)
        previous = tl.load(doc_ids + start + rows - 1, mask=(start + rows > 0) & (rows < T - start), other=0)
        decay_grads = tl.where((own == previous)[:, None], decay_grads, 0.0)
    store_tile(dg, decay_grads, start, T, H, K, first_key, C, BK)


@triton.jit
def grads_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    b,  # [B, T, H, K] fp32, sums of g inside chunks
    do,  # [B, T, H, V]
    doc_ids,  # [T] int32, read with DOCUMENTS
    states,  # [N, B, H, K, V]
    state_grads,  # [N, B, H, K, V]
    dq,  # [B, T, H, K], written
    dk,  # [B, T, H, K], written
    dg,  # [B, T, H, K] fp32, written
    scale,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BH,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
    JOINED: tl.constexpr,
    MILD: tl.constexpr,
    CHUNKS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program computes BK columns of the gradients of some chunks of one head.

    MILD: only chunks that are mild, a program each; else only the others, a program for CHUNKS. One program for either
    kind would take the registers of both. JOINED: see `join`; bf16 only. KEYS: see `are_mild`.
    """
    tiles: tl.constexpr = (K + BK - 1) // BK
    first_key = (tl.program_id(0) % tiles) * BK
    first_chunk = (tl.program_id(0) // tiles) * CHUNKS
    batch_head = tl.program_id(1)
    q += head_offset(batch_head, T, H, K)
    k += head_offset(batch_head, T, H, K)
    b += head_offset(batch_head, T, H, K)
    dq += head_offset(batch_head, T, H, K)
    dk += head_offset(batch_head, T, H, K)
    dg += head_offset(batch_head, T, H, K)
    v += head_offset(batch_head, T, H, V)
    do += head_offset(batch_head, T, H, V)
    if MILD:
        start = first_chunk * C
        if are_mild(b, first_chunk, T, H, K, C, 1, KEYS):
            _chunk_grads(
                q, k, v, b, do, doc_ids, states, state_grads, dq, dk, dg, first_chunk.to(tl.int64) * BH + batch_head,
                start, first_key, scale, T, H, K, V, C, BK, BV, DOCUMENTS, PRECISION, JOINED, MILD,
            )  # fmt: skip
    elif not are_mild(b, first_chunk, T, H, K, C, CHUNKS, KEYS):
        for step in range(tl.minimum(CHUNKS, tl.cdiv(T, C) - first_chunk)):
            chunk = first_chunk + step
            if not are_mild(b, chunk, T, H, K, C, 1, KEYS):
                _chunk_grads(
                    q, k, v, b, do, doc_ids, states, state_grads, dq, dk, dg, chunk.to(tl.int64) * BH + batch_head,
                    chunk * C, first_key, scale, T, H, K, V, C, BK, BV, DOCUMENTS, PRECISION, JOINED, MILD,
                )  # fmt: skip
