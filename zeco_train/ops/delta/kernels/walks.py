"""Walks over the chunks of a segment with some columns of the state in registers.

A rank's chunks are cut into segments that are walked in parallel. Forward, S before a chunk and N its new values:

    N = F (v − k̄ S)        S ← decay ⊙ S + k̃ᵀ N        o = scale · q̄ S + P N

from the true state at the segment's start, or first, for the segment's own summary, from 0, and from the identity
without v: those columns become the segment's transition. In reverse, dS after a chunk, dN of its new values:

    dN = Pᵀ do + k̃ dS        dv = Fᵀ dN        dS ← decay ⊙ dS + (scale · q̄)ᵀ do − k̄ᵀ dv

P and F are of `systems_kernel`. Decays by channel are in k⁺, k⁻ and scale · q⁺, of `operands_kernel`, and in factors of
states, which are stored with them; those by head are factors of rows of the other operand, so that keys and queries are
read as they are, once for all heads that share them.

States and gradients are fp32 in registers, and in the dtype of the tokens as operands of products. All are transposed,
[BV, BK]: a product's result is then the first operand of the next one without a way through shared memory.
"""

from __future__ import annotations

import triton.language as tl

from zeco_train.kernels import jit
from zeco_train.ops.delta.kernels.grads import INTERPRETED
from zeco_train.ops.delta.kernels.systems import WEAK, border_decays, load_decays, load_kind, write_operands
from zeco_train.ops.gla.kernels.tiles import head_offset, load_tile, state_pointers, store_tile
from zeco_train.ops.scalar_decay.kernels.decays import key_head_offset


@jit
def _load_pairs(pairs, index, C: tl.constexpr):
    """[C, C], number `index` of [.., C, C]."""
    rows = tl.arange(0, C)
    return tl.load(pairs + index * C * C + rows[:, None] * C + rows[None, :])


@jit
def _columns_of(states, index, K, V, first_value, BK: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr = False):
    """Pointers to columns of state number `index` in [.., K, V], [BV, BK], with ROWS [BK, BV]; which lie inside."""
    if ROWS:
        pointers, inside = state_pointers(states, index, K, V, 0, first_value, BK, BV)
    else:
        keys = tl.arange(0, BK)
        values = first_value + tl.arange(0, BV)
        inside = (values < V)[:, None] & (keys < K)[None, :]
        pointers = states + index.to(tl.int64) * K * V + (keys * V)[None, :] + values[:, None]
    return pointers, inside


@jit
def _load_border(borders, number, index, K, BK: tl.constexpr, inside=True):
    """[1, BK], one of the factors of states of a chunk, number `index` of [.., 3, K]; 1 unless `inside`."""
    keys = tl.arange(0, BK)
    return tl.load(borders + (index * 3 + number) * K + keys, mask=(keys < K) & inside, other=1.0)[None, :]


@jit
def _load_decays(
    sums, doc_ids, batch_head, start, T, C: tl.constexpr, BY_CHANNEL: tl.constexpr, DOCUMENTS: tl.constexpr
):
    """Factors of a chunk's tokens from its start and to its end, [1, C], and of the state over it, 1 × 1.

    BY_CHANNEL: 0 across a restart, else 1.
    """
    if BY_CHANNEL and not DOCUMENTS:
        from_start, to_end, survives = tl.full([1, C], 1.0, tl.float32), tl.full([1, C], 1.0, tl.float32), 1.0
    else:
        own, total = tl.zeros([C, 1], tl.float32), tl.zeros([1, 1], tl.float32)
        if not BY_CHANNEL:
            own, total = load_decays(sums, batch_head, start, T, C)
        from_start, to_end, survives = border_decays(own, total, doc_ids, start, T, C, DOCUMENTS)
        from_start, to_end = tl.trans(from_start), tl.trans(to_end)
    return from_start, to_end, survives


