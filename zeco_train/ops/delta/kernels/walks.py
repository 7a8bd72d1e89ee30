"""Walks over the chunks of a segment with some columns of the state in registers.

A rank's chunks are cut into segments that are walked in parallel. Forward, S before a chunk and N its new values:

    N = U − W S        S ← decay ⊙ S + k̃ᵀ N        o = scale · q̄ S + P N

from the true state at the segment's start, or first, for the segment's own summary, from 0, and from the identity
without U: those columns become the segment's transition. In reverse, dS after a chunk, dN of its new values:

    dN = Pᵀ do + k̃ dS        dS ← decay ⊙ dS + (scale · q̄)ᵀ do − Wᵀ dN

W, U, k̃, scale · q̄ and decays are of `operands_kernel`, P of `systems_kernel`. States and gradients are fp32 in
registers, and in the dtype of the tokens as operands of products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.ops.gla.kernels.tiles import head_offset, load_tile, state_pointers, store_tile


@triton.jit
def _load_pairs(pairs, index, C: tl.constexpr):
    """[C, C], number `index` of [.., C, C]."""
    rows = tl.arange(0, C)
    return tl.load(pairs + index * C * C + rows[:, None] * C + rows[None, :])


@triton.jit
def forward_walk_kernel(
    w,  # [B, T, H, K]
    u,  # [B, T, H, V]
    end_keys,  # [B, T, H, K]
    survival,  # [N, B, H, K] fp32
    queries,  # [B, T, H, K], read with OUTPUTS
    scores,  # [N, B, H, C, C], read with OUTPUTS
    starts,  # [J, B, H, K, V] fp32: true states before the segments, read unless SUMMARIES
    totals,  # [J, B, H, K, V] fp32, written with SUMMARIES: states after the segments, from 0
    transitions,  # [J, B, H, K, K] fp32, written with SUMMARIES
    o,  # [B, T, H, V], written with OUTPUTS
    states,  # [N, B, H, K, V], written with STATES: true states before the chunks
    added,  # [B, T, H, V], written with STATES: N
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
    SUMMARIES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STATES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program walks one segment with BV columns of the state of one head; K <= BK.

    With SUMMARIES, programs after those of V have columns of the transition.
    """
    value_tiles = tl.cdiv(V, BV)
    tile = tl.program_id(0)
    batch_head = tl.program_id(1)
    segment = tl.program_id(2)
    is_state = tile < value_tiles
    # past V all loads are masked
    first_value = tl.minimum(tile * BV, V) if SUMMARIES else tile * BV
    w += head_offset(batch_head, T, H, K)
    u += head_offset(batch_head, T, H, V)
    end_keys += head_offset(batch_head, T, H, K)
    if OUTPUTS:
        queries += head_offset(batch_head, T, H, K)
        o += head_offset(batch_head, T, H, V)
    if STATES:
        added += head_offset(batch_head, T, H, V)
    keys = tl.arange(0, BK)
    first_chunk = segment * segment_chunks
    end_chunk = tl.minimum(first_chunk + segment_chunks, num_chunks)
    segment_index = segment * BH + batch_head
    first_row = (tile - value_tiles) * BV
    if SUMMARIES:
        columns = first_row + tl.arange(0, BV)
        state = tl.where((keys[:, None] == columns[None, :]) & (columns >= 0)[None, :], 1.0, 0.0)
    else:
        pointers, inside = state_pointers(starts, segment_index, K, V, 0, first_value, BK, BV)
        state = tl.load(pointers, mask=inside, other=0.0)

    for step in range(end_chunk - first_chunk):
        chunk = first_chunk + step
        start = chunk * C
        index = chunk.to(tl.int64) * BH + batch_head
        weights = load_tile(w, start, T, H, K, 0, C, BK)
        values = load_tile(u, start, T, H, V, first_value, C, BV)
        leaving = load_tile(end_keys, start, T, H, K, 0, C, BK)
        survives = tl.load(survival + index * K + keys, mask=keys < K, other=0.0)
        before = state.to(weights.dtype)
        new = (values.to(tl.float32) - tl.dot(weights, before, input_precision=PRECISION)).to(weights.dtype)
        if STATES:
            own, within = state_pointers(states, index, K, V, 0, first_value, BK, BV)
            tl.store(own, before, mask=within)
            store_tile(added, new, start, T, H, V, first_value, C, BV)
        if OUTPUTS:
            seen = tl.dot(load_tile(queries, start, T, H, K, 0, C, BK), before, input_precision=PRECISION)
            seen = tl.dot(_load_pairs(scores, index, C), new, seen, input_precision=PRECISION)
            store_tile(o, seen, start, T, H, V, first_value, C, BV)
        state = tl.dot(tl.trans(leaving), new, state * survives[:, None], input_precision=PRECISION)

    if SUMMARIES:
        if is_state:
            pointers, inside = state_pointers(totals, segment_index, K, V, 0, first_value, BK, BV)
            tl.store(pointers, state, mask=inside)
        else:
            pointers, inside = state_pointers(transitions, segment_index, K, K, 0, first_row, BK, BV)
            tl.store(pointers, state, mask=inside)


