"""All chunks at once, from the states at their boundaries: o, and dq, dk and dv.

The same sums as of a walk (`zeco_train.ops.scalar_decay.kernels.walk`), for the letters of its table:

    y_i = scale · Σ_j L_ij (x_i · w_j) z_j         tokens of the same chunk as they are, all others by the state Σ w zᵀ

`chunks_kernel` computes BW columns of o or dv of a chunk; `grads_kernel` dq, dk and, of K <= BK, dv, which share what
they read and both matrices of pairs; `key_tiles_kernel` all three for any K, of few values and fixed decays. Where
heads share keys, one program computes the products of queries and keys once for several heads, and adds up dq and dk in
their order. `states_kernel` of the walks writes the states.

Or, where many heads share wide keys, what pairs of a chunk add to dq and dk is a product of sums over heads:

    dq_i = Σ_heads exp(b_i) S do_i + Σ_j A_ij k_j,      dk_j = Σ_heads exp(b_end − b_j) dS v_j + Σ_i A_ij q_i
    A_ij = Σ_heads scale · L_ij do_i · v_j

`pairs_kernel` writes A, and what pairs add to dv and dg; `state_grads_kernel` does the rest, for S and dq, then for dS,
dk and dv.
"""

from __future__ import annotations

import triton.language as tl

from zeco_train.kernels import jit
from zeco_train.ops.gla.kernels.tiles import decay, head_offset, load_doc_ids, load_tile, state_pointers, store_tile
from zeco_train.ops.scalar_decay.kernels.decays import key_head_offset, load_rate, load_sums


@jit
def _load_state(states, index, K, V, first_key, first_value, BK: tl.constexpr, BV: tl.constexpr):
    pointers, inside = state_pointers(states, index, K, V, first_key, first_value, BK, BV)
    return tl.load(pointers, mask=inside, other=0.0)


