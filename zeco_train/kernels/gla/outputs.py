"""What a chunk's tokens take from the state beside it and from each other: the outputs, and in reverse dv.

    o_i  = scale · (q_i ⊙ exp(b_i))ᵀ S          + Σ_{j <= i} A_ij v_j          S: the true state before the chunk
    dv_j = (k_j ⊙ exp(b_end − b_j))ᵀ dS         + Σ_{i >= j} A_ij do_i         dS: the true gradient after it

Both are one kernel: they differ in which end of the chunk the state lies at, and in the scores being transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.kernels.gla.tiles import (
    decay,
    head_offset,
    load_corrected,
    load_last_row,
    load_pieces,
    load_tile,
    store_tile,
)


@triton.jit
def outputs_kernel(
    x,  # [B, T, H, K]: q, or k in reverse
    y,  # [B, T, H, V]: v, or do in reverse
    b,  # [B, T, H, K] fp32, sums of g inside chunks
    pieces,  # [T] int32, read with DOCUMENTS
    scores,  # [N, B, H, C, C]
    states,  # [N, B, H, K, V]: states at the chunk's start, in reverse gradients at its end, from their segment's zero
    log_decays,  # [N, B, H, K] fp32: by which `starts` decays on its way to them
    starts,  # [J, B, H, K, V] fp32: true states that the segments start from
    o,  # [B, T, H, V], written: the outputs, or dv in reverse
    scale,
    T,
    H,
    K,
    V,
    BH,
    segment_chunks,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    REVERSE: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program makes [C, BV] of one chunk of one head."""
    value_tiles = tl.cdiv(V, BV)
    chunk = tl.program_id(0) // value_tiles
    first_value = (tl.program_id(0) % value_tiles) * BV
    batch_head = tl.program_id(1)
    x += head_offset(batch_head, T, H, K)
    b += head_offset(batch_head, T, H, K)
    y += head_offset(batch_head, T, H, V)
    o += head_offset(batch_head, T, H, V)
    start = chunk * C
    rows = tl.arange(0, C)
    index = chunk.to(tl.int64) * BH + batch_head
    segment_index = (chunk // segment_chunks) * BH + batch_head
    if DOCUMENTS:
        own, before, end = load_pieces(pieces, start, T, C)
        sees = own == (end if REVERSE else before)

    result = tl.zeros([C, BV], tl.float32)
    for first_key in range(0, K, BK):
        sums = load_tile(b, start, T, H, K, first_key, C, BK)
        if REVERSE:
            total = load_last_row(b, start, T, H, K, first_key, C, BK)
            exponents = tl.where((rows < T - start)[:, None], total[None, :] - sums, 0.0)
        else:
            exponents = sums
        factors = decay(exponents)
        if DOCUMENTS:
            factors = tl.where(sees[:, None], factors, 0.0)
        vectors = load_tile(x, start, T, H, K, first_key, C, BK)
        weighted = (vectors.to(tl.float32) * factors).to(vectors.dtype)
        state = load_corrected(states, log_decays, starts, index, segment_index, K, V, first_key, first_value, BK, BV)
        result += tl.dot(weighted, state.to(vectors.dtype), input_precision=PRECISION)
    if not REVERSE:
        result *= scale
    values = load_tile(y, start, T, H, V, first_value, C, BV)
    pointers = scores + index * C * C + rows[:, None] * C + rows[None, :]
    weights = tl.load(pointers, mask=rows[:, None] >= rows[None, :], other=0.0).to(values.dtype)
    if REVERSE:
        weights = tl.trans(weights)
    result += tl.dot(weights, values, input_precision=PRECISION)
    store_tile(o, result, start, T, H, V, first_value, C, BV)
