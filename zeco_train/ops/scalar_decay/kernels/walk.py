"""Walk over the chunks of a segment with the state in registers: one kernel for o, dq, dk and dv.

All four are the same sum over the tokens j that token i sees, L_ij = exp(b_i − b_j), earlier ones or in reverse later
ones, of a query's and a key's product times a value, in which q, k, v, do play different parts:

    y_i = scale · Σ_j L_ij (x_i · w_j) z_j         tokens of the same chunk as they are, all others by the state Σ w zᵀ

            x   w   z    state         order
    o       q   k   v    S  [K, V]     forward
    dq      do  v   k    Sᵀ [V, K]     forward
    dv      k   q   do   dS  [K, V]    reverse
    dk      v   do  q    dSᵀ [V, K]    reverse

In reverse the state contains `scale` already, as the gradients that cross ranks do.

**dg.** A pair of tokens j < i adds to dg of all tokens t with j < t <= i what it adds to q_i · dq_i, and that is also
what it adds to k_j · dk_j. In a sum over all tokens from t on, of the first less the second, only such pairs remain:

    dg_t = Σ_{i >= t} (q_i · dq_i − k_i · dk_i),    through a later border: the same sum up to it, + <S, dS> there

The kernels of dq and dk write the two sums over K, by columns, of their fp32 results; that of dk also its share that
comes from dS. Pairs that do not cross t cancel but for fp32's rounding; pairs of different chunks are rounded once in S
and once in dS. So that these errors do not add up, <S, dS> is computed anew every SPAN chunks, of an S that the walk of
dq writes in the dtype of the tokens. `decay_grads` adds up the rest.

`states_kernel` walks over the state alone: from zero for a segment's effect on it, of which only the total is written,
or from the true one to write it at all boundaries of chunks, for `zeco_train.ops.scalar_decay.kernels.chunks`:

    S = Σ_j exp(b_end − b_j) k_j v_jᵀ          in reverse, for gradients:   dS = scale · Σ_i exp(b_i) q_i do_iᵀ
"""

from __future__ import annotations

import triton.language as tl

from zeco_train.kernels import jit
from zeco_train.ops.gla.kernels.tiles import decay, head_offset, load_doc_ids, load_tile, state_pointers, store_tile
from zeco_train.ops.scalar_decay.kernels.decays import key_head_offset, load_rate, load_sums


@jit
def _store_if(where, states, index, state, K, V, first_key, first_value, BK: tl.constexpr, BV: tl.constexpr):
    if where:
        pointers, inside = state_pointers(states, index, K, V, first_key, first_value, BK, BV)
        tl.store(pointers, state.to(states.dtype.element_ty), mask=inside)


@jit
def _store_boundary_term(
    where, target, states, index, grad, K, V, first_key, first_value, BK: tl.constexpr, BV: tl.constexpr
):
    """<S, dS> of this tile, with an S stored before."""
    if where:
        pointers, inside = state_pointers(states, index, K, V, first_key, first_value, BK, BV)
        tl.store(target, tl.sum(tl.load(pointers, mask=inside, other=0.0).to(tl.float32) * grad))


