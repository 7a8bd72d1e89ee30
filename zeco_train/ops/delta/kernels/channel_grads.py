"""`zeco_train.ops.delta.kernels.grads` with decays by channel.

Pairs of tokens are grouped by sizes of blocks, as in `zeco_train.ops.gla.kernels.intra`. In a mild chunk all factors
are from and to its middle token, m, those of the states, too, so that a sum over the chunk's tokens and one over a
state are one sum:

    dq = exp(b − b_m) ⊙ (scale · exp(b_m) ⊙ do Sᵀ + Σ_j dP_ij k_j ⊙ exp(b_m − b_j))
"""

from __future__ import annotations

import triton.language as tl

from zeco_train.kernels import jit
from zeco_train.ops.delta.kernels.grads import later_tokens, load_transposed, mask_pairs, round_to_tokens
from zeco_train.ops.delta.kernels.systems import border_decays, load_decays
from zeco_train.ops.gla.kernels.tiles import (
    are_mild,
    decay,
    from_middle,
    head_offset,
    laid_out_like,
    load_doc_ids,
    load_last_row,
    load_tile,
    split_decays,
    split_pairs,
    store_tile,
    sum_tokens,
)
from zeco_train.ops.scalar_decay.kernels.decays import key_head_offset


@jit
def _chunk_grads(
    chunk, tile, batch_head, q, k, sums, beta, do, doc_ids, states, grads, added, dv, dq, dk, dg, dbeta, scale, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BH, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, MILD: tl.constexpr,
):  # fmt: skip
    """The gradients of BK channels of the keys of one chunk of one head, see `channel_grads_kernel`."""
    first_key = tile * BK
    start = chunk * C
    of_group = key_head_offset(batch_head, T, H, G, K)
    of_keys = head_offset(batch_head, T, H, K)
    of_head = head_offset(batch_head, T, H, V)
    index = chunk.to(tl.int64) * BH + batch_head
    DTYPE: tl.constexpr = k.dtype.element_ty
    score_grads = tl.zeros([C, C], tl.float32)
    pair_grads = tl.zeros([C, C], tl.float32)
    query_grads = tl.zeros([C, BK], tl.float32)
    row_grads = tl.zeros([C, BK], tl.float32)
    column_grads = tl.zeros([C, BK], tl.float32)
    boundary_term = tl.zeros([BK, BK], tl.float32)  # on its diagonal
    for first_value in tl.range(0, V, BV, disable_licm=True):
        new = load_tile(added + of_head, start, T, H, V, first_value, C, BV)
        value_grads = load_tile(dv + of_head, start, T, H, V, first_value, C, BV)
        output_grads = load_tile(do + of_head, start, T, H, V, first_value, C, BV)
        state = load_transposed(states, index, K, V, first_key, first_value, BK, BV)
        grad = load_transposed(grads, index, K, V, first_key, first_value, BK, BV)
        score_grads = tl.dot(output_grads, tl.trans(new), score_grads, input_precision=PRECISION)
        pair_grads = tl.dot(value_grads, tl.trans(new), pair_grads, input_precision=PRECISION)
        query_grads = tl.dot(output_grads, state, query_grads, input_precision=PRECISION)
        row_grads = tl.dot(value_grads, state, row_grads, input_precision=PRECISION)
        column_grads = tl.dot(new, grad, column_grads, input_precision=PRECISION)
        boundary_term = tl.dot(tl.trans(state), grad, boundary_term, input_precision=PRECISION)
    score_grads, self, pair_grads = mask_pairs(
        score_grads, pair_grads, beta, dbeta, doc_ids, batch_head, tile, start, scale, T, H, C, DOCUMENTS, DTYPE
    )
    self = self[:, None]
    if not MILD:
        # for both roles of a row at once
        score_grads -= tl.trans(score_grads)
        pair_grads -= tl.trans(pair_grads)
    score_grads = round_to_tokens(score_grads, DTYPE, True)
    pair_grads = round_to_tokens(pair_grads, DTYPE, True)

    own, total = load_decays(sums, batch_head, start, T, H, K, first_key, C, BK, True)
    own = laid_out_like(own, query_grads)
    from_start, to_end, survives = border_decays(own, total, doc_ids, start, T, C, DOCUMENTS)
    sums += head_offset(batch_head, T, H, K)
    queries = laid_out_like(load_tile(q + of_group, start, T, G, K, first_key, C, BK), query_grads).to(tl.float32)
    keys = laid_out_like(load_tile(k + of_group, start, T, G, K, first_key, C, BK), query_grads).to(tl.float32)
    if MILD:
        middle = load_last_row(sums, start, T, H, K, first_key, C // 2, BK)[None, :]
        distances = from_middle(sums, own, start, T, H, K, first_key, C, BK)
        later, earlier = decay(distances), decay(-distances)
        turned_keys = round_to_tokens(keys * earlier, DTYPE, True)
        own_keys = round_to_tokens(keys * later, DTYPE, True)
        own_queries = round_to_tokens(queries * later, DTYPE, True)
        from_start, to_end = decay(middle), decay(total - middle)
        if DOCUMENTS:
            doc_ids_of, before, end = load_doc_ids(doc_ids, start, T, C)
            from_start = tl.where((doc_ids_of == before)[:, None], from_start, 0.0)
            to_end = tl.where((doc_ids_of == end)[:, None], to_end, 0.0)
    query_grads *= from_start * scale
    row_grads *= -from_start
    column_grads *= to_end
    if MILD:
        leaving = turned_keys.to(tl.float32) * column_grads
        # under conditions that always hold: see `_split_product` of the scalar decays
        if start < T:
            query_grads = tl.dot(score_grads, turned_keys, query_grads, input_precision=PRECISION)
            row_grads = tl.dot(pair_grads, turned_keys, row_grads, input_precision=PRECISION)
            column_grads = tl.dot(tl.trans(score_grads), own_queries, column_grads, input_precision=PRECISION)
        if T > 0:
            column_grads = tl.dot(tl.trans(pair_grads), own_keys, column_grads, input_precision=PRECISION)
        terms = own_queries.to(tl.float32) * query_grads + own_keys.to(tl.float32) * row_grads
        terms -= turned_keys.to(tl.float32) * column_grads
        query_grads *= later
        key_grads = row_grads * later + column_grads * earlier
    else:
        leaving = keys * column_grads
        terms = queries * query_grads + keys * row_grads - leaving
        key_grads = row_grads + column_grads
        for shift in range(6):
            is_later, factors = split_decays(sums, own, shift, start, T, H, K, first_key, C, BK)
            to_later = tl.where(is_later, 1.0, 0.0)[:, None]
            split = split_pairs(shift, C)
            decayed_keys = round_to_tokens(keys * factors, DTYPE)
            mixed = round_to_tokens(tl.where(is_later[:, None], queries, keys) * factors, DTYPE)
            of_scores = tl.dot(tl.where(split, score_grads, 0.0), mixed, input_precision=PRECISION)
            of_pairs = tl.dot(tl.where(split, pair_grads, 0.0), decayed_keys, input_precision=PRECISION)
            terms += mixed.to(tl.float32) * of_scores
            terms += decayed_keys.to(tl.float32) * of_pairs
            of_scores *= factors
            of_pairs *= factors
            query_grads += to_later * of_scores
            key_grads += to_later * of_pairs + (to_later - 1.0) * (of_scores + of_pairs)
    store_tile(dq + of_keys, query_grads + self * keys, start, T, H, K, first_key, C, BK)
    store_tile(dk + of_keys, key_grads + self * queries, start, T, H, K, first_key, C, BK)
    # Σ_V S' ⊙ dS
    channels = tl.arange(0, BK)
    boundary_term = tl.sum(tl.where(channels[:, None] == channels[None, :], boundary_term, 0.0), axis=0)
    boundary_term = boundary_term[None, :] * survives + tl.sum(leaving, axis=0)[None, :]
    later_ones, goes_on, stays = later_tokens(doc_ids, start, T, C, DOCUMENTS)
    decay_grads = sum_tokens(later_ones, terms, 2 if tl.bfloat16 == DTYPE else 0)
    decay_grads += tl.where(goes_on[:, None], boundary_term, 0.0)
    store_tile(dg + of_keys, tl.where(stays[:, None], decay_grads, 0.0), start, T, H, K, first_key, C, BK)


@jit
def channel_grads_kernel(
    q,  # [B, T, G, K]
    k,  # [B, T, G, K]
    sums,  # [B, T, H, K] fp32, of `operands_kernel`
    beta,  # [B, T, H] fp32
    do,  # [B, T, H, V]
    doc_ids,  # [T] int32, read with DOCUMENTS
    states,  # [N, B, H, V, K]: S before the chunks, transposed
    grads,  # [N, B, H, V, K]: dS after the chunks, transposed
    added,  # [B, T, H, V]: N
    dv,  # [B, T, H, V]
    dq,  # [B, T, H, K], written
    dk,  # [B, T, H, K], written
    dg,  # [B, T, H, K] fp32, written
    dbeta,  # [B, T, H] fp32, written
    scale,
    T,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BH,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
    MILD: tl.constexpr,
    CHUNKS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program serves BK channels of the keys of some chunks of one head.

    MILD: a program for each chunk, for the mild ones only; else only for the others, a program for CHUNKS, see
    `zeco_train.ops.gla.kernels.intra`.
    """
    key_tiles: tl.constexpr = (K + BK - 1) // BK
    first_chunk = tl.program_id(0) // key_tiles * CHUNKS
    tile = tl.program_id(0) % key_tiles
    batch_head = tl.program_id(1)
    own_sums = sums + head_offset(batch_head, T, H, K)
    if are_mild(own_sums, first_chunk, T, H, K, C, CHUNKS, KEYS) == MILD:
        chunks = 1 if MILD else tl.minimum(CHUNKS, tl.cdiv(T, C) - first_chunk)
        for step in range(chunks):
            chunk = first_chunk + step
            if MILD or not are_mild(own_sums, chunk, T, H, K, C, 1, KEYS):
                _chunk_grads(
                    chunk, tile, batch_head, q, k, sums, beta, do, doc_ids, states, grads, added, dv, dq, dk, dg, dbeta,
                    scale, T, H, G, K, V, BH, C, BK, BV, DOCUMENTS, PRECISION, MILD,
                )  # fmt: skip