@jit
def forward_walk_kernel(
    keys,  # [B, T, G, K]: k, or k⁺ with BY_CHANNEL
    end_keys,  # [B, T, G, K]: k⁻, read with BY_CHANNEL
    queries,  # [B, T, G, K]: q, or scale · q⁺ with BY_CHANNEL; read with OUTPUTS
    v,  # [B, T, H, V]
    sums,  # [B, H, T] fp32; with BY_CHANNEL borders, [N, B, H, 3, K] fp32
    doc_ids,  # [T] int32, read with DOCUMENTS
    kinds,  # [N, B, H, TILES] int8, read with BY_CHANNEL
    inverses,  # [N, B, H, C, C]: F
    scores,  # [N, B, H, C, C]: P, read with OUTPUTS
    starts,  # [J, B, H, K, V] fp32: true states before the segments, read unless SUMMARIES
    totals,  # [J, B, H, K, V] fp32, written with SUMMARIES: states after the segments, from 0
    transitions,  # [J, B, H, K, K] fp32, written with SUMMARIES
    o,  # [B, T, H, V], written with OUTPUTS
    states,  # [N, B, H, V, K], written with STATES: states before the chunks, transposed, times factors
    added,  # [B, T, H, V], written with STATES: N
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
    TILES: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    SUMMARIES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STATES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program walks one segment with BV columns of the state of one head; K <= BK.

    With SUMMARIES, programs after those of V have columns of the transition. With BY_CHANNEL G is H.
    """
    value_tiles = tl.cdiv(V, BV)
    tile = tl.program_id(0)
    batch_head = tl.program_id(1)
    segment = tl.program_id(2)
    is_state = tile < value_tiles
    # past V all loads are masked
    first_value = tl.minimum(tile * BV, V) if SUMMARIES else tile * BV
    keys += key_head_offset(batch_head, T, H, G, K)
    end_keys += key_head_offset(batch_head, T, H, G, K)
    v += head_offset(batch_head, T, H, V)
    if OUTPUTS:
        queries += key_head_offset(batch_head, T, H, G, K)
        o += head_offset(batch_head, T, H, V)
    if STATES:
        added += head_offset(batch_head, T, H, V)
    first_chunk = segment * segment_chunks
    end_chunk = tl.minimum(first_chunk + segment_chunks, num_chunks)
    segment_index = segment * BH + batch_head
    first_row = (tile - value_tiles) * BV
    if SUMMARIES:
        columns = first_row + tl.arange(0, BV)
        is_one = (tl.arange(0, BK)[None, :] == columns[:, None]) & (columns >= 0)[:, None]
        state = tl.where(is_one, 1.0, 0.0)
    else:
        pointers, inside = _columns_of(starts, segment_index, K, V, first_value, BK, BV)
        state = tl.load(pointers, mask=inside, other=0.0)

    if BY_CHANNEL:
        kind = load_kind(kinds, first_chunk.to(tl.int64) * BH + batch_head, True, TILES)
    for step in range(end_chunk - first_chunk):
        chunk = first_chunk + step
        start = chunk * C
        index = chunk.to(tl.int64) * BH + batch_head
        entering = load_tile(keys, start, T, G, K, 0, C, BK)
        values = load_tile(v, start, T, H, V, first_value, C, BV)
        solving = tl.trans(_load_pairs(inverses, index, C))
        leaving = load_tile(end_keys, start, T, G, K, 0, C, BK) if BY_CHANNEL else entering
        from_start, to_end, survives = _load_decays(sums, doc_ids, batch_head, start, T, C, BY_CHANNEL, DOCUMENTS)
        if BY_CHANNEL:
            after_tokens = _load_border(sums, 2, index, K, BK)
            # the next chunk's, on which its first product waits
            has_factors = kind != WEAK
            kind = load_kind(kinds, index + BH, chunk + 1 < end_chunk, TILES)
            if has_factors:
                state *= _load_border(sums, 0, index, K, BK)
        before = state.to(entering.dtype)
        held = tl.dot(before, tl.trans(entering), input_precision=PRECISION) * -from_start
        new = tl.dot(tl.trans(values), solving, input_precision=PRECISION)
        new = tl.dot(held.to(entering.dtype), solving, new, input_precision=PRECISION)
        if STATES:
            own = states + index * K * V + ((first_value + tl.arange(0, BV)) * K)[:, None] + tl.arange(0, BK)[None, :]
            _, within = _columns_of(states, index, K, V, first_value, BK, BV)
            tl.store(own, before, mask=within)
            store_tile(added, tl.trans(new), start, T, H, V, first_value, C, BV)
        if OUTPUTS:
            seen = load_tile(queries, start, T, G, K, 0, C, BK)
            seen = tl.dot(before, tl.trans(seen), input_precision=PRECISION)
            seen *= from_start if BY_CHANNEL else from_start * scale
            pairs = tl.trans(_load_pairs(scores, index, C))
            seen = tl.dot(new.to(entering.dtype), pairs, seen, input_precision=PRECISION)
            store_tile(o, tl.trans(seen), start, T, H, V, first_value, C, BV)
        new = (new * to_end).to(entering.dtype)
        if BY_CHANNEL and has_factors:
            state *= _load_border(sums, 1, index, K, BK)
        state = tl.dot(new, leaving, state * survives, input_precision=PRECISION)
        if BY_CHANNEL:
            state *= after_tokens

    if SUMMARIES:
        if is_state:
            pointers, inside = _columns_of(totals, segment_index, K, V, first_value, BK, BV)
            tl.store(pointers, state, mask=inside)
        else:
            pointers, inside = _columns_of(transitions, segment_index, K, K, first_row, BK, BV)
            tl.store(pointers, state, mask=inside)


@jit
def _write_ahead(
    chunk, first_chunk, sources, written, batch_head, scale, T, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, BH,
    C: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The operands of a chunk from `first_chunk` on, and a barrier, which the compiler may put before them."""
    if chunk >= first_chunk:
        write_operands(sources, written, chunk, batch_head, scale, T, H, G, K, BH, 0, C, BK)
    # a loop with `tl.debug_barrier` is not pipelined
    if not INTERPRETED:
        tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r,~{memory}", [], tl.int32, is_pure=False, pack=1)


@jit
def reverse_walk_kernel(
    q,  # [B, T, KEY_HEADS, K], as the next two read with AHEAD
    k,  # [B, T, KEY_HEADS, K]
    channel_sums,  # [B, T, H, K] fp32, of `operands_kernel`
    keys,  # [B, T, G, K]: k, or k⁺ with BY_CHANNEL; as the next three written first with AHEAD
    end_keys,  # [B, T, G, K]: k⁻, read with BY_CHANNEL
    queries,  # [B, T, G, K]: q, or scale · q⁺ with BY_CHANNEL
    sums,  # [B, H, T] fp32; with BY_CHANNEL borders, [N, B, H, 3, K] fp32
    doc_ids,  # [T] int32, read with DOCUMENTS
    kinds,  # [N, B, H, TILES] int8, read with BY_CHANNEL
    inverses,  # [N, B, H, C, C]: F
    scores,  # [N, B, H, C, C]: P
    do,  # [B, T, H, V]
    ends,  # [J, B, H, K, V] fp32: true gradients at the segments' ends, read with STATES
    totals,  # [J, B, H, K, V] fp32, written unless STATES: gradients before the segments, from 0
    grads,  # [N, B, H, V, K], written with STATES: gradients of states after the chunks, likewise
    dv,  # [B, T, H, V], written with STATES
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
    TILES: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    STATES: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program walks one segment, from its end, with BV columns of the gradient of one head; K <= BK.

    AHEAD: so many chunks before it reads operands it writes them, as all programs of a head do; 0: they are there.
    """
    first_value = tl.program_id(0) * BV
    batch_head = tl.program_id(1)
    segment = tl.program_id(2)
    keys += key_head_offset(batch_head, T, H, G, K)
    end_keys += key_head_offset(batch_head, T, H, G, K)
    queries += key_head_offset(batch_head, T, H, G, K)
    do += head_offset(batch_head, T, H, V)
    first_chunk = segment * segment_chunks
    end_chunk = tl.minimum(first_chunk + segment_chunks, num_chunks)
    segment_index = segment * BH + batch_head
    if STATES:
        dv += head_offset(batch_head, T, H, V)
        pointers, inside = _columns_of(ends, segment_index, K, V, first_value, BK, BV)
        grad = tl.load(pointers, mask=inside, other=0.0)
    else:
        grad = tl.zeros([BV, BK], tl.float32)
    if AHEAD > 0:
        of_group = key_head_offset(batch_head, T, H, KEY_HEADS, K)
        sources = q + of_group, k + of_group, channel_sums + head_offset(batch_head, T, H, K)
        written = keys, end_keys, queries, sums
        for step in range(AHEAD):
            ahead = end_chunk - 1 - step
            _write_ahead(ahead, first_chunk, sources, written, batch_head, scale, T, H, KEY_HEADS, K, BH, C, BK)
    if BY_CHANNEL:
        last = (end_chunk - 1).to(tl.int64) * BH + batch_head
        grad *= _load_border(sums, 2, last, K, BK)
        kind = load_kind(kinds, last, True, TILES)

    for step in range(end_chunk - first_chunk):
        chunk = end_chunk - 1 - step
        start = chunk * C
        index = chunk.to(tl.int64) * BH + batch_head
        entering = load_tile(keys, start, T, G, K, 0, C, BK)
        leaving = load_tile(end_keys, start, T, G, K, 0, C, BK) if BY_CHANNEL else entering
        seen = load_tile(queries, start, T, G, K, 0, C, BK)
        output_grads = tl.trans(load_tile(do, start, T, H, V, first_value, C, BV))
        solving = _load_pairs(inverses, index, C)
        pairs = _load_pairs(scores, index, C)
        from_start, to_end, survives = _load_decays(sums, doc_ids, batch_head, start, T, C, BY_CHANNEL, DOCUMENTS)
        if BY_CHANNEL:
            after_tokens = _load_border(sums, 2, index - BH, K, BK, chunk > first_chunk)
            has_factors = kind != WEAK
            kind = load_kind(kinds, index - BH, chunk > first_chunk, TILES)
        after = grad.to(entering.dtype)
        new = tl.dot(after, tl.trans(leaving), input_precision=PRECISION) * to_end
        new = tl.dot(output_grads, pairs, new, input_precision=PRECISION)
        solved = tl.dot(new.to(entering.dtype), solving, input_precision=PRECISION)
        if STATES:
            own = grads + index * K * V + ((first_value + tl.arange(0, BV)) * K)[:, None] + tl.arange(0, BK)[None, :]
            _, within = _columns_of(grads, index, K, V, first_value, BK, BV)
            tl.store(own, after, mask=within)
            store_tile(dv, tl.trans(solved), start, T, H, V, first_value, C, BV)
        if DOCUMENTS or not BY_CHANNEL:
            from_output = from_start if BY_CHANNEL else from_start * scale
            output_grads = (output_grads.to(tl.float32) * from_output).to(entering.dtype)
        if BY_CHANNEL and has_factors:
            grad *= _load_border(sums, 1, index, K, BK)
        grad = tl.dot(output_grads, seen, grad * survives, input_precision=PRECISION)
        grad = tl.dot((solved * -from_start).to(entering.dtype), entering, grad, input_precision=PRECISION)
        if BY_CHANNEL:
            if has_factors:
                grad *= _load_border(sums, 0, index, K, BK)
            grad *= after_tokens
        if AHEAD > 0:
            ahead = chunk - AHEAD
            _write_ahead(ahead, first_chunk, sources, written, batch_head, scale, T, H, KEY_HEADS, K, BH, C, BK)

    if not STATES:
        pointers, inside = _columns_of(totals, segment_index, K, V, first_value, BK, BV)
        tl.store(pointers, grad, mask=inside)


@jit
def join_kernel(
    start,  # [B, H, K, V] fp32, read with STARTS
    states,  # [J, B, H, K, V] fp32: of segments, from 0; with PRODUCT `transitions`, so V is K
    transitions,  # [J, B, H, K, K] fp32
    found,  # [J, B, H, K, V] fp32, written; with PRODUCT [B, H, K, K]
    K: tl.constexpr,
    V: tl.constexpr,
    BH,
    num_segments,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STARTS: tl.constexpr,
    REVERSE: tl.constexpr,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program joins BV columns of the segments of one head, K <= BK, by products of depth BN.

    With STARTS, states before the segments, the first of which is `start`; else after them, from 0. REVERSE: from the
    last segment on, with transposed transitions. PRODUCT: the transition of all segments instead.
    """
    # Parts of a transition are first operands; a whole one is the second, of the state in registers, transposed.
    is_split: tl.constexpr = BN < BK
    first_value = tl.program_id(0) * BV
    batch_head = tl.program_id(1)
    stride: tl.constexpr = -1 if REVERSE else 1
    segment = num_segments - 1 if REVERSE else 0
    pointers, inside = _columns_of(states, segment * BH + batch_head, K, V, first_value, BK, BV, is_split)
    if STARTS:
        pointers, _ = _columns_of(start, batch_head, K, V, first_value, BK, BV, is_split)
    state = tl.load(pointers, mask=inside, other=0.0)
    pointers, _ = _columns_of(found, segment * BH + batch_head, K, V, first_value, BK, BV, is_split)
    tl.store(pointers, state, mask=inside)
    for step in range(1, num_segments):
        index = (segment + stride * step) * BH + batch_head
        source = index - stride * BH if STARTS else index
        before, target = (batch_head, batch_head) if PRODUCT else (index - stride * BH, index)
        pointers, _ = _columns_of(states, source, K, V, first_value, BK, BV, is_split)
        joined = tl.zeros_like(state) if PRODUCT else tl.load(pointers, mask=inside, other=0.0)
        if is_split:  # all threads' stores
            tl.debug_barrier()
        for first in range(0, K, BN):
            if REVERSE:
                some, within = state_pointers(transitions, source, K, K, first, 0, BN, BK)
            else:
                some, within = state_pointers(transitions, source, K, K, 0, first, BK, BN)
            transition = tl.load(some, mask=within, other=0.0)
            transition = tl.trans(transition) if is_split == REVERSE else transition
            if is_split:
                some, within = state_pointers(found, before, K, V, first, first_value, BN, BV)
                rows = tl.load(some, mask=within, other=0.0)
                joined = tl.dot(transition, rows, joined, input_precision=PRECISION)
            else:
                joined = tl.dot(state, transition, joined, input_precision=PRECISION)
        if PRODUCT and is_split:  # before these places are written again
            tl.debug_barrier()
        pointers, _ = _columns_of(found, target, K, V, first_value, BK, BV, is_split)
        tl.store(pointers, joined, mask=inside)
        state = joined