@triton.jit
def reverse_walk_kernel(
    w,  # [B, T, H, K]
    end_keys,  # [B, T, H, K]
    survival,  # [N, B, H, K] fp32
    queries,  # [B, T, H, K]
    scores,  # [N, B, H, C, C]
    do,  # [B, T, H, V]
    ends,  # [J, B, H, K, V] fp32: true gradients at the segments' ends, read with STATES
    totals,  # [J, B, H, K, V] fp32, written unless STATES: gradients before the segments, from 0
    grads,  # [N, B, H, K, V], written with STATES: true gradients of the states after the chunks
    of_added,  # [B, T, H, V], written with STATES: dN
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
    STATES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program walks one segment, from its end, with BV columns of the gradient of one head; K <= BK."""
    first_value = tl.program_id(0) * BV
    batch_head = tl.program_id(1)
    segment = tl.program_id(2)
    w += head_offset(batch_head, T, H, K)
    end_keys += head_offset(batch_head, T, H, K)
    queries += head_offset(batch_head, T, H, K)
    do += head_offset(batch_head, T, H, V)
    keys = tl.arange(0, BK)
    first_chunk = segment * segment_chunks
    end_chunk = tl.minimum(first_chunk + segment_chunks, num_chunks)
    segment_index = segment * BH + batch_head
    if STATES:
        of_added += head_offset(batch_head, T, H, V)
        pointers, inside = state_pointers(ends, segment_index, K, V, 0, first_value, BK, BV)
        grad = tl.load(pointers, mask=inside, other=0.0)
    else:
        grad = tl.zeros([BK, BV], tl.float32)

    for step in range(end_chunk - first_chunk):
        chunk = end_chunk - 1 - step
        start = chunk * C
        index = chunk.to(tl.int64) * BH + batch_head
        weights = load_tile(w, start, T, H, K, 0, C, BK)
        leaving = load_tile(end_keys, start, T, H, K, 0, C, BK)
        seen = load_tile(queries, start, T, H, K, 0, C, BK)
        output_grads = load_tile(do, start, T, H, V, first_value, C, BV)
        pairs = _load_pairs(scores, index, C)
        survives = tl.load(survival + index * K + keys, mask=keys < K, other=0.0)
        after = grad.to(weights.dtype)
        new = tl.dot(tl.trans(pairs), output_grads, input_precision=PRECISION)
        new = tl.dot(leaving, after, new, input_precision=PRECISION)
        if STATES:
            own, within = state_pointers(grads, index, K, V, 0, first_value, BK, BV)
            tl.store(own, after, mask=within)
            store_tile(of_added, new, start, T, H, V, first_value, C, BV)
        grad = tl.dot(tl.trans(seen), output_grads, grad * survives[:, None], input_precision=PRECISION)
        grad = tl.dot(tl.trans(weights), (-new).to(weights.dtype), grad, input_precision=PRECISION)

    if not STATES:
        pointers, inside = state_pointers(totals, segment_index, K, V, 0, first_value, BK, BV)
        tl.store(pointers, grad, mask=inside)
