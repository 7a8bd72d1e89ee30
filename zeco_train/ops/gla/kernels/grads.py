"""dq, dk and dg, once X of the true states before the chunks, and of the gradients after them, are known.

With X and X' of the walks (`states`), and dA = do vᵀ on and below the diagonal:

    dq* = dA k* + do Xᵀ        dk* = dAᵀ q* + v X'ᵀ
    dg_t = Σ_{i >= t} (q*_i ⊙ dq*_i − k*_i ⊙ (dk*_i of inside)) + Σ_{j < t} k*_j ⊙ (dk*_j beyond) + Σ_V X ⊙ X'

Sums over the chunk's tokens; of the X' it is Σ_V (cross ⊙ X) ⊙ X' if the chunk is not plain. The terms of dg are for
the paths past token t: to a query of this chunk, from a key of this chunk to a later one, and from before the chunk to
after it. The usual form, Σ_V S_end ⊙ dS less the k ⊙ dk of tokens from t on, is the same number, but a difference of
larger ones. A pair (i, j) enters the first sum at i and, with the other sign, at j. Both come from the same rounded
factors, so that they cancel in the sum over later tokens: otherwise their rounding errors would spread over a chunk's
tokens, and where decays are strong they exceed dg itself.
"""

from __future__ import annotations

import triton.language as tl

from zeco_train.kernels import jit
from zeco_train.ops.gla.kernels.intra import decayed, join
from zeco_train.ops.gla.kernels.states import CROSS
from zeco_train.ops.gla.kernels.tiles import (
    decay,
    head_offset,
    laid_out_like,
    load_doc_ids,
    load_last_row,
    load_tile,
    split_pairs,
    store_tile,
)


@jit
def _add_product(x, y, total, T, PRECISION: tl.constexpr):
    """`total` + `x` y, in a loop of one step: else eight warps hold whole rows each, as another product follows."""
    for _ in range(tl.minimum(T, 1)):
        total = tl.dot(x, y, total, input_precision=PRECISION)
    return total


@jit
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


@jit
def load_states(states, index, K, V, first_key, first_value, BK: tl.constexpr, BV: tl.constexpr):
    """A [BV, BK] tile of number `index` in [.., V, K]."""
    keys = first_key + tl.arange(0, BK)
    values = first_value + tl.arange(0, BV)
    inside = (values < V)[:, None] & (keys < K)[None, :]
    return tl.load(states + index * K * V + (values * K)[:, None] + keys[None, :], mask=inside, other=0.0)


