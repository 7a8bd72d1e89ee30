"""A segment's effect on the state: the state after it from a zero start, and its summed log-decay.

    S = Σ_j exp(b_end − b_j) k_j v_jᵀ          in reverse, for gradients:   dS = scale · Σ_i exp(b_i) q_i do_iᵀ

Only segments' totals are written. The states of the chunks between are recomputed where they are used (`walk`): with
one decay per head a step of the recurrence costs less than to write a state and read it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.ops.gla.kernels.tiles import decay, head_offset, load_doc_ids, load_tile, state_pointers
from zeco_train.ops.scalar_decay.kernels.decays import key_head_offset, load_rate, load_sums


@triton.jit
def summaries_kernel(
    keys,  # [B, T, G, K]: k, or q in reverse
    values,  # [B, T, H, V]: v, or do in reverse
    decays,  # [B, H, T] fp32, sums of g inside chunks; with FIXED [H], the log-decays
    doc_ids,  # [T] int32, read with DOCUMENTS
    totals,  # [J, B, H, K, V] fp32, written
    total_decays,  # [J, B, H, K] fp32, written
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
    REVERSE: tl.constexpr,
    FIXED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program walks one segment with a [BK, BV] tile of the state in registers; K <= BK."""
    first_value = tl.program_id(0) * BV
    batch_head = tl.program_id(1)
    segment = tl.program_id(2)
    keys += key_head_offset(batch_head, T, H, G, K)
    values += head_offset(batch_head, T, H, V)
    rate = load_rate(decays, batch_head, H, FIXED)
    first_chunk = segment * segment_chunks
    end_chunk = tl.minimum(first_chunk + segment_chunks, num_chunks)

    state = tl.zeros([BK, BV], tl.float32)
    log_decay = scale * 0.0
    for step in range(end_chunk - first_chunk):
        chunk = end_chunk - 1 - step if REVERSE else first_chunk + step
        start = chunk * C
        sums, total = load_sums(decays, rate, batch_head, start, T, C, FIXED)
        key = load_tile(keys, start, T, G, K, 0, C, BK)
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

    index = segment * BH + batch_head
    pointers, inside = state_pointers(totals, index, K, V, 0, first_value, BK, BV)
    tl.store(pointers, state, mask=inside)
    rows = tl.arange(0, BK)
    leads = (rows < K) & (first_value == 0)
    tl.store(total_decays + index.to(tl.int64) * K + rows, tl.zeros([BK], tl.float32) + log_decay, mask=leads)
