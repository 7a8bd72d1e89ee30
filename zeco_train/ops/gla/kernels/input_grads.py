"""dv, dk and dg, once the gradient of the state after each chunk is known.

    dv_j = (k_j ⊙ exp(b_end − b_j))ᵀ dS + Σ_{i >= j} A_ij do_i
    dk_j = (the part inside the chunk) + exp(b_end − b_j) ⊙ dS v_j
    dg_t = Σ_{i >= t} (q_i ⊙ dq_i − k_i ⊙ (dk_i of inside)) + Σ_{j < t} k_j ⊙ (dk_j beyond) + Σ_V exp(b_end) S ⊙ dS

Sums over the chunk's tokens; S: true state before the chunk, dS: gradient with respect to that after it. The terms of
dg are for the paths past token t: to a query of this chunk, from a key of this chunk to a later one, and from before
the chunk to after it. The usual form, Σ_V S_end ⊙ dS less the k ⊙ dk of tokens from t on, is the same number, but a
difference of larger ones. One program computes all three, so that dS, the largest input, is corrected only once.
"""

from __future__ import annotations

import triton.language as tl

from zeco_train.kernels import jit
from zeco_train.ops.gla.kernels.tiles import (
    decay,
    head_offset,
    load_corrected,
    load_doc_ids,
    load_last_row,
    load_tile,
    state_pointers,
    store_tile,
    sum_tokens,
)


@jit
def _leaving_keys(
    k, b, own, end, start, T, H, K, first_key, C: tl.constexpr, BK: tl.constexpr, DOCUMENTS: tl.constexpr
):
    """[C, BK] each: k; the tokens' decays to the chunk's end; the product of both, in the dtype of k."""
    sums = load_tile(b, start, T, H, K, first_key, C, BK)
    total = load_last_row(b, start, T, H, K, first_key, C, BK)
    keys = load_tile(k, start, T, H, K, first_key, C, BK)
    factors = decay(tl.where((tl.arange(0, C) < T - start)[:, None], total[None, :] - sums, 0.0))
    if DOCUMENTS:
        factors = tl.where((own == end)[:, None], factors, 0.0)
    return keys, factors, (keys.to(tl.float32) * factors).to(keys.dtype)


@jit
def _decay_grads(staying, leaving, own, C: tl.constexpr, DOCUMENTS: tl.constexpr, PARTS: tl.constexpr):
    """[C, BK], Σ_{i >= t} staying_i + Σ_{j < t} leaving_j. PARTS: see `sum_tokens`."""
    rows = tl.arange(0, C)
    earlier = rows[:, None] > rows[None, :]
    if DOCUMENTS:
        # not past a restart: terms of the next document add up to 0 only within its rounding
        later = (rows[:, None] <= rows[None, :]) & (own[:, None] == own[None, :])
        return sum_tokens(later, staying, PARTS) + sum_tokens(earlier, leaving, PARTS)
    # one product for both: tokens from t on are all tokens less those before t
    return tl.sum(staying, axis=0)[None, :] + sum_tokens(earlier, leaving - staying, PARTS)