@jit
def _of_values(
    v, do, states, state_grads, index, start, first_key, T, H, K, V, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, TURNED: tl.constexpr, SUMMED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[C, C] do vᵀ, and with TURNED its transpose; [C, BK] do X, v X'; [BK] Σ_V X ⊙ X'.

    SUMMED: the last in registers; else, in a pipelined loop, as the diagonal of a product: there a tile of a product
    that registers hold, too, would be overwritten (lab/campaigns/buffers.py).
    """
    grads = tl.zeros([C, C], tl.float32)
    turned = tl.zeros([C, C], tl.float32)
    query_grads = tl.zeros([C, BK], tl.float32)
    key_grads = tl.zeros([C, BK], tl.float32)
    boundary = tl.zeros([1, BK], tl.float32) if SUMMED else tl.zeros([BK, BK], tl.float32)
    for first_value in range(0, V, BV):
        output_grads = load_tile(do, start, T, H, V, first_value, C, BV)
        values = load_tile(v, start, T, H, V, first_value, C, BV)
        state = load_states(states, index, K, V, first_key, first_value, BK, BV)
        state_grad = load_states(state_grads, index, K, V, first_key, first_value, BK, BV)
        if SUMMED:
            boundary += tl.sum(state.to(tl.float32) * state_grad.to(tl.float32), axis=0)[None, :]
        else:
            boundary = tl.dot(tl.trans(state), state_grad, boundary, input_precision=PRECISION)
        query_grads = tl.dot(output_grads, state, query_grads, input_precision=PRECISION)
        key_grads = tl.dot(values, state_grad, key_grads, input_precision=PRECISION)
        grads = tl.dot(output_grads, tl.trans(values), grads, input_precision=PRECISION)
        if TURNED:
            # a product of its own costs less than the transpose
            turned = tl.dot(values, tl.trans(output_grads), turned, input_precision=PRECISION)
    channels = tl.arange(0, BK)
    if not SUMMED:
        boundary = tl.where(channels[:, None] == channels[None, :], boundary, 0.0)
    return grads, turned, query_grads, key_grads, tl.sum(boundary, axis=0)


@jit
def plain_grads_kernel(
    queries,  # [B, T, H, K]: q*
    keys,  # [B, T, H, K]: k*
    v,  # [B, T, H, V]
    b,  # [B, T, H, K] fp32, sums of g inside chunks
    do,  # [B, T, H, V]
    kinds,  # [N, B, H] int32, see `operands_kernel`
    states,  # [N, B, H, V, K]: X
    state_grads,  # [N, B, H, V, K]: X'
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
    SUMMED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes BK columns of the gradients of one plain chunk of one head."""
    tiles: tl.constexpr = (K + BK - 1) // BK
    first_key = (tl.program_id(0) % tiles) * BK
    chunk = tl.program_id(0) // tiles
    batch_head = tl.program_id(1)
    index = chunk.to(tl.int64) * BH + batch_head
    start = chunk * C
    rows = tl.arange(0, C)
    of_keys = head_offset(batch_head, T, H, K)
    of_values = head_offset(batch_head, T, H, V)
    kind = tl.load(kinds + index)
    if kind > 0:
        grads, _, query_grads, key_grads, passing = _of_values(
            v + of_values, do + of_values, states, state_grads, index, start, first_key, T, H, K, V, C, BK, BV, False,
            SUMMED, PRECISION,
        )  # fmt: skip
        own_queries = load_tile(queries + of_keys, start, T, H, K, first_key, C, BK)
        own_keys = load_tile(keys + of_keys, start, T, H, K, first_key, C, BK)
        sums = load_tile(b + of_keys, start, T, H, K, first_key, C, BK)
        pairs = tl.where(rows[:, None] >= rows[None, :], grads, 0.0).to(own_keys.dtype)
        leaving = own_keys.to(tl.float32) * key_grads
        query_grads = _add_product(pairs, own_keys, query_grads, T, PRECISION)
        key_grads = _add_product(tl.trans(pairs), own_queries, key_grads, T, PRECISION)
        # tokens before t are all less those from t on
        passing += tl.sum(leaving, axis=0)
        terms = own_queries.to(tl.float32) * query_grads - own_keys.to(tl.float32) * key_grads
        middle = load_last_row(b + of_keys, start, T, H, K, first_key, C // 2, BK)
        distances = sums - middle[None, :]
        store_tile(dq + of_keys, query_grads * (decay(distances) * scale), start, T, H, K, first_key, C, BK)
        store_tile(dk + of_keys, key_grads * decay(-distances), start, T, H, K, first_key, C, BK)
        parts: tl.constexpr = 2 if v.dtype.element_ty == tl.bfloat16 else 0
        decay_grads = passing[None, :] + _sum_tokens(rows[:, None] <= rows[None, :], terms, parts)
        decay_grads = tl.where((rows[:, None] == 0) & (kind == 2), 0.0, decay_grads)
        store_tile(dg + of_keys, decay_grads, start, T, H, K, first_key, C, BK)


@jit
def _other_grads(
    q, k, v, b, do, doc_ids, kind, factors, states, state_grads, dq, dk, dg, index, start, first_key, scale, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DOCUMENTS: tl.constexpr, SUMMED: tl.constexpr, PRECISION: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """BK columns of the gradients of one chunk that is not plain: its pairs by sizes of blocks, see `intra`."""
    rows = tl.arange(0, C)
    grads, turned, query_grads, key_grads, passing = _of_values(
        v, do, states, state_grads, index, start, first_key, T, H, K, V, C, BK, BV, True, SUMMED, PRECISION
    )
    self_grads = tl.sum(tl.where(rows[:, None] == rows[None, :], grads, 0.0), axis=1)[:, None] * scale
    if kind < 0:
        # a token sees itself, and the state after the chunk the last one
        query_grads = self_grads * load_tile(k, start, T, H, K, first_key, C, BK)
        key_grads = tl.where((rows == tl.minimum(C, T - start) - 1)[:, None], key_grads, 0.0)
        key_grads += self_grads * load_tile(q, start, T, H, K, first_key, C, BK)
        decay_grads = tl.zeros([C, BK], tl.float32)
    else:
        # of the pairs of all sizes, G of `intra`
        pair_grads = tl.where(rows[:, None] >= rows[None, :], grads, -turned) * scale
        if DOCUMENTS:
            own, before, end = load_doc_ids(doc_ids, start, T, C)
            pair_grads = tl.where(own[:, None] == own[None, :], pair_grads, 0.0)
        sums = laid_out_like(load_tile(b, start, T, H, K, first_key, C, BK), query_grads)
        queries = laid_out_like(load_tile(q, start, T, H, K, first_key, C, BK), query_grads)
        keys = laid_out_like(load_tile(k, start, T, H, K, first_key, C, BK), query_grads)
        total = load_last_row(b, start, T, H, K, first_key, C, BK)
        to_end = decay(tl.where((rows < T - start)[:, None], total[None, :] - sums, 0.0))
        from_start = decay(sums) * scale
        if DOCUMENTS:
            to_end = tl.where((own == end)[:, None], to_end, 0.0)
            from_start = tl.where((own == before)[:, None], from_start, 0.0)
        key_grads *= to_end
        leaving = keys.to(tl.float32) * key_grads
        query_grads *= from_start
        terms = queries.to(tl.float32) * query_grads
        columns = first_key + tl.arange(0, BK)
        passing *= tl.load(factors + index * 4 * K + CROSS * K + columns, mask=columns < K, other=0.0)
        query_grads += self_grads * keys.to(tl.float32)
        key_grads += self_grads * queries.to(tl.float32)
        joined = join(queries, keys) if JOINED else queries
        for shift in range(6):
            is_query, factor, tokens = decayed(
                b, sums, joined, queries, keys, shift, start, T, H, K, first_key, C, BK, JOINED
            )
            size_grads = tl.where(split_pairs(shift, C), pair_grads, 0.0).to(tokens.dtype)
            seen = tl.dot(size_grads, tokens, input_precision=PRECISION)
            moved = factor * seen
            to_query = tl.where(is_query, 1.0, 0.0)[:, None]
            query_grads += to_query * moved
            key_grads += (to_query - 1.0) * moved
            terms += tokens.to(tl.float32) * seen
        parts: tl.constexpr = 2 if k.dtype.element_ty == tl.bfloat16 else 0
        later = rows[:, None] <= rows[None, :]
        if DOCUMENTS:
            # not past a restart: terms of the next document add up to 0 only within its rounding
            later = later & (own[:, None] == own[None, :])
        decay_grads = passing[None, :] + _sum_tokens(later, terms, parts)
        decay_grads += _sum_tokens(rows[:, None] > rows[None, :], leaving, parts)
        if DOCUMENTS:
            previous = tl.load(doc_ids + start + rows - 1, mask=(start + rows > 0) & (rows < T - start), other=0)
            decay_grads = tl.where((own == previous)[:, None], decay_grads, 0.0)
    store_tile(dq, query_grads, start, T, H, K, first_key, C, BK)
    store_tile(dk, key_grads, start, T, H, K, first_key, C, BK)
    store_tile(dg, decay_grads, start, T, H, K, first_key, C, BK)


@jit
def other_grads_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    b,  # [B, T, H, K] fp32, sums of g inside chunks
    do,  # [B, T, H, V]
    doc_ids,  # [T] int32, read with DOCUMENTS
    kinds,  # [N, B, H] int32
    factors,  # [N, B, H, 4, K] fp32
    states,  # [N, B, H, V, K]: X
    state_grads,  # [N, B, H, V, K]: X'
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
    SUMMED: tl.constexpr,
    PRECISION: tl.constexpr,
    JOINED: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """One program computes BK columns of the gradients of those of CHUNKS chunks of one head that are not plain.

    A program for plain chunks as well would take the registers of both. JOINED: see `join`; bf16 only.
    """
    tiles: tl.constexpr = (K + BK - 1) // BK
    first_key = (tl.program_id(0) % tiles) * BK
    first_chunk = (tl.program_id(0) // tiles) * CHUNKS
    batch_head = tl.program_id(1)
    of_keys = head_offset(batch_head, T, H, K)
    of_values = head_offset(batch_head, T, H, V)
    # in registers, what all chunks share would cost more than it saves
    for step in tl.range(tl.minimum(CHUNKS, tl.cdiv(T, C) - first_chunk), disable_licm=True):
        chunk = first_chunk + step
        index = chunk.to(tl.int64) * BH + batch_head
        kind = tl.load(kinds + index)
        if kind <= 0:
            _other_grads(
                q + of_keys, k + of_keys, v + of_values, b + of_keys, do + of_values, doc_ids, kind, factors, states,
                state_grads, dq + of_keys, dk + of_keys, dg + of_keys, index, chunk * C, first_key, scale, T, H, K, V,
                C, BK, BV, DOCUMENTS, SUMMED, PRECISION, JOINED,
            )  # fmt: skip
