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

All terms are of pairs that do cross t: without decayed pairs they are 0 too. The last needs S and dS of the
same chunk, which no walk has both. With E_n = <S, dS> at the border before chunk n

    exp(b_end) <S, dS> = E_n − Σ_i q_i · dq_i = E_{n+1} − Σ_j k_j · dk_j          (sums over chunk n, from the state)

the walk of dk takes E from border to border. That is a difference, and its rounding errors add up on the way; so the
walk of dq writes S, in the dtype of the tokens, every SPAN chunks, and there E is computed anew. Besides, nothing
passes over a chunk whose decay is below the rounding of its operands. dg is a sum over K here: programs of different
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
def _finish_decay_grads(crossing, passing, terms, pieces, dg, start, T, H, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Write dg of one chunk, in [T, H], and return E at the border before it.

    crossing: [C], k · dk of the tokens, from the state. passing: of the pairs with the whole chunk between them.
    """
    rows = tl.arange(0, C)
    inside = rows < T - start
    earlier = tl.sum(tl.where(rows[:, None] > rows[None, :], crossing[None, :], 0.0), axis=1)
    grads = tl.load(terms + start + rows, mask=inside, other=0.0) + earlier + passing
    # Every query of the chunk lies after its first token: there the terms are Σ_i q_i · dq_i.
    at_border = tl.load(terms + start) + passing
    if DOCUMENTS:
        # Exactly 0 where the state restarts: terms of one document alone add up to 0, but for rounding.
        previous = tl.load(pieces + start + rows - 1, mask=(start + rows > 0) & inside, other=0)
        own = tl.load(pieces + start + rows, mask=inside, other=0)
        grads = tl.where(own == previous, grads, 0.0)
        before = tl.load(pieces + start - 1, mask=start > 0, other=0)
        at_border = tl.where(tl.load(pieces + start) == before, at_border, 0.0)
    tl.store(dg + (start + rows).to(tl.int64) * H, grads, mask=inside)
    return at_border


@triton.jit
def _store_border(is_border, borders, index, state, D, W, first_column, BD: tl.constexpr, BW: tl.constexpr):
    if is_border:
        pointers, inside = state_pointers(borders, index, D, W, 0, first_column, BD, BW)
        tl.store(pointers, state.to(borders.dtype.element_ty), mask=inside)


@triton.jit
def _renewed(at_border, is_border, borders, index, grad, D, W, first_column, BD: tl.constexpr, BW: tl.constexpr):
    """E, <S, dS> of these columns: at a border with the S stored there, elsewhere as it was handed on."""
    if is_border:
        pointers, inside = state_pointers(borders, index, D, W, 0, first_column, BD, BW)
        at_border = tl.sum(tl.load(pointers, mask=inside, other=0.0).to(tl.float32) * grad)
    return at_border


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
    NEGLIGIBLE: tl.constexpr,
    TURNED: tl.constexpr,
    REVERSE: tl.constexpr,
    TERMS: tl.constexpr,
    FIXED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program walks one segment with BW columns of the state of one head; D <= BD.

    TURNED: the state here is the transpose of the one in `starts`. NEGLIGIBLE: where a chunk's decay is no larger,
    nothing passes over it, as far as dg is concerned.
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
        if REVERSE:
            dg += (tile * BH + batch_head // H * H).to(tl.int64) * T + batch_head % H
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
            at_border = _renewed(at_border, is_border, borders, border_index, state, D, W, first_column, BD, BW)

        weights = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        weights *= decay(tl.where(visible, exponents, float("-inf"))) * scale
        carried = tl.dot(query, state.to(query.dtype), input_precision=PRECISION) * from_state[:, None]
        if TERMS:
            other = load_tile(extra, start, T, VALUE_HEADS, W, first_column, C, BW)
            crossing = tl.sum(other.to(tl.float32) * carried, axis=1)
            if REVERSE:
                passing = tl.where(survives > NEGLIGIBLE, at_border - tl.sum(crossing), 0.0)
                at_border = _finish_decay_grads(crossing, passing, terms, pieces, dg, start, T, H, C, DOCUMENTS)
            else:
                pairs = weights * tl.dot(other, tl.trans(value), input_precision=PRECISION)
                of_tokens = _pair_terms(pairs, crossing, own, C, DOCUMENTS)
                tl.store(terms + start + rows, of_tokens, mask=rows < T - start)
        result = tl.dot(weights.to(value.dtype), value, carried, input_precision=PRECISION)
        store_tile(outputs, result, start, T, H, W, first_column, C, BW)
        weighted = (value.to(tl.float32) * to_state[:, None]).to(value.dtype)
        state = tl.dot(tl.trans(key), weighted, state * survives, input_precision=PRECISION)

        if TERMS and not REVERSE:
            _store_border(is_border, borders, border_index, state, D, W, first_column, BD, BW)