@jit
def input_grads_kernel(
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    b,  # [B, T, H, K] fp32, sums of g inside chunks
    do,  # [B, T, H, V]
    doc_ids,  # [T] int32, read with DOCUMENTS
    scores,  # [N, B, H, C, C], read on and below the diagonal
    states,  # [N, B, H, K, V]: true states before the chunks
    state_grads,  # [N, B, H, K, V]: gradients after the chunks from their segment's end
    log_decays,  # [N, B, H, K] fp32: by which `end_grads` decays on its way to them
    end_grads,  # [J, B, H, K, V] fp32: true gradients at the segments' ends
    terms,  # [B, T, H, K] fp32: q ⊙ dq − k ⊙ dk with dk's part inside the chunk
    dk,  # [B, T, H, K]: that part on entry, complete on exit
    dv,  # [B, T, H, V], written
    dg,  # [B, T, H, K] fp32, written
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BH,
    segment_chunks,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
    FUSED: tl.constexpr,
):
    """One program computes the gradients of one chunk of one head.

    FUSED: dv is computed in the loop over V that computes dk, from the same dS. Only if K <= BK; else it is a sum over
    tiles of keys, and has its own loops.
    """
    chunk = tl.program_id(0)
    batch_head = tl.program_id(1)
    k += head_offset(batch_head, T, H, K)
    b += head_offset(batch_head, T, H, K)
    terms += head_offset(batch_head, T, H, K)
    dk += head_offset(batch_head, T, H, K)
    dg += head_offset(batch_head, T, H, K)
    v += head_offset(batch_head, T, H, V)
    do += head_offset(batch_head, T, H, V)
    dv += head_offset(batch_head, T, H, V)
    start = chunk * C
    rows = tl.arange(0, C)
    index = chunk.to(tl.int64) * BH + batch_head
    segment_index = (chunk // segment_chunks) * BH + batch_head
    own = rows
    before = 0
    end = 0
    if DOCUMENTS:
        own, before, end = load_doc_ids(doc_ids, start, T, C)
    pairs = scores + index * C * C + rows[:, None] * C + rows[None, :]
    # Above the diagonal the scores are mirrored (`scores_kernel`).
    weights = tl.trans(tl.load(pairs, mask=rows[:, None] >= rows[None, :], other=0.0))

    for first_key in range(0, K, BK):
        keys, factors, weighted = _leaving_keys(k, b, own, end, start, T, H, K, first_key, C, BK, DOCUMENTS)
        key_grads = tl.zeros([C, BK], tl.float32)
        boundary_term = tl.zeros([BK], tl.float32)
        for first_value in range(0, V, BV):
            grad = load_corrected(
                state_grads, log_decays, end_grads, index, segment_index, K, V, first_key, first_value, BK, BV
            )
            pointers, inside = state_pointers(states, index, K, V, first_key, first_value, BK, BV)
            boundary_term += tl.sum(tl.load(pointers, mask=inside, other=0.0).to(tl.float32) * grad, axis=1)
            operand = grad.to(keys.dtype)
            values = load_tile(v, start, T, H, V, first_value, C, BV)
            key_grads += tl.dot(values, tl.trans(operand), input_precision=PRECISION)
            if FUSED:
                output_grads = load_tile(do, start, T, H, V, first_value, C, BV)
                value_grads = tl.dot(weighted, operand, input_precision=PRECISION)
                value_grads += tl.dot(weights, output_grads, input_precision=PRECISION)
                store_tile(dv, value_grads, start, T, H, V, first_value, C, BV)

        boundary_term *= decay(load_last_row(b, start, T, H, K, first_key, C, BK))
        if DOCUMENTS:
            boundary_term = tl.where(before == end, boundary_term, 0.0)
        key_grads *= factors
        leaving = keys.to(tl.float32) * key_grads
        key_grads += load_tile(dk, start, T, H, K, first_key, C, BK).to(tl.float32)
        store_tile(dk, key_grads, start, T, H, K, first_key, C, BK)
        staying = load_tile(terms, start, T, H, K, first_key, C, BK)
        decay_grads = boundary_term[None, :] + _decay_grads(
            staying, leaving, own, C, DOCUMENTS, 2 if k.dtype.element_ty == tl.bfloat16 else 0
        )
        if DOCUMENTS:
            previous = tl.load(doc_ids + start + rows - 1, mask=(start + rows > 0) & (rows < T - start), other=0)
            decay_grads = tl.where((own == previous)[:, None], decay_grads, 0.0)
        store_tile(dg, decay_grads, start, T, H, K, first_key, C, BK)

    if not FUSED:
        for first_value in range(0, V, BV):
            output_grads = load_tile(do, start, T, H, V, first_value, C, BV)
            value_grads = tl.dot(weights, output_grads, input_precision=PRECISION)
            for first_key in range(0, K, BK):
                _, _, weighted = _leaving_keys(k, b, own, end, start, T, H, K, first_key, C, BK, DOCUMENTS)
                grad = load_corrected(
                    state_grads, log_decays, end_grads, index, segment_index, K, V, first_key, first_value, BK, BV
                )
                value_grads += tl.dot(weighted, grad.to(weighted.dtype), input_precision=PRECISION)
            store_tile(dv, value_grads, start, T, H, V, first_value, C, BV)
