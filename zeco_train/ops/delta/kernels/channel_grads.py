"""`zeco_train.ops.delta.kernels.grads` with decays by channel.

States, and their gradients, have the factors of their channels' references, see `zeco_train.ops.delta.kernels.systems`.
So in a plain chunk a sum over the chunk's tokens and one over a state are one sum:

    dq = exp(b − r) ⊙ (scale · do Sᵀ + Σ_j dP_ij k⁻_j)

In others pairs of tokens are grouped by sizes of blocks, as in `zeco_train.ops.gla.kernels.intra`.
"""

from __future__ import annotations

import triton.language as tl

from zeco_train.kernels import jit
from zeco_train.ops.delta.kernels.grads import later_tokens, load_transposed, mask_pairs, round_to_tokens
from zeco_train.ops.delta.kernels.systems import load_kind, load_references
from zeco_train.ops.gla.kernels.tiles import (
    decay,
    head_offset,
    laid_out_like,
    load_doc_ids,
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
    BV: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """The gradients of one chunk of one head, see `channel_grads_kernel`."""
    start = chunk * C
    first_key = tile * BK
    of_group = key_head_offset(batch_head, T, H, G, K)
    of_keys = head_offset(batch_head, T, H, K)
    of_head = head_offset(batch_head, T, H, V)
    index = chunk.to(tl.int64) * BH + batch_head
    DTYPE: tl.constexpr = k.dtype.element_ty
    _, reference, end_reference, _ = load_references(sums + of_keys, start, T, H, K, first_key, C, BK)
    own = load_tile(sums + of_keys, start, T, H, K, first_key, C, BK)
    queries = load_tile(q + of_group, start, T, G, K, first_key, C, BK)
    keys = load_tile(k + of_group, start, T, G, K, first_key, C, BK)
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
    channels = tl.arange(0, BK)
    boundary_term = tl.sum(tl.where(channels[:, None] == channels[None, :], boundary_term, 0.0), axis=0)
    score_grads, self, pair_grads = mask_pairs(
        score_grads, pair_grads, beta, dbeta, doc_ids, batch_head, tile, start, scale, T, H, C, DOCUMENTS, DTYPE
    )
    self = self[:, None]
    if not PLAIN:
        # for both roles of a row at once
        score_grads -= tl.trans(score_grads)
        pair_grads -= tl.trans(pair_grads)
    score_grads = round_to_tokens(score_grads, DTYPE, True)
    pair_grads = round_to_tokens(pair_grads, DTYPE, True)

    reference, end_reference = reference[None, :], end_reference[None, :]
    own = laid_out_like(own, query_grads)
    queries = laid_out_like(queries, query_grads).to(tl.float32)
    keys = laid_out_like(keys, query_grads).to(tl.float32)
    with_tokens = decay(end_reference - reference)
    later, earlier = decay(own - reference), decay(end_reference - own)
    query_grads, row_grads = query_grads * scale, -row_grads
    if DOCUMENTS:
        doc_ids_of, before, end = load_doc_ids(doc_ids, start, T, C)
        query_grads = tl.where((doc_ids_of == before)[:, None], query_grads, 0.0)
        row_grads = tl.where((doc_ids_of == before)[:, None], row_grads, 0.0)
        column_grads = tl.where((doc_ids_of == end)[:, None], column_grads, 0.0)
        with_tokens = tl.where(before == end, with_tokens, 0.0)
    if PLAIN:
        turned_keys = round_to_tokens(keys * earlier, DTYPE, True)
        own_keys = round_to_tokens(keys * later, DTYPE, True)
        own_queries = round_to_tokens(queries * later, DTYPE, True)
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
        query_grads *= later
        row_grads *= later
        column_grads *= earlier
        leaving = keys * column_grads
        terms = queries * query_grads + keys * row_grads - leaving
        key_grads = row_grads + column_grads
        for shift in range(6):
            is_later, factors = split_decays(sums + of_keys, own, shift, start, T, H, K, first_key, C, BK)
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
    boundary_term = boundary_term[None, :] * with_tokens + tl.sum(leaving, axis=0)[None, :]
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
    states,  # [N, B, H, V, K]: S before the chunks, transposed, times their borders' factors
    grads,  # [N, B, H, V, K]: dS after the chunks, transposed, likewise
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
    kinds,  # [N, B, H, TILES] int8, of `operands_kernel`
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
    PLAIN: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILES: tl.constexpr,
):
    """One program serves BK channels of the keys of CHUNKS chunks of one head, those that are plain or the others."""
    key_tiles: tl.constexpr = (K + BK - 1) // BK
    tile = tl.program_id(0) % key_tiles
    batch_head = tl.program_id(1)
    for step in range(CHUNKS):
        chunk = tl.program_id(0) // key_tiles * CHUNKS + step
        kind = load_kind(kinds, chunk.to(tl.int64) * BH + batch_head, chunk * C < T, TILES)
        if (kind > 0) == PLAIN and kind >= 0:
            _chunk_grads(
                chunk, tile, batch_head, q, k, sums, beta, do, doc_ids, states, grads, added, dv, dq, dk, dg, dbeta,
                scale, T, H, G, K, V, BH, C, BK, BV, DOCUMENTS, PRECISION, PLAIN,
            )  # fmt: skip
