"""States at chunk boundaries, segment by segment, and their join over the segments of a rank.

A rank's chunks are cut into segments that are processed in parallel, each from a zero start: the split over ranks
again, inside a GPU, which one sequential loop would leave mostly idle. Forward:

    states[n] = S before chunk n from the segment's start,    log_decays[n] = summed g from there to chunk n

In reverse the same kernel computes the gradients, from the segment's end, with queries for keys and do for v:

    states[n] = dS after chunk n from the segment's end,      log_decays[n] = summed g of the segment after chunk n
"""

from __future__ import annotations

import triton.language as tl

from zeco_train.kernels import jit
from zeco_train.ops.gla.kernels.tiles import (
    decay,
    head_offset,
    load_doc_ids,
    load_last_row,
    load_tile,
    state_pointers,
    store_tile,
    sum_tokens,
)


@jit
def chunk_states_kernel(
    x,  # [B, T, H, K]: k, or q in reverse
    y,  # [B, T, H, V]: v, or do in reverse
    g,  # [B, T, H, K] fp32: log-decays, or with CUMULATED their sums b inside chunks
    b,  # [B, T, H, K] fp32: b, written unless CUMULATED
    doc_ids,  # [T] int32, read with DOCUMENTS
    states,  # [N, B, H, K, V]
    log_decays,  # [N, B, H, K] fp32, written
    totals,  # [J, B, H, K, V] fp32: S after each segment from a zero start, written
    total_decays,  # [J, B, H, K] fp32, written
    scale,
    T,
    H,
    K,
    V,
    BH,
    num_chunks,
    segment_chunks,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    REVERSE: tl.constexpr,
    CUMULATED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program walks one segment with a [BK, BV] tile of the state in registers."""
    value_tiles = tl.cdiv(V, BV)
    tile = tl.program_id(0)
    segment = tl.program_id(1)
    batch_head = tl.program_id(2)
    first_key = (tile // value_tiles) * BK
    first_value = (tile % value_tiles) * BV
    leads = first_value == 0  # of the programs with these keys, this one writes the outputs without V

    x += head_offset(batch_head, T, H, K)
    g += head_offset(batch_head, T, H, K)
    if not CUMULATED:
        b += head_offset(batch_head, T, H, K)
    y += head_offset(batch_head, T, H, V)
    keys = first_key + tl.arange(0, BK)
    rows = tl.arange(0, C)

    first_chunk = segment * segment_chunks
    end_chunk = tl.minimum(first_chunk + segment_chunks, num_chunks)
    log_decay = tl.zeros([BK], tl.float32)
    segment_index = segment * BH + batch_head
    state = tl.zeros([BK, BV], tl.float32)

    for step in range(end_chunk - first_chunk):
        chunk = end_chunk - 1 - step if REVERSE else first_chunk + step
        index = chunk.to(tl.int64) * BH + batch_head
        pointers, inside = state_pointers(states, index, K, V, first_key, first_value, BK, BV)
        tl.store(pointers, state.to(states.dtype.element_ty), mask=inside)
        tl.store(log_decays + index * K + keys, log_decay, mask=(keys < K) & leads)

        start = chunk * C
        if CUMULATED:
            sums = load_tile(g, start, T, H, K, first_key, C, BK)
            total = load_last_row(g, start, T, H, K, first_key, C, BK)
        else:
            # exp is 0 in fp32 from −104 on, and a reset written as −1e9 would leave the sums after it no digits
            decays = tl.maximum(load_tile(g, start, T, H, K, first_key, C, BK), -104.0)
            sums = sum_tokens(rows[:, None] >= rows[None, :], decays, 3 if x.dtype.element_ty == tl.bfloat16 else 0)
            total = tl.sum(tl.where((rows == tl.minimum(T - start, C) - 1)[:, None], sums, 0.0), axis=0)
            if leads:
                store_tile(b, sums, start, T, H, K, first_key, C, BK)
        vectors = load_tile(x, start, T, H, K, first_key, C, BK)
        values = load_tile(y, start, T, H, V, first_value, C, BV)
        # a query sees the state before its chunk through the decays up to its own, a key reaches the state after it
        # through those of later tokens; rows past the end are zeros, so their factors do not matter
        exponents = sums if REVERSE else total[None, :] - sums
        exponents = tl.where((rows < T - start)[:, None], exponents, 0.0)
        factors = decay(exponents)
        survives = decay(total)
        if DOCUMENTS:
            own, before, end = load_doc_ids(doc_ids, start, T, C)
            factors = tl.where((own == (before if REVERSE else end))[:, None], factors, 0.0)
            survives = tl.where(before == end, survives, 0.0)
            total = tl.where(before == end, total, float("-inf"))
        weighted = vectors.to(tl.float32) * factors
        if REVERSE:
            weighted *= scale
        added = tl.dot(tl.trans(weighted.to(values.dtype)), values, input_precision=PRECISION)
        state = state * survives[:, None] + added
        log_decay += total

    own_total, within = state_pointers(totals, segment_index, K, V, first_key, first_value, BK, BV)
    tl.store(own_total, state, mask=within)
    tl.store(total_decays + segment_index.to(tl.int64) * K + keys, log_decay, mask=(keys < K) & leads)


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