@jit
def _load_decays(
    decays, documents, batch_head, start, T, H,
    C: tl.constexpr, REVERSE: tl.constexpr, FIXED: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Of a head and a chunk: decays between tokens, [C, C], since the state before it, and until the one after it."""
    rate = load_rate(decays, batch_head, H, FIXED)
    sums, last = load_sums(decays, rate, batch_head, start, T, C, FIXED)
    rows = tl.arange(0, C)
    visible = rows[:, None] <= rows[None, :] if REVERSE else rows[:, None] >= rows[None, :]
    exponents = sums[None, :] - sums[:, None] if REVERSE else sums[:, None] - sums[None, :]
    from_state, from_grad = decay(sums), decay(last - sums)
    if DOCUMENTS:
        own, before, end = documents[0], documents[1], documents[2]
        visible = visible & (own[:, None] == own[None, :])
        from_state = tl.where(own == before, from_state, 0.0)
        from_grad = tl.where(own == end, from_grad, 0.0)
    return decay(tl.where(visible, exponents, float("-inf"))), from_state, from_grad


@jit
def chunks_kernel(
    queries,  # [B, T, G, D]: q, or k in reverse
    keys,  # [B, T, G, D]: k, or q in reverse
    values,  # [B, T, H, W]: v, or do in reverse
    decays,  # [B, H, T] fp32, sums of g inside chunks; with FIXED [H], the log-decays
    doc_ids,  # [T] int32, read with DOCUMENTS
    states,  # [N + 1, B, H, D, W]: true states at the boundaries of chunks, or in reverse their gradients
    outputs,  # [B, T, H, W], written
    scale,
    T,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    BH,
    C: tl.constexpr,
    BD: tl.constexpr,
    BW: tl.constexpr,
    HEADS: tl.constexpr,
    REVERSE: tl.constexpr,
    FIXED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes BW columns of one chunk for HEADS heads of one group: one, or D <= BD."""
    tiles: tl.constexpr = (W + BW - 1) // BW
    first_column = (tl.program_id(0) % tiles) * BW
    chunk = tl.program_id(0) // tiles
    start = chunk * C
    first_head = tl.program_id(1) * HEADS
    documents = load_doc_ids(doc_ids, start, T, C) if DOCUMENTS else (0, 0, 0)
    of_group = key_head_offset(first_head, T, H, G, D)
    if D <= BD:
        query = load_tile(queries + of_group, start, T, G, D, 0, C, BD)
        key = load_tile(keys + of_group, start, T, G, D, 0, C, BD)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    # Nothing is computed before the loop for all of its rounds, here and below: it would not fit into registers.
    for number in tl.range(HEADS, disable_licm=True):
        batch_head = first_head + number
        of_head = head_offset(batch_head, T, H, W)
        index = (chunk + 1 if REVERSE else chunk).to(tl.int64) * BH + batch_head
        if D <= BD:
            value = load_tile(values + of_head, start, T, H, W, first_column, C, BW)
            state = _load_state(states, index, D, W, 0, first_column, BD, BW)
        else:
            products = tl.zeros([C, C], tl.float32)
            carried = tl.zeros([C, BW], tl.float32)
            for first in range(0, D, BD):
                query = load_tile(queries + of_group, start, T, G, D, first, C, BD)
                key = load_tile(keys + of_group, start, T, G, D, first, C, BD)
                state = _load_state(states, index, D, W, first, first_column, BD, BW)
                products = tl.dot(query, tl.trans(key), products, input_precision=PRECISION)
                carried = tl.dot(query, state, carried, input_precision=PRECISION)
        factors, from_state, from_grad = _load_decays(
            decays, documents, batch_head, start, T, H, C, REVERSE, FIXED, DOCUMENTS
        )
        if D <= BD:
            carried = tl.dot(query, state, input_precision=PRECISION)
        else:
            value = load_tile(values + of_head, start, T, H, W, first_column, C, BW)
        carried *= (from_grad if REVERSE else from_state * scale)[:, None]
        weights = (products * (factors * scale)).to(value.dtype)
        result = tl.dot(weights, value, carried, input_precision=PRECISION)
        store_tile(outputs + of_head, result, start, T, H, W, first_column, C, BW)


@jit
def _split_product(x, y, always, PRECISION: tl.constexpr):
    """Compute x · y, [M, N], by parts of it for eight warps.

    Where a product enters another one and M is 64, Triton has four warps repeat the work of the others, but it does not
    see through a condition. In a pipelined loop the result must be used, not only carried: else Triton 3.6 moves the
    condition behind the loads of the next round, into the same memory.
    """
    total = tl.zeros([x.shape[0], y.shape[1]], tl.float32)
    if always:
        total = tl.dot(x, y, total, input_precision=PRECISION)
    return total


@jit
def grads_kernel(
    queries,  # [B, T, G, K]
    keys,  # [B, T, G, K]
    values,  # [B, T, H, V]
    output_grads,  # [B, T, H, V]
    decays,  # [B, H, T] fp32, sums of g inside chunks; with FIXED [H], the log-decays
    doc_ids,  # [T] int32, read with DOCUMENTS
    states,  # [N + 1, B, H, K, V]: true states at the boundaries of chunks
    state_grads,  # [N + 1, B, H, K, V]: their gradients
    dq,  # [B, T, H / HEADS, K], written, as are all that follow
    dk,  # [B, T, H / HEADS, K]
    dv,  # [B, T, H, V], of K <= BK
    pair_sums,  # [K / BK, B, H, T] fp32, with TERMS: q · dq − k · dk over these columns, of the latter the chunk's part
    state_sums,  # [K / BK, B, H, T] fp32, with TERMS: k · dk from dS, over these columns
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
    HEADS: tl.constexpr,
    TERMS: tl.constexpr,
    FIXED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes BK columns of dq and dk of one chunk, and if those are all dv, for HEADS heads of one group.

    What pairs add to q · dq and to k · dk are row and column sums of one matrix. dq and dk are transposed here: with
    their K rows, a product is no less than eight warps need.
    """
    tiles: tl.constexpr = (K + BK - 1) // BK
    tile = tl.program_id(0) % tiles
    first_key = tile * BK
    chunk = tl.program_id(0) // tiles
    start = chunk * C
    head_set = tl.program_id(1)
    first_head = head_set * HEADS
    documents = load_doc_ids(doc_ids, start, T, C) if DOCUMENTS else (0, 0, 0)
    of_group = key_head_offset(first_head, T, H, G, K)
    dq += head_offset(head_set, T, H // HEADS, K)
    dk += head_offset(head_set, T, H // HEADS, K)
    query = load_tile(queries + of_group, start, T, G, K, first_key, C, BK)
    key = load_tile(keys + of_group, start, T, G, K, first_key, C, BK)
    products = _split_product(query, tl.trans(key), start < T, PRECISION) * scale
    # dq and dk are multiplied by the scale at last, but dS contains it.
    inverse = tl.where(scale == 0.0, 0.0, 1.0 / scale)
    query_grad = tl.zeros([BK, C], tl.float32)
    key_grad = tl.zeros([BK, C], tl.float32)
    for number in tl.range(HEADS, disable_licm=True):
        batch_head = first_head + number
        of_head = head_offset(batch_head, T, H, V)
        index = chunk.to(tl.int64) * BH + batch_head
        factors, from_state, from_grad = _load_decays(
            decays, documents, batch_head, start, T, H, C, False, FIXED, DOCUMENTS
        )
        weights = tl.trans((products * factors).to(query.dtype))
        pairs = tl.zeros([C, C], tl.float32)
        of_pairs = tl.zeros([C], tl.float32)
        of_state = tl.zeros([C], tl.float32)
        for first in tl.range(0, V, BV, disable_licm=True):
            value = load_tile(values + of_head, start, T, H, V, first, C, BV)
            grad = load_tile(output_grads + of_head, start, T, H, V, first, C, BV)
            state = _load_state(states, index, K, V, first_key, first, BK, BV)
            state_grad = _load_state(state_grads, index + BH, K, V, first_key, first, BK, BV)
            if V <= BV:
                pairs = _split_product(grad, tl.trans(value), start < T, PRECISION)
            else:
                pairs = tl.dot(grad, tl.trans(value), pairs, input_precision=PRECISION)
            carried = tl.dot(key, state_grad, input_precision=PRECISION)
            if TERMS:
                of_state += tl.sum(value.to(tl.float32) * carried, axis=1)
            if K <= BK:
                # no sum that Triton could move into the product
                result = tl.dot(weights, grad, input_precision=PRECISION)
                result = tl.fma(carried, tl.broadcast_to(from_grad[:, None], [C, BV]), result)
                store_tile(dv + of_head, result, start, T, H, V, first, C, BV)
            if TERMS:
                carried = tl.dot(query, state, input_precision=PRECISION)
                of_pairs += tl.sum(grad.to(tl.float32) * carried, axis=1)
            weighted = (grad.to(tl.float32) * from_state[:, None]).to(grad.dtype)
            query_grad = tl.dot(state, tl.trans(weighted), query_grad, input_precision=PRECISION)
            weighted = (value.to(tl.float32) * (from_grad * inverse)[:, None]).to(value.dtype)
            key_grad = tl.dot(state_grad, tl.trans(weighted), key_grad, input_precision=PRECISION)
        pairs *= factors
        if TERMS:
            both = pairs * products
            of_pairs = of_pairs * (from_state * scale) + tl.sum(both, axis=1) - tl.sum(both, axis=0)
            rows = tl.arange(0, C)
            place = (tile * BH + batch_head).to(tl.int64) * T + start + rows
            tl.store(pair_sums + place, of_pairs, mask=rows < T - start)
            tl.store(state_sums + place, of_state * from_grad, mask=rows < T - start)
        pairs = pairs.to(query.dtype)
        query_grad = tl.dot(tl.trans(key), tl.trans(pairs), query_grad, input_precision=PRECISION)
        key_grad = tl.dot(tl.trans(query), pairs, key_grad, input_precision=PRECISION)
    store_tile(dq, tl.trans(query_grad * scale), start, T, H // HEADS, K, first_key, C, BK)
    store_tile(dk, tl.trans(key_grad * scale), start, T, H // HEADS, K, first_key, C, BK)


@jit
def pairs_kernel(
    queries,  # [B, T, G, K]
    keys,  # [B, T, G, K]
    values,  # [B, T, H, V]
    output_grads,  # [B, T, H, V]
    decays,  # [B, H, T] fp32, sums of g inside chunks; with FIXED [H], the log-decays
    doc_ids,  # [T] int32, read with DOCUMENTS
    dv,  # [B, T, H, V], written, as are all that follow: of pairs
    pair_grads,  # [N, B · H / HEADS, C, C]: A over these heads, with a row for each j
    sums,  # [B, H, T] fp32, with TERMS: q · dq − k · dk of pairs
    scale, T, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BH,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, HEADS: tl.constexpr, TERMS: tl.constexpr,
    FIXED: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program goes through HEADS heads of one group in one chunk; K <= BK, V <= BV."""
    chunk, head_set = tl.program_id(0), tl.program_id(1)
    start = chunk * C
    documents = load_doc_ids(doc_ids, start, T, C) if DOCUMENTS else (0, 0, 0)
    of_group = key_head_offset(head_set * HEADS, T, H, G, K)
    query = load_tile(queries + of_group, start, T, G, K, 0, C, BK)
    key = load_tile(keys + of_group, start, T, G, K, 0, C, BK)
    products = tl.dot(key, tl.trans(query), input_precision=PRECISION) * scale
    total = tl.zeros([C, C], tl.float32)
    rows = tl.arange(0, C)
    for number in tl.range(HEADS, disable_licm=True):
        batch_head = head_set * HEADS + number
        of_head = head_offset(batch_head, T, H, V)
        value = load_tile(values + of_head, start, T, H, V, 0, C, BV)
        grad = load_tile(output_grads + of_head, start, T, H, V, 0, C, BV)
        factors, _, _ = _load_decays(decays, documents, batch_head, start, T, H, C, True, FIXED, DOCUMENTS)
        weights = products * factors
        result = tl.dot(weights.to(grad.dtype), grad, input_precision=PRECISION)
        store_tile(dv + of_head, result, start, T, H, V, 0, C, BV)
        pairs = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
        total += pairs * factors
        if TERMS:
            pairs *= weights
            place = batch_head.to(tl.int64) * T + start + rows
            tl.store(sums + place, tl.sum(pairs, axis=0) - tl.sum(pairs, axis=1), mask=rows < T - start)
    pair_grads += (chunk.to(tl.int64) * (BH // HEADS) + head_set) * C * C
    tl.store(pair_grads + rows[:, None] * C + rows[None, :], (total * scale).to(pair_grads.dtype.element_ty))


@jit
def state_grads_kernel(
    queries,  # [B, T, G, K]: q, or k in reverse
    keys,  # [B, T, G, K]: k, or q in reverse
    values,  # [B, T, H, V]: do, or v in reverse
    states,  # [N + 1, B, H, K, V]: true states at the boundaries of chunks, or in reverse their gradients
    grads,  # [B, T, H / HEADS, K], written: dq, or dk in reverse
    decays,  # [B, H, T] fp32, sums of g inside chunks; with FIXED [H], the log-decays
    doc_ids,  # [T] int32, read with DOCUMENTS
    dv,  # [B, T, H, V], in reverse: of pairs, and written
    pair_grads,  # [N, B · H / HEADS, C, C], of `pairs_kernel`
    sums,  # [3, B, H, T] fp32, with TERMS written: the second q · dq from S, or in reverse the third k · dk from dS
    scale, T, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BH,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, HEADS: tl.constexpr, REVERSE: tl.constexpr,
    TERMS: tl.constexpr, FIXED: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes dq, or dk and dv, of one chunk for HEADS heads of one group; K <= BK, V <= BV."""
    chunk, head_set = tl.program_id(0), tl.program_id(1)
    start = chunk * C
    documents = load_doc_ids(doc_ids, start, T, C) if DOCUMENTS else (0, 0, 0)
    of_group = key_head_offset(head_set * HEADS, T, H, G, K)
    query = load_tile(queries + of_group, start, T, G, K, 0, C, BK)
    rows = tl.arange(0, C)
    query_grad = tl.zeros([C, BK], tl.float32)
    for number in tl.range(HEADS, disable_licm=True):
        batch_head = head_set * HEADS + number
        of_head = head_offset(batch_head, T, H, V)
        index = (chunk + 1 if REVERSE else chunk).to(tl.int64) * BH + batch_head
        value = load_tile(values + of_head, start, T, H, V, 0, C, BV)
        state = _load_state(states, index, K, V, 0, 0, BK, BV)
        _, from_state, from_grad = _load_decays(decays, documents, batch_head, start, T, H, C, False, FIXED, DOCUMENTS)
        factors = from_grad if REVERSE else from_state * scale
        if TERMS or REVERSE:
            carried = tl.dot(query, state, input_precision=PRECISION) * factors[:, None]
        if TERMS:
            place = ((2 if REVERSE else 1) * BH + batch_head).to(tl.int64) * T + start + rows
            tl.store(sums + place, tl.sum(value.to(tl.float32) * carried, axis=1), mask=rows < T - start)
        if REVERSE:
            carried += load_tile(dv + of_head, start, T, H, V, 0, C, BV).to(tl.float32)
            store_tile(dv + of_head, carried, start, T, H, V, 0, C, BV)
        weighted = (value.to(tl.float32) * factors[:, None]).to(value.dtype)
        query_grad = tl.dot(weighted, tl.trans(state), query_grad, input_precision=PRECISION)
    key = load_tile(keys + of_group, start, T, G, K, 0, C, BK)
    pair_grads += (chunk.to(tl.int64) * (BH // HEADS) + head_set) * C * C
    weights = tl.load(pair_grads + (rows[:, None] * C + rows if REVERSE else rows[:, None] + rows * C))
    query_grad = tl.dot(weights, key, query_grad, input_precision=PRECISION)
    store_tile(grads + head_offset(head_set, T, H // HEADS, K), query_grad, start, T, H // HEADS, K, 0, C, BK)


@jit
def key_tiles_kernel(
    queries,  # [B, T, G, K]
    keys,  # [B, T, G, K]
    values,  # [B, T, H, V]
    output_grads,  # [B, T, H, V]
    decays,  # [B, H, T] fp32, sums of g inside chunks; with FIXED [H], the log-decays
    doc_ids,  # [T] int32, read with DOCUMENTS
    states,  # [N + 1, B, H, K, V]: true states at the boundaries of chunks
    state_grads,  # [N + 1, B, H, K, V]: their gradients
    dq,  # [B, T, H, WIDTH], written, as are all that follow: the first WIDTH columns
    dk,  # [B, T, H, WIDTH]
    dv,  # [B, T, H, V]
    scale,
    T,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    V: tl.constexpr,
    BH,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    FIXED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes dq, dk and dv of one chunk and head, by tiles of K, where V <= BV; no terms of dg."""
    chunk, batch_head = tl.program_id(0), tl.program_id(1)
    start = chunk * C
    documents = load_doc_ids(doc_ids, start, T, C) if DOCUMENTS else (0, 0, 0)
    of_group, of_head = key_head_offset(batch_head, T, H, G, K), head_offset(batch_head, T, H, V)
    dq += head_offset(batch_head, T, H, WIDTH)
    dk += head_offset(batch_head, T, H, WIDTH)
    index = chunk.to(tl.int64) * BH + batch_head
    value = load_tile(values + of_head, start, T, H, V, 0, C, BV)
    grad = load_tile(output_grads + of_head, start, T, H, V, 0, C, BV)
    factors, from_state, from_grad = _load_decays(
        decays, documents, batch_head, start, T, H, C, False, FIXED, DOCUMENTS
    )
    pairs = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
    pairs = (pairs * (factors * scale)).to(value.dtype)
    before = (grad.to(tl.float32) * (from_state * scale)[:, None]).to(grad.dtype)
    after = (value.to(tl.float32) * from_grad[:, None]).to(value.dtype)
    products = tl.zeros([C, C], tl.float32)
    carried = tl.zeros([C, BV], tl.float32)
    for first in range(0, K, BK):
        query = load_tile(queries + of_group, start, T, G, K, first, C, BK)
        key = load_tile(keys + of_group, start, T, G, K, first, C, BK)
        state = _load_state(states, index, K, V, first, 0, BK, BV)
        state_grad = _load_state(state_grads, index + BH, K, V, first, 0, BK, BV)
        products = tl.dot(query, tl.trans(key), products, input_precision=PRECISION)
        carried = tl.dot(key, state_grad, carried, input_precision=PRECISION)
        query_grad = tl.dot(before, tl.trans(state), input_precision=PRECISION)
        query_grad = tl.dot(pairs, key, query_grad, input_precision=PRECISION)
        store_tile(dq, query_grad, start, T, H, WIDTH, first, C, BK)
        key_grad = tl.dot(after, tl.trans(state_grad), input_precision=PRECISION)
        key_grad = tl.dot(tl.trans(pairs), query, key_grad, input_precision=PRECISION)
        store_tile(dk, key_grad, start, T, H, WIDTH, first, C, BK)
    # once more: kept, they would not fit into registers
    factors, from_state, from_grad = _load_decays(
        decays, documents, batch_head, start, T, H, C, False, FIXED, DOCUMENTS
    )
    weights = tl.trans((products * (factors * scale)).to(value.dtype))
    result = tl.dot(weights, grad, carried * from_grad[:, None], input_precision=PRECISION)
    store_tile(dv + of_head, result, start, T, H, V, 0, C, BV)
