"""All gradients of a chunk, once the true states before it and their gradients after it are known.

With N its new values and dN their gradients, T = (I + L)⁻¹, E_ij = exp(b_i − b_j), S before and dS after the chunk:

    Y   = Tᵀ dN        dv = β Y        dP = scale · do Nᵀ  (j <= i)        dL = −Y Nᵀ  (j < i)
    dq  = scale · exp(b) ⊙ do Sᵀ + Σ_j dP_ij k_j ⊙ E_ij
    row = −β exp(b) ⊙ Y Sᵀ + β ρ,    ρ_i = Σ_j dL_ij k_j ⊙ E_ij
    col = exp(b_end − b) ⊙ N dSᵀ + Σ_i (dP_ij q_i + dL_ij β_i k_i) ⊙ E_ij
    dk  = row + col
    dβ  = Σ_V Y ⊙ v − Σ_K k ⊙ exp(b) ⊙ Y Sᵀ + Σ_K k ⊙ ρ
    dg_t = Σ_{i >= t} (q ⊙ dq + k ⊙ row − k ⊙ col) + Σ_V S' ⊙ dS

S' is the state after the chunk: Σ_V S' ⊙ dS = exp(b_end) Σ_V S ⊙ dS + Σ_i k ⊙ (the part of col from dS), which is 0 for
tokens before a restart. A pair of tokens enters dg's sum twice, with both signs, from the same rounded factors, as in
`zeco_train.ops.gla.kernels.intra`, whose sizes of blocks serve decays by channel here, too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.ops.delta.kernels.systems import border_decays, load_decays
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


@triton.jit
def _round(x, tokens):
    """x, fp32, in the dtype of the tokens."""
    if INTERPRETED:
        rounded = x.to(tokens.dtype)
    elif tokens.dtype == tl.bfloat16:
        rounded = round_to_bf16(x)
    else:
        rounded = x
    return rounded


@triton.jit
def _chunk_grads(
    chunk,
    tile,
    batch_head,
    q,
    k,
    v,
    sums,
    beta,
    do,
    doc_ids,
    inverses,
    states,
    grads,
    added,
    of_added,
    dq,
    dk,
    dv,
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
    leads = tile == 0  # of the programs of this chunk, this one writes the results without K
    q += key_head_offset(batch_head, T, H, G, K)
    k += key_head_offset(batch_head, T, H, G, K)
    dq += head_offset(batch_head, T, H, K)
    dk += head_offset(batch_head, T, H, K)
    v += head_offset(batch_head, T, H, V)
    do += head_offset(batch_head, T, H, V)
    dv += head_offset(batch_head, T, H, V)
    added += head_offset(batch_head, T, H, V)
    of_added += head_offset(batch_head, T, H, V)
    beta += head_offset(batch_head, T, H, 1)
    dbeta += tile.to(tl.int64) * B * T * H + head_offset(batch_head, T, H, 1)
    start = chunk * C
    rows = tl.arange(0, C)
    index = chunk.to(tl.int64) * BH + batch_head
    transposed = tl.trans(tl.load(inverses + index * C * C + rows[:, None] * C + rows[None, :]))
    is_token = rows < T - start
    by_head = (start + rows).to(tl.int64) * H
    strengths = tl.load(beta + by_head, mask=is_token, other=0.0)[:, None]

    score_grads = tl.zeros([C, C], tl.float32)
    system_grads = tl.zeros([C, C], tl.float32)
    query_grads = tl.zeros([C, BK], tl.float32)
    row_grads = tl.zeros([C, BK], tl.float32)
    column_grads = tl.zeros([C, BK], tl.float32)
    boundary_term = tl.zeros([BK], tl.float32)
    strength_grads = tl.zeros([C], tl.float32)
    for first_value in range(0, V, BV):
        new = load_tile(added, start, T, H, V, first_value, C, BV)
        output_grads = load_tile(do, start, T, H, V, first_value, C, BV)
        new_grads = load_tile(of_added, start, T, H, V, first_value, C, BV)
        solved = tl.dot(transposed, new_grads, input_precision=PRECISION)
        values = load_tile(v, start, T, H, V, first_value, C, BV).to(tl.float32)
        strength_grads += tl.sum(solved * values, axis=1)
        if leads:
            store_tile(dv, solved * strengths, start, T, H, V, first_value, C, BV)
        solved = solved.to(new.dtype)
        pointers, inside = state_pointers(states, index, K, V, first_key, first_value, BK, BV)
        state = tl.load(pointers, mask=inside, other=0.0)
        pointers, _ = state_pointers(grads, index, K, V, first_key, first_value, BK, BV)
        grad = tl.load(pointers, mask=inside, other=0.0)
        boundary_term += tl.sum(state.to(tl.float32) * grad.to(tl.float32), axis=1)
        score_grads += tl.dot(output_grads, tl.trans(new), input_precision=PRECISION)
        system_grads -= tl.dot(solved, tl.trans(new), input_precision=PRECISION)
        query_grads += tl.dot(output_grads, tl.trans(state), input_precision=PRECISION)
        row_grads += tl.dot(solved, tl.trans(state), input_precision=PRECISION)
        column_grads += tl.dot(new, tl.trans(grad), input_precision=PRECISION)

    own, total = load_decays(sums, batch_head, start, T, H, K, first_key, C, BK, BY_CHANNEL)
    from_start, to_end, survives = border_decays(own, total, doc_ids, start, T, C, DOCUMENTS)
    queries = load_tile(q, start, T, G, K, first_key, C, BK)
    keys = load_tile(k, start, T, G, K, first_key, C, BK)
    query_grads *= from_start * scale
    row_grads *= from_start
    strength_grads = tl.where(leads, strength_grads, 0.0) - tl.sum(keys.to(tl.float32) * row_grads, axis=1)
    row_grads *= -strengths
    column_grads *= to_end
    leaving = keys.to(tl.float32) * column_grads
    boundary_term = (
        boundary_term[None, :] * survives + tl.sum(leaving, axis=0)[None, :]
    )  # Σ_V S ⊙ dS at the chunk's end

    visible = rows[:, None] >= rows[None, :]
    if DOCUMENTS:
        doc_ids_of, _, end = load_doc_ids(doc_ids, start, T, C)
        same = doc_ids_of[:, None] == doc_ids_of[None, :]
        visible = visible & same
    score_grads = tl.where(visible, score_grads * scale, 0.0)
    system_grads = tl.where(visible & (rows[:, None] > rows[None, :]), system_grads, 0.0)

    if BY_CHANNEL:
        own_sums = sums + head_offset(batch_head, T, H, K)
        if ONE_LAYOUT:
            own = laid_out_like(own, query_grads)
            queries = laid_out_like(queries, query_grads)
            keys = laid_out_like(keys, query_grads)
        terms = queries.to(tl.float32) * query_grads + keys.to(tl.float32) * row_grads - leaving
        # each token with itself: its terms cancel
        self = tl.sum(tl.where(rows[:, None] == rows[None, :], score_grads, 0.0), axis=1)[:, None]
        query_grads += self * keys.to(tl.float32)
        column_grads += self * queries.to(tl.float32)
        key_grads = row_grads + column_grads
        if MILD:
            distances = from_middle(own_sums, own, start, T, H, K, first_key, C, BK)
            score_grads = _round(tl.where(rows[:, None] == rows[None, :], 0.0, score_grads), keys)
            system_grads = _round(system_grads, keys)
            factors = decay(-distances)
            turned_keys = _round(keys.to(tl.float32) * factors, keys)
            of_scores = tl.dot(score_grads, turned_keys, input_precision=PRECISION)
            of_systems = tl.dot(system_grads, turned_keys, input_precision=PRECISION)
            own_factors = decay(distances)
            own_queries = _round(queries.to(tl.float32) * own_factors, keys)
            scaled = _round(keys.to(tl.float32) * strengths * own_factors, keys)
            if GATED:
                terms += own_queries.to(tl.float32) * of_scores
                terms += scaled.to(tl.float32) * of_systems
            query_grads += own_factors * of_scores
            store_tile(dq, query_grads, start, T, H, K, first_key, C, BK)
            of_systems *= own_factors  # ρ
            strength_grads += tl.sum(keys.to(tl.float32) * of_systems, axis=1)
            key_grads += strengths * of_systems
            of_keys = tl.dot(tl.trans(score_grads), own_queries, input_precision=PRECISION)
            of_keys = tl.dot(tl.trans(system_grads), scaled, of_keys, input_precision=PRECISION)
            if GATED:
                terms -= turned_keys.to(tl.float32) * of_keys
            key_grads += factors * of_keys
        else:
            strengthless = tl.zeros([C, BK], tl.float32)  # ρ
            # for both roles of a row at once
            score_grads = tl.where(rows[:, None] == rows[None, :], 0.0, score_grads - tl.trans(score_grads))
            score_grads = _round(score_grads, keys)
            system_grads = _round(system_grads - tl.trans(system_grads), keys)
            for shift in range(6):
                is_later, factors = split_decays(own_sums, own, shift, start, T, H, K, first_key, C, BK)
                to_later = tl.where(is_later, 1.0, 0.0)[:, None]
                split = split_pairs(shift, C)
                mixed = _round(tl.where(is_later[:, None], queries, keys).to(tl.float32) * factors, keys)
                weights = factors * tl.where(is_later[:, None], strengths, 1.0)
                scaled = _round(keys.to(tl.float32) * weights, keys)
                of_scores = tl.dot(tl.where(split, score_grads, 0.0), mixed, input_precision=PRECISION)
                of_systems = tl.dot(tl.where(split, system_grads, 0.0), scaled, input_precision=PRECISION)
                if GATED:
                    terms += mixed.to(tl.float32) * of_scores
                    terms += scaled.to(tl.float32) * of_systems
                of_scores *= factors
                of_systems *= factors
                query_grads += to_later * of_scores
                strengthless += to_later * of_systems
                key_grads += (to_later - 1.0) * (of_scores + of_systems)
            strength_grads += tl.sum(keys.to(tl.float32) * strengthless, axis=1)
            key_grads += strengths * strengthless
    else:
        between = decay(tl.where(visible, own - tl.trans(own), float("-inf")))
        products = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        system_grads *= between
        strength_grads += tl.sum(system_grads * products, axis=1)
        # each token with itself: its terms cancel
        is_self = rows[:, None] == rows[None, :]
        self = tl.sum(tl.where(is_self, score_grads, 0.0), axis=1)[:, None]
        of_scores = tl.where(is_self, 0.0, score_grads * between).to(keys.dtype)
        of_systems = (system_grads * strengths).to(keys.dtype)
        query_grads = tl.dot(of_scores, keys, query_grads, input_precision=PRECISION)
        row_grads = tl.dot(of_systems, keys, row_grads, input_precision=PRECISION)
        column_grads = tl.dot(tl.trans(of_scores), queries, column_grads, input_precision=PRECISION)
        column_grads = tl.dot(tl.trans(of_systems), keys, column_grads, input_precision=PRECISION)
        terms = queries.to(tl.float32) * query_grads + keys.to(tl.float32) * (row_grads - column_grads)
        query_grads += self * keys.to(tl.float32)
        key_grads = row_grads + column_grads + self * queries.to(tl.float32)

    if not (BY_CHANNEL and MILD):
        store_tile(dq, query_grads, start, T, H, K, first_key, C, BK)
    store_tile(dk, key_grads, start, T, H, K, first_key, C, BK)
    tl.store(dbeta + by_head, strength_grads, mask=is_token)
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
            dg += tile.to(tl.int64) * B * T * H + head_offset(batch_head, T, H, 1)
            tl.store(dg + by_head, tl.where(stays, decay_grads, 0.0), mask=is_token)


@triton.jit
def grads_kernel(
    q,  # [B, T, G, K]
    k,  # [B, T, G, K]
    v,  # [B, T, H, V]
    sums,  # see `load_decays`
    beta,  # [B, T, H] fp32
    do,  # [B, T, H, V]
    doc_ids,  # [T] int32, read with DOCUMENTS
    inverses,  # [N, B, H, C, C]: T
    states,  # [N, B, H, K, V]: S before the chunks
    grads,  # [N, B, H, K, V]: dS after the chunks
    added,  # [B, T, H, V]: N
    of_added,  # [B, T, H, V]: dN
    dq,  # [B, T, H, K], written
    dk,  # [B, T, H, K], written
    dv,  # [B, T, H, V], written
    dg,  # [B, T, H, K] fp32, or [K / BK, B, T, H] fp32, sums over these channels; written with GATED
    dbeta,  # [K / BK, B, T, H] fp32, written: sums over these channels
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
                chunk, tile, batch_head, q, k, v, sums, beta, do, doc_ids, inverses, states,
                grads, added, of_added, dq, dk, dv, dg, dbeta, scale, T, B, H, G, K, V, BH,
                C, BK, BV, BY_CHANNEL, GATED, DOCUMENTS, PRECISION, ONE_LAYOUT, MILD,
            )  # fmt: skip
    elif not are_mild(own_sums, first_chunk, T, H, K, C, CHUNKS, KEYS):
        for step in range(tl.minimum(CHUNKS, tl.cdiv(T, C) - first_chunk)):
            chunk = first_chunk + step
            if not are_mild(own_sums, chunk, T, H, K, C, 1, KEYS):
                _chunk_grads(
                    chunk, tile, batch_head, q, k, v, sums, beta, do, doc_ids, inverses, states,
                    grads, added, of_added, dq, dk, dv, dg, dbeta, scale, T, B, H, G, K, V, BH,
                    C, BK, BV, BY_CHANNEL, GATED, DOCUMENTS, PRECISION, ONE_LAYOUT, MILD,
                )  # fmt: skip
