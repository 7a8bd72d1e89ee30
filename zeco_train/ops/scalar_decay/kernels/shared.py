"""Gradients of all chunks at once where heads share keys: dq, dk and dv in two kernels, each for many heads.

Sums of a group's heads are taken before a product with q or k wherever they can be, so that with long chunks nothing
but the states' products grows with the number of heads times K:

    dq_i = Σ_heads exp(b_i) S do_i + Σ_j (Σ_heads A_ij) k_j         A_ij = scale · L_ij (do_i · v_j)  of pairs in a chunk
    dk_j = Σ_heads exp(b_end − b_j) dS v_j + Σ_i (Σ_heads A_ij) q_i

`pairs_kernel` sums up A, and writes what pairs add to dv and to dg; `state_grads_kernel` the rest, once for S, dq and
once for dS, dk and dv.
"""

from __future__ import annotations

import triton.language as tl

from zeco_train.kernels import jit
from zeco_train.ops.gla.kernels.tiles import decay, head_offset, load_doc_ids, load_tile, store_tile
from zeco_train.ops.scalar_decay.kernels.chunks import load_decays, load_state
from zeco_train.ops.scalar_decay.kernels.decays import key_head_offset, load_rate, load_sums, load_sums_of


@jit
def _products(queries, keys, start, first, T, G, K, scale, C: tl.constexpr, M: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    """scale · k qᵀ, [C, M], of a chunk's keys and M of its queries, in the dtype of the tokens."""
    products = tl.zeros([C, M], tl.float32)
    for first_key in range(0, K, BK):
        query = load_tile(queries, start + first, T, G, K, first_key, M, BK)
        key = load_tile(keys, start, T, G, K, first_key, C, BK)
        products = tl.dot(key, tl.trans(query), products, input_precision=PRECISION)
    return (products * scale).to(queries.dtype.element_ty)


@jit
def _add_pairs(
    total, result, of_keys, products, value, sums, output_grads, decays, rate, documents, doc_ids, pair_sums, batch_head, start, first, T, H, V,
    C: tl.constexpr, M: tl.constexpr, SUMS: tl.constexpr, BV: tl.constexpr, TERMS: tl.constexpr, FIXED: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):
    rows, columns = tl.arange(0, C), first + tl.arange(0, M)
    grad = load_tile(output_grads, start + first, T, H, V, 0, M, BV)
    later = load_sums_of(decays, rate, batch_head, start, columns, T, C, SUMS, FIXED)
    visible = rows[:, None] <= columns[None, :]
    if DOCUMENTS:
        own = tl.load(doc_ids + start + columns, mask=columns < T - start, other=-1)
        visible = visible & (documents[:, None] == own[None, :])
    factors = decay(tl.where(visible, later[None, :] - sums[:, None], float("-inf")))
    result = tl.dot((products * factors).to(grad.dtype), grad, result, input_precision=PRECISION)
    pairs = tl.dot(value, tl.trans(grad), input_precision=PRECISION) * factors
    total += pairs
    if TERMS:
        both = pairs * products
        tl.store(pair_sums + columns, tl.sum(both, axis=0), mask=columns < T - start)
        of_keys += tl.sum(both, axis=1)
    return total, result, of_keys


@jit
def pairs_kernel(
    queries,  # [B, T, G, K]
    keys,  # [B, T, G, K]
    values,  # [B, T, H, V]
    output_grads,  # [B, T, H, V]
    decays,  # [B, H, T] fp32, sums of g inside runs of SUMS tokens; with FIXED [H], the log-decays
    doc_ids,  # [T] int32, read with DOCUMENTS
    dv,  # [B, T, H, V], written: of pairs in a chunk
    pair_grads,  # [N, B, H / HEADS, C, C], written: Σ A, later tokens along the last dimension
    pair_sums,  # [2, B, H, T] fp32, with TERMS written: of pairs in a chunk q · dq and −k · dk
    scale,
    T,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BH,
    C: tl.constexpr,
    SUMS: tl.constexpr,
    M: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HEADS: tl.constexpr,
    TERMS: tl.constexpr,
    FIXED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program goes through HEADS heads of one group in one chunk; V <= BV."""
    chunk, head_set = tl.program_id(0), tl.program_id(1)
    start = chunk * C
    first_head = head_set * HEADS
    documents = load_doc_ids(doc_ids, start, T, C) if DOCUMENTS else (0, 0, 0)
    of_group = key_head_offset(first_head, T, H, G, K)
    # By parts of the queries: whole matrices would not fit into registers.
    products, totals = (), ()
    for first in tl.static_range(0, C, M):
        product = _products(queries + of_group, keys + of_group, start, first, T, G, K, scale, C, M, BK, PRECISION)
        products = products + (product,)
        totals = totals + (tl.zeros([C, M], tl.float32),)
    rows, columns = tl.arange(0, C), tl.arange(0, M)
    for number in tl.range(HEADS, disable_licm=True):
        batch_head = first_head + number
        of_head = head_offset(batch_head, T, H, V)
        value = load_tile(values + of_head, start, T, H, V, 0, C, BV)
        rate = load_rate(decays, batch_head, H, FIXED)
        sums, _ = load_sums(decays, rate, batch_head, start, T, C, SUMS, FIXED)
        result = tl.zeros([C, BV], tl.float32)
        of_keys = tl.zeros([C], tl.float32)
        place = batch_head.to(tl.int64) * T + start
        sums_of_head = pair_sums + place if TERMS else pair_sums
        added = ()
        for part in tl.static_range(C // M):
            total, result, of_keys = _add_pairs(
                totals[part], result, of_keys, products[part], value, sums, output_grads + of_head, decays, rate, documents[0], doc_ids, sums_of_head, batch_head, start, part * M, T, H, V,
                C, M, SUMS, BV, TERMS, FIXED, DOCUMENTS, PRECISION,
            )
            added = added + (total,)
        totals = added
        if TERMS:
            tl.store(pair_sums + tl.cast(BH, tl.int64) * T + place + rows, -of_keys, mask=rows < T - start)
        store_tile(dv + of_head, result, start, T, H, V, 0, C, BV)
    pair_grads += (chunk.to(tl.int64) * (BH // HEADS) + head_set) * C * C
    offsets = rows[:, None] * C + columns[None, :]
    for part in tl.static_range(C // M):
        tl.store(pair_grads + offsets + part * M, (totals[part] * scale).to(pair_grads.dtype.element_ty))


@jit
def state_grads_kernel(
    queries,  # [B, T, G, K]: q, or k in reverse
    keys,  # [B, T, G, K]: k, or q in reverse
    values,  # [B, T, H, V]: do, or v in reverse
    decays,  # [B, H, T] fp32, sums of g inside runs of SUMS tokens; with FIXED [H], the log-decays
    doc_ids,  # [T] int32, read with DOCUMENTS
    states,  # [N + 1, B, H, K, V]: true states at the boundaries of chunks, or in reverse their gradients
    pair_grads,  # [N, B, PARTS · H / HEADS, C, C], of `pairs_kernel`
    grads,  # [B, T, H / HEADS, K], written: dq, or dk in reverse
    dv,  # [B, T, H, V], in reverse read with what pairs add, and written
    sums,  # [B, H, T] fp32, with TERMS written: q · dq from S, or k · dk from dS
    scale,
    T,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BH,
    C: tl.constexpr,
    SUMS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    REVERSE: tl.constexpr,
    TERMS: tl.constexpr,
    FIXED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes dq, or dk and dv, of one chunk for HEADS heads of one group; K <= BK, V <= BV."""
    chunk, head_set = tl.program_id(0), tl.program_id(1)
    start = chunk * C
    first_head = head_set * HEADS
    documents = load_doc_ids(doc_ids, start, T, C) if DOCUMENTS else (0, 0, 0)
    of_group = key_head_offset(first_head, T, H, G, K)
    query = load_tile(queries + of_group, start, T, G, K, 0, C, BK)
    rows = tl.arange(0, C)
    query_grad = tl.zeros([C, BK], tl.float32)
    for number in tl.range(HEADS, disable_licm=True):
        batch_head = first_head + number
        of_head = head_offset(batch_head, T, H, V)
        index = (chunk + 1 if REVERSE else chunk).to(tl.int64) * BH + batch_head
        value = load_tile(values + of_head, start, T, H, V, 0, C, BV)
        state = load_state(states, index, K, V, 0, 0, BK, BV)
        _, from_state, from_grad = load_decays(
            decays, documents, batch_head, start, T, H, C, SUMS, False, FIXED, DOCUMENTS
        )
        factors = from_grad if REVERSE else from_state * scale
        if TERMS or REVERSE:
            carried = tl.dot(query, state, input_precision=PRECISION) * factors[:, None]
        if TERMS:
            of_state = tl.sum(value.to(tl.float32) * carried, axis=1)
            tl.store(sums + batch_head.to(tl.int64) * T + start + rows, of_state, mask=rows < T - start)
        if REVERSE:
            carried += load_tile(dv + of_head, start, T, H, V, 0, C, BV).to(tl.float32)
            store_tile(dv + of_head, carried, start, T, H, V, 0, C, BV)
        weighted = (value.to(tl.float32) * factors[:, None]).to(value.dtype)
        query_grad = tl.dot(weighted, tl.trans(state), query_grad, input_precision=PRECISION)
    key = load_tile(keys + of_group, start, T, G, K, 0, C, BK)
    pair_grads += (chunk.to(tl.int64) * (BH // HEADS) + head_set) * PARTS * C * C
    offsets = rows[:, None] * C + rows[None, :] if REVERSE else rows[:, None] + rows[None, :] * C
    for part in range(PARTS):
        weights = tl.load(pair_grads + part * C * C + offsets)
        query_grad = tl.dot(weights, key, query_grad, input_precision=PRECISION)
    store_tile(grads + head_offset(head_set, T, H // HEADS, K), query_grad, start, T, H // HEADS, K, 0, C, BK)
