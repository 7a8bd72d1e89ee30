"""All chunks at once, from the states at their boundaries: o, dq, dk and dv.

The same sums as of a walk (`zeco_train.ops.scalar_decay.kernels.walk`), for the letters of its table:

    y_i = scale · Σ_j L_ij (x_i · w_j) z_j         tokens of the same chunk as they are, all others by the state Σ w zᵀ

A program computes some rows of a chunk and BW columns of y; x, w and the state are read BD columns at a time, so that
head dims have no limit. Where heads share z, as they share queries and keys, one program adds up their y in the order
of heads; where they share x and w, `shared_kernel` computes their products once for o and dv. `states_kernel` of the
walks writes the states.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.ops.gla.kernels.tiles import decay, head_offset, load_tile, state_pointers, store_tile
from zeco_train.ops.scalar_decay.kernels.decays import key_head_offset, load_rate, load_sums, load_sums_of


@triton.jit
def _load_state(states, index, D, W, first, first_column, BD: tl.constexpr, BW: tl.constexpr, TURNED: tl.constexpr):
    """[BD, BW] of a state, or with TURNED of its transpose."""
    if TURNED:
        pointers, inside = state_pointers(states, index, W, D, first_column, first, BW, BD)
        return tl.trans(tl.load(pointers, mask=inside, other=0.0))
    pointers, inside = state_pointers(states, index, D, W, first, first_column, BD, BW)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _load_decays(decays, batch_head, start, rows, T, H, C: tl.constexpr, FIXED: tl.constexpr):
    """Of a head: its `load_sums`, and the sums of these rows."""
    rate = load_rate(decays, batch_head, H, FIXED)
    sums, last = load_sums(decays, rate, batch_head, start, T, C, FIXED)
    return sums, last, load_sums_of(decays, rate, batch_head, start, rows, T, C, FIXED)


@triton.jit
def _load_documents(doc_ids, start, rows, T, C: tl.constexpr, REVERSE: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Documents of these rows, of all tokens of their chunk, and of the state that they see."""
    own = rows
    others = tl.arange(0, C)
    border = start
    if DOCUMENTS:
        own = tl.load(doc_ids + start + own, mask=start + own < T, other=-1)
        others = tl.load(doc_ids + start + others, mask=start + others < T, other=-1)
        if REVERSE:
            border = tl.load(doc_ids + tl.minimum(start + C, T) - 1)
        else:
            border = tl.load(doc_ids + start - 1, mask=start > 0, other=0)
    return own, others, border


@triton.jit
def _factors(
    sums, last, own_sums, rows, documents, scale, C: tl.constexpr, REVERSE: tl.constexpr, DOCUMENTS: tl.constexpr
):
    """Of pairs of tokens, [ROWS, C], and of what each row sees of the state."""
    # Adds 0, as log-decays are at most 0: masks of pairs that do not change from head to head would be computed
    # before the loop, and take more registers than there are.
    rows += (last > 1.0).to(tl.int32)
    columns = tl.arange(0, C)
    visible = rows[:, None] <= columns[None, :] if REVERSE else rows[:, None] >= columns[None, :]
    exponents = sums[None, :] - own_sums[:, None] if REVERSE else own_sums[:, None] - sums[None, :]
    from_state = decay(last - own_sums) if REVERSE else decay(own_sums) * scale
    if DOCUMENTS:
        own, others, border = documents[0], documents[1], documents[2]
        own += (last > 1.0).to(tl.int32)
        visible = visible & (own[:, None] == others[None, :])
        from_state = tl.where(own == border, from_state, 0.0)
    return decay(tl.where(visible, exponents, float("-inf"))) * scale, from_state


@triton.jit
def _row_sums(query, other, state, PRECISION: tl.constexpr):
    """The sums of other ⊙ (query · state) along rows; thus other need not lie in registers beside the product."""
    return tl.sum(query.to(tl.float32) * tl.dot(other, tl.trans(state), input_precision=PRECISION), axis=1)


