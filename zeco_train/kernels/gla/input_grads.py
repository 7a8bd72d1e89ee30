"""dk and dg, once the gradient of the state after each chunk is known.

    dk_j = (the part inside the chunk) + exp(b_end − b_j) ⊙ dS v_j
    dg_t = Σ_{i >= t} (q_i ⊙ dq_i − k_i ⊙ (dk_i of inside)) + Σ_{j < t} k_j ⊙ (dk_j beyond) + Σ_V exp(b_end) S ⊙ dS

Sums over the chunk's tokens; S: true state before the chunk, dS: gradient with respect to that after it. The parts are
what passes token t on its way to a query of this chunk, from a key of this chunk to a later one, and from before the
chunk to after it. That of a rank's last chunk holds the boundary term of DESIGN, section 3: the usual form, which is
Σ_V S_end ⊙ dS less the k ⊙ dk of tokens from t on, is the same number, but as a difference of larger ones.
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
    state_pointers,
    store_tile,
    sum_tokens,
)


@triton.jit
def input_grads_kernel(
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    b,  # [B, T, H, K] fp32, sums of g inside chunks
    pieces,  # [T] int32, read with DOCUMENTS
    states,  # [N, B, H, K, V]: true states before the chunks
    state_grads,  # [N, B, H, K, V]: gradients after the chunks from their segment's end
    log_decays,  # [N, B, H, K] fp32: by which `end_grads` decays on its way to them
    end_grads,  # [J, B, H, K, V] fp32: true gradients at the segments' ends
    terms,  # [B, T, H, K] fp32: q ⊙ dq − k ⊙ dk with the dk of inside the chunk
    dk,  # [B, T, H, K]: the part of inside the chunk; becomes all of it
    dg,  # [B, T, H, K] fp32, written
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
    """One program makes [C, BK] of one chunk of one head."""
    key_tiles = tl.cdiv(K, BK)
    chunk = tl.program_id(0) // key_tiles
    first_key = (tl.program_id(0) % key_tiles) * BK
    batch_head = tl.program_id(1)
    k += head_offset(batch_head, T, H, K)
    b += head_offset(batch_head, T, H, K)
    terms += head_offset(batch_head, T, H, K)
    dk += head_offset(batch_head, T, H, K)
    dg += head_offset(batch_head, T, H, K)
    v += head_offset(batch_head, T, H, V)
    start = chunk * C
    rows = tl.arange(0, C)
    index = chunk.to(tl.int64) * BH + batch_head
    segment_index = (chunk // segment_chunks) * BH + batch_head

    key_grads = tl.zeros([C, BK], tl.float32)
    passing = tl.zeros([BK], tl.float32)
    for first_value in range(0, V, BV):
        grad = load_corrected(
            state_grads, log_decays, end_grads, index, segment_index, K, V, first_key, first_value, BK, BV
        )
        pointers, inside = state_pointers(states, index, K, V, first_key, first_value, BK, BV)
        passing += tl.sum(tl.load(pointers, mask=inside, other=0.0).to(tl.float32) * grad, axis=1)
        values = load_tile(v, start, T, H, V, first_value, C, BV)
        key_grads += tl.dot(values, tl.trans(grad.to(values.dtype)), input_precision=PRECISION)

    sums = load_tile(b, start, T, H, K, first_key, C, BK)
    total = load_last_row(b, start, T, H, K, first_key, C, BK)
    factors = decay(tl.where((rows < T - start)[:, None], total[None, :] - sums, 0.0))
    passing *= decay(total)
    if DOCUMENTS:
        own, before, end = load_pieces(pieces, start, T, C)
        factors = tl.where((own == end)[:, None], factors, 0.0)
        passing = tl.where(before == end, passing, 0.0)
    key_grads *= factors
    keys = load_tile(k, start, T, H, K, first_key, C, BK).to(tl.float32)
    leaving = keys * key_grads
    key_grads += load_tile(dk, start, T, H, K, first_key, C, BK).to(tl.float32)
    store_tile(dk, key_grads, start, T, H, K, first_key, C, BK)

    staying = load_tile(terms, start, T, H, K, first_key, C, BK)
    later = rows[:, None] <= rows[None, :]
    if DOCUMENTS:
        # not past a restart: what comes from behind one adds up to 0 only within the rounding of another document
        later = later & (own[:, None] == own[None, :])
    earlier = rows[:, None] > rows[None, :]
    decay_grads = passing[None, :] + sum_tokens(later, staying, k.dtype.element_ty == tl.bfloat16)
    decay_grads += sum_tokens(earlier, leaving, k.dtype.element_ty == tl.bfloat16)
    if DOCUMENTS:
        previous = tl.load(pieces + start + rows - 1, mask=(start + rows > 0) & (rows < T - start), other=0)
        decay_grads = tl.where((own == previous)[:, None], decay_grads, 0.0)
    store_tile(dg, decay_grads, start, T, H, K, first_key, C, BK)
