"""All gradients of a chunk, once the true states before it and their gradients after it are known.

With N its new values and dv of the walks, E_ij = exp(b_i − b_j), S before and dS after the chunk:

    dP = scale · do Nᵀ  (j <= i)        dA = −dv Nᵀ  (j < i),  of A = Σ_K k_i ⊙ k_j ⊙ E_ij        dβ = Σ_V dv ⊙ N / β²
    dq  = scale · exp(b) ⊙ do Sᵀ + Σ_j dP_ij k_j ⊙ E_ij
    row = −exp(b) ⊙ dv Sᵀ + Σ_j dA_ij k_j ⊙ E_ij
    col = exp(b_end − b) ⊙ N dSᵀ + Σ_i (dP_ij q_i + dA_ij k_i) ⊙ E_ij
    dk  = row + col
    dg_t = Σ_{i >= t} (q ⊙ dq + k ⊙ row − k ⊙ col) + Σ_V S' ⊙ dS

N_i is β_i times what the token's value differs from the state's, r_i, and dv_i is β_i times the gradient of β_i r_i: so
their product is β² times dβ. S' is the state after the chunk: Σ_V S' ⊙ dS = exp(b_end) Σ_V S ⊙ dS + Σ_i k ⊙ (the part
of col from dS), which is 0 for tokens before a restart. A pair of tokens enters dg's sum twice, with both signs, from
the same rounded factors, as in `zeco_train.ops.gla.kernels.intra`, whose sizes of blocks serve decays by channel here,
too.

One after the other, so that few sums are in registers at once: pairs, dq, dk. Sums over V of two tiles' products are
diagonals of products, too: Triton 3.6 and 3.7 have one buffer too few for a tile that a loop reads both in products and
in registers, so that the next copy overwrites what a product still reads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.kernels import jit
from zeco_train.ops.delta.kernels.systems import border_decays, load_decays, load_strengths
from zeco_train.ops.gla.kernels.tiles import (
    are_mild,
    decay,
    from_middle,
    head_offset,
    laid_out_like,
    load_doc_ids,
    load_tile,
    round_to_bf16,
    split_decays,
    split_pairs,
    state_pointers,
    store_tile,
    sum_tokens,
)
from zeco_train.ops.scalar_decay.kernels.decays import key_head_offset

INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@jit
def _round(x, dtype: tl.constexpr, HERE: tl.constexpr = False):
    """x, fp32, in the dtype of the tokens; HERE: not wherever the compiler would, which keeps all that x is made of."""
    if INTERPRETED:
        rounded = x.to(dtype)
    elif dtype == tl.bfloat16 and HERE:
        rounded = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=False, pack=2
        )
    elif dtype == tl.bfloat16:
        rounded = round_to_bf16(x)
    else:
        rounded = x
    return rounded


@jit
def _load_keys(
    q, k, sums, doc_ids, product, batch_head, start, T, H, G, K, first_key, C: tl.constexpr, BK: tl.constexpr,
    DOCUMENTS: tl.constexpr, ONE_LAYOUT: tl.constexpr,
):  # fmt: skip
    """Queries, keys and sums of decays by channel, laid out like `product`; `border_decays`. q and k: of their head."""
    own, total = load_decays(sums, batch_head, start, T, H, K, first_key, C, BK, True)
    queries = load_tile(q, start, T, G, K, first_key, C, BK)
    keys = load_tile(k, start, T, G, K, first_key, C, BK)
    if ONE_LAYOUT:
        own = laid_out_like(own, product)
        queries = laid_out_like(queries, product)
        keys = laid_out_like(keys, product)
    from_start, to_end, survives = border_decays(own, total, doc_ids, start, T, C, DOCUMENTS)
    return queries, keys, own, from_start, to_end, survives


@jit
def _turn(queries, keys, own, sums, start, T, H, K, first_key, C: tl.constexpr, BK: tl.constexpr):
    """Decays from tokens to the middle one, and from it to them; keys by the first, queries and keys by the second."""
    distances = from_middle(sums, own, start, T, H, K, first_key, C, BK)
    factors = decay(-distances)
    own_factors = decay(distances)
    turned_keys = _round(keys.to(tl.float32) * factors, keys.dtype)
    own_queries = _round(queries.to(tl.float32) * own_factors, keys.dtype)
    own_keys = _round(keys.to(tl.float32) * own_factors, keys.dtype)
    return factors, own_factors, turned_keys, own_queries, own_keys


@jit
def _chunk_grads(
    chunk,
    tile,
    batch_head,
    q,
    k,
    sums,
    beta,
    do,
    doc_ids,
    states,
    grads,
    added,
    dv,
    dq,
    dk,
    dg,
    dbeta,
    scale,
    T,
    B,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BH,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    GATED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
    ONE_LAYOUT: tl.constexpr,
    MILD: tl.constexpr,
):
    """The gradients of BK channels of the keys of one chunk of one head, see `grads_kernel`."""
    first_key = tile * BK
    q += key_head_offset(batch_head, T, H, G, K)
    k += key_head_offset(batch_head, T, H, G, K)
    dq += head_offset(batch_head, T, H, K)
    dk += head_offset(batch_head, T, H, K)
    do += head_offset(batch_head, T, H, V)
    dv += head_offset(batch_head, T, H, V)
    added += head_offset(batch_head, T, H, V)
    start = chunk * C
    rows = tl.arange(0, C)
    index = chunk.to(tl.int64) * BH + batch_head
    is_token = rows < T - start
    by_head = head_offset(batch_head, T, H, 1) + (start + rows).to(tl.int64) * H

    score_grads = tl.zeros([C, C], tl.float32)
    pair_grads = tl.zeros([C, C], tl.float32)
    for first_value in range(0, V, BV):
        new = load_tile(added, start, T, H, V, first_value, C, BV)
        value_grads = load_tile(dv, start, T, H, V, first_value, C, BV)
        output_grads = load_tile(do, start, T, H, V, first_value, C, BV)
        score_grads = tl.dot(output_grads, tl.trans(new), score_grads, input_precision=PRECISION)
        pair_grads = tl.dot(value_grads, tl.trans(new), pair_grads, input_precision=PRECISION)
    is_self = rows[:, None] == rows[None, :]
    if tile == 0:
        strengths = load_strengths(beta + head_offset(batch_head, T, H, 1), start, T, H, C, k.dtype.element_ty)
        strength_grads = tl.sum(tl.where(is_self, pair_grads, 0.0), axis=1) / strengths / strengths
        tl.store(dbeta + by_head, strength_grads, mask=is_token)
    visible = rows[:, None] >= rows[None, :]
    if DOCUMENTS:
        doc_ids_of, _, end = load_doc_ids(doc_ids, start, T, C)
        same = doc_ids_of[:, None] == doc_ids_of[None, :]
        visible = visible & same
    score_grads = tl.where(visible, score_grads * scale, 0.0)
    # each token with itself: its terms of dg cancel
    self = tl.sum(tl.where(is_self, score_grads, 0.0), axis=1)[:, None]
    score_grads = tl.where(is_self, 0.0, score_grads)
    pair_grads = tl.where(visible & (rows[:, None] > rows[None, :]), -pair_grads, 0.0)
    own_sums = sums + head_offset(batch_head, T, H, K)  # read with BY_CHANNEL only
    if not BY_CHANNEL:
        own, total = load_decays(sums, batch_head, start, T, H, K, first_key, C, BK, BY_CHANNEL)
        from_start, to_end, survives = border_decays(own, total, doc_ids, start, T, C, DOCUMENTS)
        queries = load_tile(q, start, T, G, K, first_key, C, BK)
        keys = load_tile(k, start, T, G, K, first_key, C, BK)
        between = decay(tl.where(visible, own - tl.trans(own), float("-inf")))
        score_grads *= between
        pair_grads *= between
    elif not MILD:
        # for both roles of a row at once
        score_grads -= tl.trans(score_grads)
        pair_grads -= tl.trans(pair_grads)
    score_grads = _round(score_grads, k.dtype.element_ty, True)
    pair_grads = _round(pair_grads, k.dtype.element_ty, True)

    query_grads = tl.zeros([C, BK], tl.float32)
    for first_value in range(0, V, BV):
        output_grads = load_tile(do, start, T, H, V, first_value, C, BV)
        pointers, inside = state_pointers(states, index, V, K, first_value, first_key, BV, BK)
        state = tl.load(pointers, mask=inside, other=0.0)
        query_grads = tl.dot(output_grads, state, query_grads, input_precision=PRECISION)
    if BY_CHANNEL:
        queries, keys, own, from_start, to_end, survives = _load_keys(
            q, k, sums, doc_ids, query_grads, batch_head, start, T, H, G, K, first_key, C, BK, DOCUMENTS, ONE_LAYOUT
        )
    query_grads *= from_start * scale
    if BY_CHANNEL:
        terms = queries.to(tl.float32) * query_grads
        if MILD:
            _, own_factors, turned_keys, own_queries, _ = _turn(
                queries, keys, own, own_sums, start, T, H, K, first_key, C, BK
            )
            of_scores = tl.dot(score_grads, turned_keys, input_precision=PRECISION)
            terms += own_queries.to(tl.float32) * of_scores
            query_grads += own_factors * of_scores
    else:
        query_grads = tl.dot(score_grads, keys, query_grads, input_precision=PRECISION)
        terms = queries.to(tl.float32) * query_grads
    query_grads += self * keys.to(tl.float32)
    if MILD:
        store_tile(dq, query_grads, start, T, H, K, first_key, C, BK)

    row_grads = tl.zeros([C, BK], tl.float32)
    column_grads = tl.zeros([C, BK], tl.float32)
    boundary_term = tl.zeros([BK, BK], tl.float32)  # on its diagonal
    for first_value in range(0, V, BV):
        new = load_tile(added, start, T, H, V, first_value, C, BV)
        value_grads = load_tile(dv, start, T, H, V, first_value, C, BV)
        pointers, inside = state_pointers(states, index, V, K, first_value, first_key, BV, BK)
        state = tl.load(pointers, mask=inside, other=0.0)
        pointers, inside = state_pointers(grads, index, V, K, first_value, first_key, BV, BK)
        grad = tl.load(pointers, mask=inside, other=0.0)
        if GATED:
            boundary_term = tl.dot(tl.trans(state), grad, boundary_term, input_precision=PRECISION)
        row_grads = tl.dot(value_grads, state, row_grads, input_precision=PRECISION)
        column_grads = tl.dot(new, grad, column_grads, input_precision=PRECISION)
    # again, rather than in registers throughout
    if BY_CHANNEL:
        queries, keys, own, from_start, to_end, survives = _load_keys(
            q, k, sums, doc_ids, row_grads, batch_head, start, T, H, G, K, first_key, C, BK, DOCUMENTS, ONE_LAYOUT
        )
    else:
        queries = load_tile(q, start, T, G, K, first_key, C, BK)
        keys = load_tile(k, start, T, G, K, first_key, C, BK)
    row_grads *= -from_start
    column_grads *= to_end
    leaving = keys.to(tl.float32) * column_grads
    # Σ_V S' ⊙ dS
    channels = tl.arange(0, BK)
    boundary_term = tl.sum(tl.where(channels[:, None] == channels[None, :], boundary_term, 0.0), axis=0)
    boundary_term = boundary_term[None, :] * survives + tl.sum(leaving, axis=0)[None, :]
    if BY_CHANNEL:
        terms += keys.to(tl.float32) * row_grads - leaving
        key_grads = row_grads + column_grads + self * queries.to(tl.float32)
        if MILD:
            factors, own_factors, turned_keys, own_queries, own_keys = _turn(
                queries, keys, own, own_sums, start, T, H, K, first_key, C, BK
            )
            of_pairs = tl.dot(pair_grads, turned_keys, input_precision=PRECISION)
            terms += own_keys.to(tl.float32) * of_pairs
            key_grads += own_factors * of_pairs
            of_keys = tl.dot(tl.trans(score_grads), own_queries, input_precision=PRECISION)
            of_keys = tl.dot(tl.trans(pair_grads), own_keys, of_keys, input_precision=PRECISION)
            terms -= turned_keys.to(tl.float32) * of_keys
            key_grads += factors * of_keys
        else:
            for shift in range(6):
                is_later, factors = split_decays(own_sums, own, shift, start, T, H, K, first_key, C, BK)
                to_later = tl.where(is_later, 1.0, 0.0)[:, None]
                split = split_pairs(shift, C)
                decayed_keys = _round(keys.to(tl.float32) * factors, keys.dtype)
                mixed = _round(tl.where(is_later[:, None], queries, keys).to(tl.float32) * factors, keys.dtype)
                of_scores = tl.dot(tl.where(split, score_grads, 0.0), mixed, input_precision=PRECISION)
                of_pairs = tl.dot(tl.where(split, pair_grads, 0.0), decayed_keys, input_precision=PRECISION)
                terms += mixed.to(tl.float32) * of_scores
                terms += decayed_keys.to(tl.float32) * of_pairs
                of_scores *= factors
                of_pairs *= factors
                query_grads += to_later * of_scores
                key_grads += to_later * of_pairs + (to_later - 1.0) * (of_scores + of_pairs)
            store_tile(dq, query_grads, start, T, H, K, first_key, C, BK)
    else:
        row_grads = tl.dot(pair_grads, keys, row_grads, input_precision=PRECISION)
        column_grads = tl.dot(tl.trans(score_grads), queries, column_grads, input_precision=PRECISION)
        column_grads = tl.dot(tl.trans(pair_grads), keys, column_grads, input_precision=PRECISION)
        terms += keys.to(tl.float32) * (row_grads - column_grads)
        key_grads = row_grads + column_grads + self * queries.to(tl.float32)
    store_tile(dk, key_grads, start, T, H, K, first_key, C, BK)
    if GATED:
        later_tokens = rows[:, None] <= rows[None, :]
        if DOCUMENTS:
            # not past a restart: terms of the next document add up to 0 only within its rounding
            later_tokens = later_tokens & same
            boundary_term = tl.where((doc_ids_of == end)[:, None], boundary_term, 0.0)
            previous = tl.load(doc_ids + start + rows - 1, mask=is_token & (start + rows > 0), other=0)
            stays = doc_ids_of == previous
        else:
            stays = is_token
        if BY_CHANNEL:
            decay_grads = boundary_term + sum_tokens(later_tokens, terms, 2 if k.dtype.element_ty == tl.bfloat16 else 0)
            dg += head_offset(batch_head, T, H, K)
            store_tile(dg, tl.where(stays[:, None], decay_grads, 0.0), start, T, H, K, first_key, C, BK)
        else:
            decay_grads = tl.sum(tl.where(later_tokens, tl.sum(terms, axis=1)[None, :], 0.0), axis=1)
            decay_grads += tl.sum(boundary_term, axis=1)
            dg += tile.to(tl.int64) * B * T * H
            tl.store(dg + by_head, tl.where(stays, decay_grads, 0.0), mask=is_token)


@jit
def grads_kernel(
    q,  # [B, T, G, K]
    k,  # [B, T, G, K]
    sums,  # see `load_decays`
    beta,  # [B, T, H] fp32
    do,  # [B, T, H, V]
    doc_ids,  # [T] int32, read with DOCUMENTS
    states,  # [N, B, H, V, K]: S before the chunks, transposed
    grads,  # [N, B, H, V, K]: dS after the chunks, transposed
    added,  # [B, T, H, V]: N
    dv,  # [B, T, H, V]
    dq,  # [B, T, H, K], written
    dk,  # [B, T, H, K], written
    dg,  # [B, T, H, K] fp32, or [K / BK, B, T, H] fp32, sums over these channels; written with GATED
    dbeta,  # [B, T, H] fp32, written
    scale,
    T,
    B,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BH,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    GATED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
    ONE_LAYOUT: tl.constexpr,
    MILD: tl.constexpr,
    CHUNKS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program serves BK channels of the keys of some chunks of one head.

    MILD: a program for each chunk, with decays by channel for the mild ones only; else only for the others, a program
    for CHUNKS, see `zeco_train.ops.gla.kernels.intra`.
    """
    key_tiles: tl.constexpr = (K + BK - 1) // BK
    first_chunk = tl.program_id(0) // key_tiles * CHUNKS
    tile = tl.program_id(0) % key_tiles
    batch_head = tl.program_id(1)
    own_sums = sums + head_offset(batch_head, T, H, K)  # read with BY_CHANNEL only
    if MILD:
        chunk = first_chunk
        if not BY_CHANNEL or are_mild(own_sums, chunk, T, H, K, C, 1, KEYS):
            _chunk_grads(
                chunk, tile, batch_head, q, k, sums, beta, do, doc_ids, states, grads, added, dv,
                dq, dk, dg, dbeta, scale, T, B, H, G, K, V, BH,
                C, BK, BV, BY_CHANNEL, GATED, DOCUMENTS, PRECISION, ONE_LAYOUT, MILD,
            )  # fmt: skip
    elif not are_mild(own_sums, first_chunk, T, H, K, C, CHUNKS, KEYS):
        for step in range(tl.minimum(CHUNKS, tl.cdiv(T, C) - first_chunk)):
            chunk = first_chunk + step
            if not are_mild(own_sums, chunk, T, H, K, C, 1, KEYS):
                _chunk_grads(
                    chunk, tile, batch_head, q, k, sums, beta, do, doc_ids, states, grads, added, dv,
                    dq, dk, dg, dbeta, scale, T, B, H, G, K, V, BH,
                    C, BK, BV, BY_CHANNEL, GATED, DOCUMENTS, PRECISION, ONE_LAYOUT, MILD,
                )  # fmt: skip
