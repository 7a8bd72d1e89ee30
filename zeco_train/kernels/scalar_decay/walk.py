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

**dg.** A pair (i, j), j < i, adds p_ij = dA_ij A_ij to dg of all tokens t with j < t <= i. By where they lie:

    dg_t = Σ_{j < t <= i} p_ij  of t's chunk       `_pair_terms`, from one product p: it cancels but for fp32's rounding
         + Σ_{i >= t} q_i · dq_i  from the state   the walk of dq:  i in t's chunk, j before it
         + Σ_{j < t} k_j · dk_j  from the state    the walk of dk:  j in t's chunk, i after it
         + exp(b_end) <S, dS>                      j before t's chunk, i after it: S before it, dS after it

All terms are of pairs that do cross t, so none is a small difference of large numbers. The last needs S and dS of the
same chunk, which no walk has both. With E_n = <S, dS> at the border before chunk n

    exp(b_end) <S, dS> = E_n − Σ_i q_i · dq_i = E_{n+1} − Σ_j k_j · dk_j          (sums over chunk n, from the state)

the walk of dk takes E from border to border. Rounding errors of E add up on the way; so the walk of dq writes S, in the
dtype of the tokens, every SPAN chunks, and there E is computed anew. dg is a sum over K here: programs of different
columns of dq and dk write their parts, which are added afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.kernels.gla.tiles import decay, load_pieces, load_tile, state_pointers, store_tile
from zeco_train.kernels.scalar_decay.decays import key_head_offset, load_rate, load_sums


@triton.jit
def _pair_terms(pairs, from_state, own, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    """[C], for each token t Σ_{j < t <= i} pairs_ij + Σ_{i >= t} from_state_i, not past a restart.

    The sums over pairs past t on both sides cancel: they are the same numbers, by row and by column.
    """
    rows = tl.arange(0, C)
    pairs = tl.where(rows[:, None] > rows[None, :], pairs, 0.0)
    token_terms = tl.sum(pairs, axis=1) - tl.sum(pairs, axis=0) + from_state
    later = rows[:, None] <= rows[None, :]
    if DOCUMENTS:
        later = later & (own[:, None] == own[None, :])
    return tl.sum(tl.where(later, token_terms[None, :], 0.0), axis=1)


@triton.jit
def _sum_earlier(x, C: tl.constexpr):
    """[C], for each token the sum of x over the tokens before it."""
    rows = tl.arange(0, C)
    return tl.sum(tl.where(rows[:, None] > rows[None, :], x[None, :], 0.0), axis=1)


@triton.jit
def _store_border(borders, index, state, D, W, first_column, BD: tl.constexpr, BW: tl.constexpr):
    pointers, inside = state_pointers(borders, index, D, W, 0, first_column, BD, BW)
    tl.store(pointers, state.to(borders.dtype.element_ty), mask=inside)


@triton.jit
def _at_border(borders, index, grad, D, W, first_column, BD: tl.constexpr, BW: tl.constexpr):
    """<S, dS> of these columns."""
    pointers, inside = state_pointers(borders, index, D, W, 0, first_column, BD, BW)
    return tl.sum(tl.load(pointers, mask=inside, other=0.0).to(tl.float32) * grad)


@triton.jit
def walk_kernel(
    queries,  # [B, T, QUERY_HEADS, D]: x
    keys,  # [B, T, QUERY_HEADS, D]: w
    values,  # [B, T, VALUE_HEADS, W]: z
    extra,  # [B, T, VALUE_HEADS, W]: q in the walk of dq, k in that of dk, read with TERMS
    decays,  # [B, H, T] fp32, sums of g inside chunks; with FIXED [H], the log-decays
    pieces,  # [T] int32, read with DOCUMENTS
    starts,  # [J, B, H, K, V] fp32: true states before the segments, in the order of the walk
    outputs,  # [B, T, H, W], written
    borders,  # [N / SPAN, B, H, D, W]: S after every SPAN chunks; with TERMS written, in reverse read
    terms,  # [W / BW, B, H, T] fp32: first two terms of dg; with TERMS written, in reverse read
    dg,  # [W / BW, B, T, H] fp32, written with TERMS in reverse
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
        terms += (tile * BH + batch_head).to(tl.int64) * T
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
    at_border = scale * 0.0

    for step in range(end_chunk - first_chunk):
        chunk = end_chunk - 1 - step if REVERSE else first_chunk + step
        start = chunk * C
        sums, total = load_sums(decays, rate, batch_head, start, T, C, FIXED)
        query = load_tile(queries, start, T, QUERY_HEADS, D, 0, C, BD)
        key = load_tile(keys, start, T, QUERY_HEADS, D, 0, C, BD)
        value = load_tile(values, start, T, VALUE_HEADS, W, first_column, C, BW)
        exponents = sums[None, :] - sums[:, None] if REVERSE else sums[:, None] - sums[None, :]
        visible = before_or_self
        from_state = decay(total - sums) if REVERSE else decay(sums) * scale
        to_state = decay(sums) * scale if REVERSE else decay(total - sums)
        survives = decay(total)
        own = rows
        if DOCUMENTS:
            own, before, end = load_pieces(pieces, start, T, C)
            visible = visible & (own[:, None] == own[None, :])
            from_state = tl.where(own == (end if REVERSE else before), from_state, 0.0)
            to_state = tl.where(own == (before if REVERSE else end), to_state, 0.0)
            survives = tl.where(before == end, survives, 0.0)
        is_border = ((chunk + 1) % SPAN == 0) | (chunk + 1 == num_chunks)
        border_index = (chunk // SPAN) * BH + batch_head
        if TERMS and REVERSE:
            if is_border:
                at_border = _at_border(borders, border_index, state, D, W, first_column, BD, BW)

        weights = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        weights *= decay(tl.where(visible, exponents, float("-inf"))) * scale
        carried = tl.dot(query, state.to(query.dtype), input_precision=PRECISION) * from_state[:, None]
        if TERMS:
            other = load_tile(extra, start, T, VALUE_HEADS, W, first_column, C, BW)
            crossing = tl.sum(other.to(tl.float32) * carried, axis=1)
            offsets = terms + start + rows
            if REVERSE:
                passing = at_border - tl.sum(crossing)
                inside_chunk = rows < T - start
                at_border = tl.load(terms + start)
                if DOCUMENTS:
                    passing = tl.where(before == end, passing, 0.0)
                    starts_here = tl.load(pieces + start) != before
                    at_border = tl.where(starts_here, 0.0, at_border)
                at_border += passing
                grads = tl.load(offsets, mask=inside_chunk, other=0.0) + _sum_earlier(crossing, C) + passing
                of_head = (tile * BH + batch_head // H * H).to(tl.int64) * T + batch_head % H
                tl.store(dg + of_head + (start + rows).to(tl.int64) * H, grads, mask=inside_chunk)
            else:
                pairs = weights * tl.dot(other, tl.trans(value), input_precision=PRECISION)
                tl.store(offsets, _pair_terms(pairs, crossing, own, C, DOCUMENTS), mask=rows < T - start)
        result = tl.dot(weights.to(value.dtype), value, carried, input_precision=PRECISION)
        store_tile(outputs, result, start, T, H, W, first_column, C, BW)
        weighted = (value.to(tl.float32) * to_state[:, None]).to(value.dtype)
        state = tl.dot(tl.trans(key), weighted, state * survives, input_precision=PRECISION)

        if TERMS and not REVERSE:
            if is_border:
                _store_border(borders, border_index, state, D, W, first_column, BD, BW)