@jit
def states_kernel(
    keys,  # [B, T, G, K]: k, or q in reverse
    values,  # [B, T, H, V]: v, or do in reverse
    decays,  # [B, H, T] fp32, sums of g inside chunks; with FIXED [H], the log-decays
    doc_ids,  # [T] int32, read with DOCUMENTS
    totals,  # [J, B, H, K, V] fp32: from a zero start, written; with BOUNDARIES true states before segments, read
    total_decays,  # [J, B, H, K] fp32, written unless BOUNDARIES
    states,  # [N + 1, B, H, K, V], with BOUNDARIES written: at all boundaries; in reverse not at the first
    others,  # [N + 1, B, H, K, V]: S, read with TERMS
    boundary_terms,  # [tiles, N / SPAN, B, H] fp32, written with TERMS: <S, dS> after every SPAN chunks
    scale,
    T,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BH,
    num_chunks,
    segment_chunks,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SPAN: tl.constexpr,
    REVERSE: tl.constexpr,
    BOUNDARIES: tl.constexpr,
    TERMS: tl.constexpr,
    FIXED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program walks one segment with a [BK, BV] tile of the state in registers."""
    value_tiles: tl.constexpr = (V + BV - 1) // BV
    tile = tl.program_id(0)
    first_key = (tile // value_tiles) * BK
    first_value = (tile % value_tiles) * BV
    batch_head = tl.program_id(1)
    segment = tl.program_id(2)
    keys += key_head_offset(batch_head, T, H, G, K)
    values += head_offset(batch_head, T, H, V)
    rate = load_rate(decays, batch_head, H, FIXED)
    first_chunk = segment * segment_chunks
    end_chunk = tl.minimum(first_chunk + segment_chunks, num_chunks)

    segment_index = segment * BH + batch_head
    if BOUNDARIES:
        pointers, inside = state_pointers(totals, segment_index, K, V, first_key, first_value, BK, BV)
        state = tl.load(pointers, mask=inside, other=0.0)
    else:
        state = tl.zeros([BK, BV], tl.float32)
    if TERMS:
        boundary_terms += tile * BH * tl.cdiv(num_chunks, SPAN)
    log_decay = scale * 0.0
    for step in range(end_chunk - first_chunk):
        chunk = end_chunk - 1 - step if REVERSE else first_chunk + step
        start = chunk * C
        boundary = (chunk + 1 if REVERSE else chunk).to(tl.int64) * BH + batch_head
        if TERMS:
            is_border = ((chunk + 1) % SPAN == 0) | (chunk + 1 == num_chunks)
            term = boundary_terms + (chunk // SPAN) * BH + batch_head
            _store_boundary_term(is_border, term, others, boundary, state, K, V, first_key, first_value, BK, BV)
        if BOUNDARIES:
            target, own = state_pointers(states, boundary, K, V, first_key, first_value, BK, BV)
            tl.store(target, state.to(states.dtype.element_ty), mask=own)
        sums, total = load_sums(decays, rate, batch_head, start, T, C, FIXED)
        key = load_tile(keys, start, T, G, K, first_key, C, BK)
        value = load_tile(values, start, T, H, V, first_value, C, BV)
        factors = decay(sums) * scale if REVERSE else decay(total - sums)
        survives = decay(total)
        if DOCUMENTS:
            own, before, end = load_doc_ids(doc_ids, start, T, C)
            factors = tl.where(own == (before if REVERSE else end), factors, 0.0)
            survives = tl.where(before == end, survives, 0.0)
            total = tl.where(before == end, total, float("-inf"))
        weighted = (value.to(tl.float32) * factors[:, None]).to(value.dtype)
        state = tl.dot(tl.trans(key), weighted, state * survives, input_precision=PRECISION)
        log_decay += total

    if BOUNDARIES and not REVERSE:
        boundary = end_chunk.to(tl.int64) * BH + batch_head
        _store_if(end_chunk == num_chunks, states, boundary, state, K, V, first_key, first_value, BK, BV)
    if not BOUNDARIES:
        pointers, inside = state_pointers(totals, segment_index, K, V, first_key, first_value, BK, BV)
        tl.store(pointers, state, mask=inside)
        rows = first_key + tl.arange(0, BK)
        leads = (rows < K) & (first_value == 0)
        pointers = total_decays + segment_index.to(tl.int64) * K + rows
        tl.store(pointers, tl.zeros([BK], tl.float32) + log_decay, mask=leads)


@jit
def walk_kernel(
    queries,  # [B, T, QUERY_HEADS, D]: x
    keys,  # [B, T, QUERY_HEADS, D]: w
    values,  # [B, T, VALUE_HEADS, W]: z
    extra,  # [B, T, VALUE_HEADS, W]: q in the walk of dq, k in that of dk, read with TERMS
    decays,  # [B, H, T] fp32, sums of g inside chunks; with FIXED [H], the log-decays
    doc_ids,  # [T] int32, read with DOCUMENTS
    starts,  # [J, B, H, K, V] fp32: true states before the segments, in the order of the walk
    outputs,  # [B, T, H, W], written
    borders,  # [N / SPAN, B, H, D, W]: S after every SPAN chunks; with TERMS written, in reverse read
    row_sums,  # [W / BW, B, H, T] fp32, written with TERMS: of extra ⊙ outputs, over these columns
    row_state_sums,  # [W / BW, B, H, T] fp32, written with TERMS in reverse: of those outputs' part from the state
    boundary_terms,  # [W / BW, N / SPAN, B, H] fp32, written with TERMS in reverse: <S, dS> after every SPAN chunks
    scale,
    T,
    H: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    BH,
    num_chunks,
    segment_chunks,
    C: tl.constexpr,
    BD: tl.constexpr,
    BW: tl.constexpr,
    SPAN: tl.constexpr,
    TURNED: tl.constexpr,
    REVERSE: tl.constexpr,
    TERMS: tl.constexpr,
    FIXED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program walks one segment with BW columns of the state of one head; D <= BD.

    TURNED: the state here is the transpose of the one in `starts`.
    """
    tile = tl.program_id(0)
    first_column = tile * BW
    batch_head = tl.program_id(1)
    segment = tl.program_id(2)
    queries += key_head_offset(batch_head, T, H, QUERY_HEADS, D)
    keys += key_head_offset(batch_head, T, H, QUERY_HEADS, D)
    values += key_head_offset(batch_head, T, H, VALUE_HEADS, W)
    outputs += key_head_offset(batch_head, T, H, H, W)
    if TERMS:
        extra += key_head_offset(batch_head, T, H, VALUE_HEADS, W)
        row_sums += (tile * BH + batch_head).to(tl.int64) * T
        if REVERSE:
            row_state_sums += (tile * BH + batch_head).to(tl.int64) * T
            boundary_terms += tile * BH * tl.cdiv(num_chunks, SPAN)
    rate = load_rate(decays, batch_head, H, FIXED)
    rows = tl.arange(0, C)
    before_or_self = rows[:, None] <= rows[None, :] if REVERSE else rows[:, None] >= rows[None, :]
    first_chunk = segment * segment_chunks
    end_chunk = tl.minimum(first_chunk + segment_chunks, num_chunks)

    segment_index = segment * BH + batch_head
    if TURNED:
        pointers, inside = state_pointers(starts, segment_index, W, D, first_column, 0, BW, BD)
        state = tl.trans(tl.load(pointers, mask=inside, other=0.0))
    else:
        pointers, inside = state_pointers(starts, segment_index, D, W, 0, first_column, BD, BW)
        state = tl.load(pointers, mask=inside, other=0.0)

    for step in range(end_chunk - first_chunk):
        chunk = end_chunk - 1 - step if REVERSE else first_chunk + step
        start = chunk * C
        sums, total = load_sums(decays, rate, batch_head, start, T, C, FIXED)
        query = load_tile(queries, start, T, QUERY_HEADS, D, 0, C, BD)
        key = load_tile(keys, start, T, QUERY_HEADS, D, 0, C, BD)
        if TERMS:
            # long before its use
            other = load_tile(extra, start, T, VALUE_HEADS, W, first_column, C, BW)
        exponents = sums[None, :] - sums[:, None] if REVERSE else sums[:, None] - sums[None, :]
        visible = before_or_self
        from_state = decay(total - sums) if REVERSE else decay(sums) * scale
        to_state = decay(sums) * scale if REVERSE else decay(total - sums)
        survives = decay(total)
        if DOCUMENTS:
            own, before, end = load_doc_ids(doc_ids, start, T, C)
            visible = visible & (own[:, None] == own[None, :])
            from_state = tl.where(own == (end if REVERSE else before), from_state, 0.0)
            to_state = tl.where(own == (before if REVERSE else end), to_state, 0.0)
            survives = tl.where(before == end, survives, 0.0)
        is_border = ((chunk + 1) % SPAN == 0) | (chunk + 1 == num_chunks)
        border_index = (chunk // SPAN) * BH + batch_head
        if TERMS and REVERSE:
            target = boundary_terms + border_index
            _store_boundary_term(is_border, target, borders, border_index, state, D, W, 0, first_column, BD, BW)

        carried = tl.dot(query, state.to(query.dtype), input_precision=PRECISION) * from_state[:, None]
        weights = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        weights *= decay(tl.where(visible, exponents, float("-inf"))) * scale
        if TERMS and REVERSE:
            of_state = tl.sum(other.to(tl.float32) * carried, axis=1)
            tl.store(row_state_sums + start + rows, of_state, mask=rows < T - start)
        value = load_tile(values, start, T, VALUE_HEADS, W, first_column, C, BW)
        result = tl.dot(weights.to(value.dtype), value, carried, input_precision=PRECISION)
        store_tile(outputs, result, start, T, H, W, first_column, C, BW)
        if TERMS:
            tl.store(row_sums + start + rows, tl.sum(other.to(tl.float32) * result, axis=1), mask=rows < T - start)
        weighted = (value.to(tl.float32) * to_state[:, None]).to(value.dtype)
        state = tl.dot(tl.trans(key), weighted, state * survives, input_precision=PRECISION)

        if TERMS and not REVERSE:
            _store_if(is_border, borders, border_index, state, D, W, 0, first_column, BD, BW)
