"""Outputs: contributions of the state before a chunk and of the chunk's own tokens.

o_i = scale · (q_i ⊙ exp(b_i))ᵀ S + Σ_{j <= i} A_ij v_j          S: the true state before the chunk

And one token of the recurrence, whose time is that of reading and writing the state.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from zeco_train.kernels import cdiv, jit, next_power_of_2
from zeco_train.ops.gla.kernels.tiles import (
    decay,
    head_offset,
    load_corrected,
    load_doc_ids,
    load_tile,
    state_pointers,
    store_tile,
)


@jit
def outputs_kernel(
    q,  # [B, T, H, K]
    v,  # [B, T, H, V]
    b,  # [B, T, H, K] fp32, sums of g inside chunks
    doc_ids,  # [T] int32, read with DOCUMENTS
    scores,  # [N, B, H, C, C]
    states,  # [N, B, H, K, V]: states before the chunks from their segment's zero start; become the true ones
    log_decays,  # [N, B, H, K] fp32: by which `starts` decays on its way to them
    starts,  # [J, B, H, K, V] fp32: true states that the segments start from
    o,  # [B, T, H, V], written
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
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes [C, BV] of one chunk of one head."""
    value_tiles = tl.cdiv(V, BV)
    chunk = tl.program_id(0) // value_tiles
    first_value = (tl.program_id(0) % value_tiles) * BV
    batch_head = tl.program_id(1)
    q += head_offset(batch_head, T, H, K)
    b += head_offset(batch_head, T, H, K)
    v += head_offset(batch_head, T, H, V)
    o += head_offset(batch_head, T, H, V)
    start = chunk * C
    rows = tl.arange(0, C)
    index = chunk.to(tl.int64) * BH + batch_head
    segment_index = (chunk // segment_chunks) * BH + batch_head
    if DOCUMENTS:
        own, before, _ = load_doc_ids(doc_ids, start, T, C)

    result = tl.zeros([C, BV], tl.float32)
    for first_key in range(0, K, BK):
        factors = decay(load_tile(b, start, T, H, K, first_key, C, BK))
        if DOCUMENTS:
            factors = tl.where((own == before)[:, None], factors, 0.0)
        queries = load_tile(q, start, T, H, K, first_key, C, BK)
        weighted = (queries.to(tl.float32) * factors).to(queries.dtype)
        state = load_corrected(states, log_decays, starts, index, segment_index, K, V, first_key, first_value, BK, BV)
        state = state.to(queries.dtype)
        pointers, inside = state_pointers(states, index, K, V, first_key, first_value, BK, BV)
        tl.store(pointers, state, mask=inside)
        result += tl.dot(weighted, state, input_precision=PRECISION)
    result *= scale
    values = load_tile(v, start, T, H, V, first_value, C, BV)
    # Above the diagonal the scores are mirrored (`scores_kernel`).
    pointers = scores + index * C * C + rows[:, None] * C + rows[None, :]
    weights = tl.load(pointers, mask=rows[:, None] >= rows[None, :], other=0.0).to(values.dtype)
    result += tl.dot(weights, values, input_precision=PRECISION)
    store_tile(o, result, start, T, H, V, first_value, C, BV)


# Elements of a program's tile of the state: 32 fp32 registers a thread.
_TILE = 4096
_WARPS = 4


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
    BV = min(next_power_of_2(V), max(1, _TILE // BK))
    step_kernel[(B * H, cdiv(V, BV))](q, k, v, g, state, o, scale, K, V, BK=BK, BV=BV, num_warps=_WARPS)
