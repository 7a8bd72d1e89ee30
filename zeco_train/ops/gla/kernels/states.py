"""Operands of the walks over chunks, and the walks, segment by segment, with the join of the segments of a rank.

A rank's chunks are cut into segments that are walked in parallel: the split over ranks again, inside a GPU, which one
sequential loop would leave mostly idle. A walk holds the state, transposed, in registers. For the operands q*, k* and
three factors a channel of a chunk, all of `operands_kernel`, S before a chunk becomes that after it by

    X = enter ⊙ S        o = q* X + A v        S ← leave ⊙ (cross ⊙ X + k*ᵀ v)

and dS after a chunk that before it, with the same numbers in reverse:

    X = leave ⊙ dS       dv = k* X + Aᵀ do     dS ← enter ⊙ (cross ⊙ X + q*ᵀ do)

Each segment is walked from zero, for its own sum, and, once the state that it starts from is known, for outputs and
for the X of its chunks, of which the gradients are made.

And one token of the recurrence, whose time is that of reading and writing the state.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from zeco_train.kernels import cdiv, jit, next_power_of_2
from zeco_train.ops.gla.kernels.tiles import (
    LARGEST_EXPONENT,
    VANISHING,
    decay,
    head_offset,
    load_doc_ids,
    load_tile,
    state_pointers,
    store_tile,
    sum_tokens,
)

# Rows of a chunk's factors, [4, K]: those of the walks, and the log-decay of the whole chunk.
ENTER: tl.constexpr = tl.constexpr(0)
CROSS: tl.constexpr = tl.constexpr(1)
LEAVE: tl.constexpr = tl.constexpr(2)
TOTAL: tl.constexpr = tl.constexpr(3)


@jit
def operands_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    g,  # [B, T, H, K] fp32, log-decays
    doc_ids,  # [T] int32, read with DOCUMENTS
    b,  # [B, T, H, K] fp32, written: sums of g inside chunks
    queries,  # [B, T, H, K], written: q*
    keys,  # [B, T, H, K], written: k*
    factors,  # [N, B, H, 4, K] fp32, written
    kinds,  # [N, B, H] int32, written: 1 if plain, 2 if so and a document starts with it; −1 if steep; else 0
    scale,
    T,
    H,
    K,
    BH,
    C: tl.constexpr,
    BK: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """One program computes the operands of one chunk of one head.

    A chunk is plain if no document starts in it, but with its first token, and no channel decays by more than e^-60
    over either half. Its operands are relative to its middle, m, so that they also give its scores, A = q* k*ᵀ: q* =
    scale · q ⊙ exp(b − m), k* = k ⊙ exp(m − b). Those of others are decayed to the chunk's borders, and 0 if a document
    starts between. One that is not plain is steep if each token decays by e^`VANISHING` or less: what a token sees of
    those before it is then a rounding error of the chunk's sums, and is left out. So its g has no gradient.
    """
    chunk = tl.program_id(0)
    batch_head = tl.program_id(1)
    q += head_offset(batch_head, T, H, K)
    k += head_offset(batch_head, T, H, K)
    g += head_offset(batch_head, T, H, K)
    b += head_offset(batch_head, T, H, K)
    queries += head_offset(batch_head, T, H, K)
    keys += head_offset(batch_head, T, H, K)
    start = chunk * C
    rows = tl.arange(0, C)
    index = chunk.to(tl.int64) * BH + batch_head
    # exp is 0 in fp32 from −104 on, and a reset written as −1e9 would leave the sums after it no digits
    worst = 0.0
    for first_key in range(0, K, BK):
        own = tl.maximum(load_tile(g, start, T, H, K, first_key, C, BK), -104.0)
        first = tl.sum(tl.where((rows < C // 2)[:, None], own, 0.0), axis=0)
        worst = tl.minimum(worst, tl.min(tl.minimum(first, tl.sum(own, axis=0) - first)))
    is_plain = worst >= -LARGEST_EXPONENT
    kind = 1
    if DOCUMENTS:
        ids, before, end = load_doc_ids(doc_ids, start, T, C)
        is_plain = is_plain & (tl.load(doc_ids + start) == end)
        kind = tl.where(before == end, 1, 2)

    for first_key in range(0, K, BK):
        own = tl.maximum(load_tile(g, start, T, H, K, first_key, C, BK), -104.0)
        own_queries = load_tile(q, start, T, H, K, first_key, C, BK).to(tl.float32) * scale
        own_keys = load_tile(k, start, T, H, K, first_key, C, BK).to(tl.float32)
        sums = sum_tokens(rows[:, None] >= rows[None, :], own, 3 if q.dtype.element_ty == tl.bfloat16 else 0)
        store_tile(b, sums, start, T, H, K, first_key, C, BK)
        total = tl.sum(tl.where((rows == C - 1)[:, None], sums, 0.0), axis=0)
        middle = tl.sum(tl.where((rows == C // 2 - 1)[:, None], sums, 0.0), axis=0)
        # without a middle: from the chunk's start, and to its end
        seen = decay(sums - tl.where(is_plain, middle, 0.0)[None, :])
        left = decay(tl.where(is_plain, middle, total)[None, :] - sums)
        enter = tl.where(is_plain, decay(middle), 1.0)
        cross = tl.where(is_plain, 1.0, decay(total))
        leave = tl.where(is_plain, decay(total - middle), 1.0)
        if DOCUMENTS:
            seen = tl.where((ids == tl.where(is_plain, end, before))[:, None], seen, 0.0)
            left = tl.where((ids == end)[:, None], left, 0.0)
            enter = tl.where(is_plain & (before != end), 0.0, enter)
            cross = tl.where(before == end, cross, 0.0)
            total = tl.where(before == end, total, float("-inf"))
        store_tile(queries, own_queries * seen, start, T, H, K, first_key, C, BK)
        store_tile(keys, own_keys * left, start, T, H, K, first_key, C, BK)
        columns = first_key + tl.arange(0, BK)
        inside = columns < K
        of_chunk = factors + index * 4 * K + columns
        tl.store(of_chunk + ENTER * K, enter, mask=inside)
        tl.store(of_chunk + CROSS * K, cross, mask=inside)
        tl.store(of_chunk + LEAVE * K, leave, mask=inside)
        tl.store(of_chunk + TOTAL * K, total, mask=inside)

    if not is_plain:
        slowest = VANISHING
        for first_key in range(0, K, BK):
            own = load_tile(g, start, T, H, K, first_key, C, BK)
            inside = (rows < T - start)[:, None] & (first_key + tl.arange(0, BK) < K)[None, :]
            slowest = tl.maximum(slowest, tl.max(tl.where(inside, own, VANISHING)))
        kind = tl.where(slowest <= VANISHING, -1, 0)
    tl.store(kinds + index, kind)


@jit
def walk_kernel(
    entering,  # [B, T, H, K]: q*, or k* in reverse; read with OUTPUTS
    added,  # [B, T, H, K]: k*, or q* in reverse
    y,  # [B, T, H, V]: v, or do in reverse
    scores,  # [N, B, H, C, C]: A, 0 above the diagonal, read with OUTPUTS
    factors,  # [N, B, H, 4, K] fp32
    totals,  # [J, B, H, K, V] fp32: with SUMS S after each segment from zero, written; else the true S before, read
    total_decays,  # [J, B, H, K] fp32, written with SUMS
    o,  # [B, T, H, V], written with OUTPUTS; in reverse dv
    states,  # [N, B, H, V, K], written with STATES: X, transposed
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BH,
    num_chunks,
    segment_chunks,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    REVERSE: tl.constexpr,
    SUMS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STATES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program walks one segment with a [BV, BK] tile of the state of one head; with OUTPUTS K <= BK."""
    value_tiles: tl.constexpr = (V + BV - 1) // BV
    first_key = (tl.program_id(0) // value_tiles) * BK
    first_value = (tl.program_id(0) % value_tiles) * BV
    batch_head = tl.program_id(1)
    segment = tl.program_id(2)
    added += head_offset(batch_head, T, H, K)
    y += head_offset(batch_head, T, H, V)
    if OUTPUTS:
        entering += head_offset(batch_head, T, H, K)
        o += head_offset(batch_head, T, H, V)
    keys = first_key + tl.arange(0, BK)
    values = first_value + tl.arange(0, BV)
    inside = (values < V)[:, None] & (keys < K)[None, :]
    first_chunk = segment * segment_chunks
    end_chunk = tl.minimum(first_chunk + segment_chunks, num_chunks)
    segment_index = (segment * BH + batch_head).to(tl.int64)
    own_total = totals + segment_index * K * V + (keys * V)[None, :] + values[:, None]
    log_decay = tl.zeros([BK], tl.float32)
    state = tl.zeros([BV, BK], tl.float32)
    if not SUMS:
        state += tl.load(own_total, mask=inside, other=0.0)

    for step in range(end_chunk - first_chunk):
        chunk = end_chunk - 1 - step if REVERSE else first_chunk + step
        index = chunk.to(tl.int64) * BH + batch_head
        start = chunk * C
        of_chunk = factors + index * 4 * K + keys
        enter = tl.load(of_chunk + (LEAVE if REVERSE else ENTER) * K, mask=keys < K, other=0.0)
        cross = tl.load(of_chunk + CROSS * K, mask=keys < K, other=0.0)
        leave = tl.load(of_chunk + (ENTER if REVERSE else LEAVE) * K, mask=keys < K, other=0.0)
        operand = load_tile(added, start, T, H, K, first_key, C, BK)
        vectors = tl.trans(load_tile(y, start, T, H, V, first_value, C, BV))
        state *= enter[None, :]
        before = state.to(operand.dtype)
        if OUTPUTS:
            rows = tl.arange(0, C)
            pairs = tl.load(scores + index * C * C + rows[:, None] * C + rows[None, :])
            seen = load_tile(entering, start, T, H, K, first_key, C, BK)
            result = tl.dot(before, tl.trans(seen), input_precision=PRECISION)
            result = tl.dot(vectors, pairs if REVERSE else tl.trans(pairs), result, input_precision=PRECISION)
            store_tile(o, tl.trans(result), start, T, H, V, first_value, C, BV)
        if STATES:
            tl.store(states + index * K * V + (values * K)[:, None] + keys[None, :], before, mask=inside)
        state = tl.dot(vectors, operand, state * cross[None, :], input_precision=PRECISION) * leave[None, :]
        if SUMS:
            log_decay += tl.load(of_chunk + TOTAL * K, mask=keys < K, other=0.0)

    if SUMS:
        tl.store(own_total, state, mask=inside)
        # of the programs with these keys, one writes
        tl.store(total_decays + segment_index * K + keys, log_decay, mask=(keys < K) & (first_value == 0))


@jit
def join_segments_kernel(
    totals,  # [J, B, H, K, V] fp32: states of the segments from a zero start; becomes those before each segment
    total_decays,  # [J, B, H, K] fp32: summed g of the segments
    before_decays,  # [J, B, H, K] fp32: summed g of the segments before each, written
    state,  # [B, H, K, V] fp32: the state after the last segment, written
    log_decay,  # [B, H, K] fp32: summed g of all segments, written
    K,
    V,
    BH,
    num_segments,
    BK: tl.constexpr,
    BV: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Exclusive scan over the segments, in place, from the first one on, or in reverse from the last one."""
    value_tiles = tl.cdiv(V, BV)
    tile = tl.program_id(0)
    batch_head = tl.program_id(1)
    first_key = (tile // value_tiles) * BK
    first_value = (tile % value_tiles) * BV
    keys = first_key + tl.arange(0, BK)
    leads = (keys < K) & (first_value == 0)
    running = tl.zeros([BK, BV], tl.float32)
    running_decay = tl.zeros([BK], tl.float32)
    # several loads at once: a step's own work takes less time than one
    for step in tl.range(num_segments, num_stages=4):
        segment = num_segments - 1 - step if REVERSE else step
        index = segment * BH + batch_head
        pointers, inside = state_pointers(totals, index, K, V, first_key, first_value, BK, BV)
        own = tl.load(pointers, mask=inside, other=0.0)
        own_decay = tl.load(total_decays + index.to(tl.int64) * K + keys, mask=keys < K, other=0.0)
        tl.store(pointers, running, mask=inside)
        tl.store(before_decays + index.to(tl.int64) * K + keys, running_decay, mask=leads)
        running = running * decay(own_decay)[:, None] + own
        running_decay += own_decay
    pointers, inside = state_pointers(state, batch_head, K, V, first_key, first_value, BK, BV)
    tl.store(pointers, running, mask=inside)
    tl.store(log_decay + batch_head * K + keys, running_decay, mask=leads)


@jit
def correct_starts_kernel(
    starts,  # [J, B, H, K, V] fp32: states before each segment from a zero start of the rank; becomes the true ones
    before_decays,  # [J, B, H, K] fp32
    incoming,  # [B, H, K, V] fp32: R, or D_in in reverse
    K,
    V,
    BH,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Correct the states before the segments: starts += exp(before_decays) ⊙ incoming."""
    value_tiles = tl.cdiv(V, BV)
    tile = tl.program_id(0)
    batch_head = tl.program_id(1)
    index = tl.program_id(2) * BH + batch_head
    first_key = (tile // value_tiles) * BK
    first_value = (tile % value_tiles) * BV
    keys = first_key + tl.arange(0, BK)
    pointers, inside = state_pointers(incoming, batch_head, K, V, first_key, first_value, BK, BV)
    before = tl.load(pointers, mask=inside, other=0.0)
    survives = decay(tl.load(before_decays + index.to(tl.int64) * K + keys, mask=keys < K, other=0.0))
    pointers, _ = state_pointers(starts, index, K, V, first_key, first_value, BK, BV)
    start = tl.load(pointers, mask=inside, other=0.0)
    tl.store(pointers, start + survives[:, None] * before, mask=inside)


@jit
def step_kernel(
    q,  # [B, H, K]
    k,  # [B, H, K]
    v,  # [B, H, V]
    g,  # [B, H, K] fp32
    state,  # [B, H, K, V] fp32, updated
    o,  # [B, H, V], written
    scale,
    K,
    V,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One program updates BV columns of one head's state and computes their outputs."""
    batch_head = tl.program_id(0).to(tl.int64)
    first_value = tl.program_id(1) * BV
    keys = tl.arange(0, BK)
    values = first_value + tl.arange(0, BV)
    of_keys = batch_head * K + keys
    of_values = batch_head * V + values
    pointers, inside = state_pointers(state, batch_head, K, V, 0, first_value, BK, BV)

    survives = decay(tl.load(g + of_keys, mask=keys < K, other=0.0))
    key = tl.load(k + of_keys, mask=keys < K, other=0.0).to(tl.float32)
    query = tl.load(q + of_keys, mask=keys < K, other=0.0).to(tl.float32) * scale
    value = tl.load(v + of_values, mask=values < V, other=0.0).to(tl.float32)
    new = tl.load(pointers, mask=inside, other=0.0) * survives[:, None] + key[:, None] * value[None, :]
    tl.store(pointers, new, mask=inside)
    tl.store(o + of_values, tl.sum(query[:, None] * new, axis=0).to(o.dtype.element_ty), mask=values < V)


def launch_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, o: Tensor, scale: float) -> None:
    """Launch on contiguous tensors: q, k, g [B, 1, H, K]; v, o [B, 1, H, V]; state [B, H, K, V], updated."""
    B, H, K, V = state.shape
    BK = next_power_of_2(K)
    # of a program's tile of the state 32 fp32 registers a thread
    BV = min(next_power_of_2(V), max(1, 4096 // BK))
    step_kernel[(B * H, cdiv(V, BV))](q, k, v, g, state, o, scale, K, V, BK=BK, BV=BV, num_warps=4)