@triton.jit
def chunks_kernel(
    queries,  # [B, T, QUERY_HEADS, D]: x
    keys,  # [B, T, QUERY_HEADS, D]: w
    values,  # [B, T, VALUE_HEADS, W]: z
    extra,  # [B, T, VALUE_HEADS, W]: q for dq, k for dk, read with TERMS
    decays,  # [B, H, T] fp32, sums of g inside chunks; with FIXED [H], the log-decays
    doc_ids,  # [T] int32, read with DOCUMENTS
    states,  # [N + 1, B, H, K, V]: true states at the boundaries of chunks, or in reverse their gradients
    outputs,  # [B, T, H / HEADS, W], written
    row_sums,  # [W / BW, B, H, T] fp32, written with TERMS: of extra ⊙ a head's outputs, over these columns
    row_state_sums,  # [W / BW, B, H, T] fp32, written with TERMS in reverse: of those outputs' part from the state
    scale,
    T,
    H: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    BH,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BD: tl.constexpr,
    BW: tl.constexpr,
    HEADS: tl.constexpr,
    TURNED: tl.constexpr,
    REVERSE: tl.constexpr,
    TERMS: tl.constexpr,
    FIXED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes [ROWS, BW] of one chunk, the sum over HEADS heads of one group.

    TURNED: the state here is the transpose of the one in `states`.
    """
    tiles: tl.constexpr = (W + BW - 1) // BW
    tile = tl.program_id(0) % tiles
    first_column = tile * BW
    block = tl.program_id(0) // tiles
    chunk = block // (C // ROWS)
    start = chunk * C
    offset = (block % (C // ROWS)) * ROWS
    first_row = start + offset
    head_set = tl.program_id(1)
    first_head = head_set * HEADS
    values += key_head_offset(first_head, T, H, VALUE_HEADS, W)
    outputs += head_offset(head_set, T, H // HEADS, W)
    rows = offset + tl.arange(0, ROWS)
    documents = _load_documents(doc_ids, start, rows, T, C, REVERSE, DOCUMENTS)
    if TERMS:
        extra += key_head_offset(first_head, T, H, VALUE_HEADS, W)
        other = load_tile(extra, first_row, T, VALUE_HEADS, W, first_column, ROWS, BW)
    total = tl.zeros([ROWS, BW], tl.float32)
    if HEADS > 1 or TERMS:
        value = load_tile(values, start, T, VALUE_HEADS, W, first_column, C, BW)
    for number in range(HEADS):
        batch_head = first_head + number
        sums, last, own_sums = _load_decays(decays, batch_head, start, rows, T, H, C, FIXED)
        offset_of_head = key_head_offset(batch_head, T, H, QUERY_HEADS, D)
        index = (chunk + 1 if REVERSE else chunk).to(tl.int64) * BH + batch_head
        weights = tl.zeros([ROWS, C], tl.float32)
        carried = tl.zeros([ROWS, BW], tl.float32)
        of_state = tl.zeros([ROWS], tl.float32)
        if D <= BD:
            query = load_tile(queries + offset_of_head, first_row, T, QUERY_HEADS, D, 0, ROWS, BD)
            key = load_tile(keys + offset_of_head, start, T, QUERY_HEADS, D, 0, C, BD)
            state = _load_state(states, index, D, W, 0, first_column, BD, BW, TURNED)
            weights = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        else:
            for first in range(0, D, BD):
                query = load_tile(queries + offset_of_head, first_row, T, QUERY_HEADS, D, first, ROWS, BD)
                key = load_tile(keys + offset_of_head, start, T, QUERY_HEADS, D, first, C, BD)
                state = _load_state(states, index, D, W, first, first_column, BD, BW, TURNED)
                weights = tl.dot(query, tl.trans(key), weights, input_precision=PRECISION)
                carried = tl.dot(query, state, carried, input_precision=PRECISION)
                if TERMS:
                    of_state += _row_sums(query, other, state, PRECISION)
        of_pairs, from_state = _factors(sums, last, own_sums, rows, documents, scale, C, REVERSE, DOCUMENTS)
        weights *= of_pairs
        if TERMS:
            # Anew for each head, by a sum that only seems to depend on it: the compiler would otherwise keep them in
            # registers, of which there are too few.
            pairs = tl.dot(other, tl.trans(value), weights * 0.0, input_precision=PRECISION)
            row_sum = tl.sum(pairs * weights, axis=1)
            if D <= BD:
                of_state = _row_sums(query, other, state, PRECISION)
            of_state *= from_state
            place = (tile * BH + batch_head).to(tl.int64) * T + start + rows
            tl.store(row_sums + place, row_sum + of_state, mask=start + rows < T)
            if REVERSE:
                tl.store(row_state_sums + place, of_state, mask=start + rows < T)
        if D <= BD:
            # Only now: each product is added up before the next, so that few lie in registers at once.
            carried = tl.dot(query, state, input_precision=PRECISION)
        total += carried * from_state[:, None]
        if HEADS == 1 and not TERMS:
            value = load_tile(values, start, T, VALUE_HEADS, W, first_column, C, BW)
        total = tl.dot(weights.to(value.dtype), value, total, input_precision=PRECISION)
    store_tile(outputs, total, first_row, T, H // HEADS, W, first_column, ROWS, BW)


@triton.jit
def shared_kernel(
    queries,  # [B, T, G, D]: x
    keys,  # [B, T, G, D]: w
    values,  # [B, T, H, W]: z
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
    ROWS: tl.constexpr,
    BD: tl.constexpr,
    BW: tl.constexpr,
    HEADS: tl.constexpr,
    REVERSE: tl.constexpr,
    FIXED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes [ROWS, BW] of one chunk for HEADS heads that share x, w and their products; D <= BD."""
    tiles: tl.constexpr = (W + BW - 1) // BW
    first_column = (tl.program_id(0) % tiles) * BW
    block = tl.program_id(0) // tiles
    chunk = block // (C // ROWS)
    start = chunk * C
    offset = (block % (C // ROWS)) * ROWS
    first_head = tl.program_id(1) * HEADS
    rows = offset + tl.arange(0, ROWS)
    documents = _load_documents(doc_ids, start, rows, T, C, REVERSE, DOCUMENTS)
    of_group = key_head_offset(first_head, T, H, G, D)
    query = load_tile(queries + of_group, start + offset, T, G, D, 0, ROWS, BD)
    products = tl.dot(query, tl.trans(load_tile(keys + of_group, start, T, G, D, 0, C, BD)), input_precision=PRECISION)
    for number in range(HEADS):
        batch_head = first_head + number
        sums, last, own_sums = _load_decays(decays, batch_head, start, rows, T, H, C, FIXED)
        value = load_tile(values + head_offset(batch_head, T, H, W), start, T, H, W, first_column, C, BW)
        index = (chunk + 1 if REVERSE else chunk).to(tl.int64) * BH + batch_head
        state = _load_state(states, index, D, W, 0, first_column, BD, BW, False)
        of_pairs, from_state = _factors(sums, last, own_sums, rows, documents, scale, C, REVERSE, DOCUMENTS)
        carried = tl.dot(query, state, input_precision=PRECISION) * from_state[:, None]
        result = tl.dot((products * of_pairs).to(value.dtype), value, carried, input_precision=PRECISION)
        target = outputs + head_offset(batch_head, T, H, W)
        store_tile(target, result, start + offset, T, H, W, first_column, ROWS, BW)
