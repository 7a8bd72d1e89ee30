"""All gradients of a chunk, once the true states before it and their gradients after it are known.

With N its new values and dv of the walks, E_ij = exp(b_i − b_j), S before and dS after the chunk:

    dP = scale · do Nᵀ  (j <= i)        dA = −dv Nᵀ  (j < i),  of A = Σ_K k_i ⊙ k_j ⊙ E_ij        dβ = Σ_V dv ⊙ N / β²
    dq  = scale · exp(b) ⊙ do Sᵀ + Σ_j dP_ij k_j ⊙ E_ij
    row = −exp(b) ⊙ dv Sᵀ + Σ_j dA_ij k_j ⊙ E_ij
    col = exp(b_end − b) ⊙ N dSᵀ + Σ_i (dP_ij q_i + dA_ij k_i) ⊙ E_ij
    dk  = row + col
    dg_t = Σ_{i >= t} (q ⊙ dq + k ⊙ row − k ⊙ col) + Σ_V S' ⊙ dS

N_i is β_i times what the token's value differs from the state's, r_i, and dv_i is β_i times the gradient of β_i r_i: so
their product is β² times dβ. S' is the state after the chunk: Σ_V S' ⊙ dS = exp(b_end) Σ_V S ⊙ dS + Σ_i k ⊙ (the part
of col from dS), which is 0 for tokens before a restart. A pair of tokens enters dg's sum twice, with both signs, from
the same rounded factors.

With decays by channel: `zeco_train.ops.delta.kernels.channel_grads`. Sums over V of two tiles' products are diagonals
of products, too: Triton 3.6 and 3.7 have one buffer too few for a tile that a loop reads both in products and in
registers, so that the next copy overwrites what a product still reads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.kernels import jit
from zeco_train.ops.delta.kernels.systems import border_decays, load_decays, load_strengths
from zeco_train.ops.gla.kernels.tiles import (
    decay,
    head_offset,
    laid_out_like,
    load_doc_ids,
    load_tile,
    round_to_bf16,
    state_pointers,
    store_tile,
)
from zeco_train.ops.scalar_decay.kernels.decays import key_head_offset

INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@jit
def round_to_tokens(x, dtype: tl.constexpr, HERE: tl.constexpr = False):
    """x, fp32, in the dtype of the tokens; HERE: not wherever the compiler would, which keeps all that x is made of."""
    if INTERPRETED:
        rounded = x.to(dtype)
    elif dtype == tl.bfloat16 and HERE:
        rounded = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=False, pack=2
        )
    elif dtype == tl.bfloat16:
        rounded = round_to_bf16(x)
    else:
        rounded = x
    return rounded


@jit
def load_transposed(states, index, K, V, first_key, first_value, BK: tl.constexpr, BV: tl.constexpr):
    """[BV, BK] of state number `index` in [.., V, K]."""
    pointers, inside = state_pointers(states, index, V, K, first_value, first_key, BV, BK)
    return tl.load(pointers, mask=inside, other=0.0)


@jit
def mask_pairs(
    score_grads, pair_grads, beta, dbeta, doc_ids, batch_head, tile, start, scale, T, H, C: tl.constexpr,
    DOCUMENTS: tl.constexpr, TOKENS: tl.constexpr, sums=None,
):  # fmt: skip
    """From do Nᵀ and dv Nᵀ: dP without its diagonal, that, [C], and dA. Tile 0 writes dβ.

    With `sums` of decays, [C, 1], dP and dA by the decays between both tokens, in the dtype of the tokens.
    """
    rows = tl.arange(0, C)
    is_self = rows[:, None] == rows[None, :]
    if tile == 0:
        strengths = load_strengths(beta + head_offset(batch_head, T, H, 1), start, T, H, C, TOKENS)
        strength_grads = tl.sum(tl.where(is_self, pair_grads, 0.0), axis=1) / strengths / strengths
        by_head = head_offset(batch_head, T, H, 1) + (start + rows).to(tl.int64) * H
        tl.store(dbeta + by_head, strength_grads, mask=rows < T - start)
    visible = rows[:, None] >= rows[None, :]
    if DOCUMENTS:
        own, _, _ = load_doc_ids(doc_ids, start, T, C)
        visible = visible & (own[:, None] == own[None, :])
    score_grads = tl.where(visible, score_grads * scale, 0.0)
    # each token with itself: its terms of dg cancel
    self = tl.sum(tl.where(is_self, score_grads, 0.0), axis=1)
    score_grads = tl.where(is_self, 0.0, score_grads)
    pair_grads = tl.where(visible & (rows[:, None] > rows[None, :]), -pair_grads, 0.0)
    if sums is not None:
        between = decay(tl.where(visible, sums - tl.trans(sums), float("-inf")))
        score_grads = round_to_tokens(score_grads * between, TOKENS, True)
        pair_grads = round_to_tokens(pair_grads * between, TOKENS, True)
    return score_grads, self, pair_grads


@jit
def later_tokens(doc_ids, start, T, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    """[C, C], the tokens that each one's dg is a sum over; [C], whether it goes on past the chunk; where dg is not 0.

    Not past a restart: terms of the next document add up to 0 only within its rounding.
    """
    rows = tl.arange(0, C)
    later = rows[:, None] <= rows[None, :]
    stays = rows < T - start
    goes_on = stays
    if DOCUMENTS:
        own, _, end = load_doc_ids(doc_ids, start, T, C)
        later = later & (own[:, None] == own[None, :])
        goes_on = own == end
        stays = own == tl.load(doc_ids + start + rows - 1, mask=stays & (start + rows > 0), other=0)
    return later, goes_on, stays


@jit
def grads_kernel(
    q,  # [B, T, G, K]
    k,  # [B, T, G, K]
    sums,  # [B, H, T] fp32, of `decay_sums_kernel`
    beta,  # [B, T, H] fp32
    do,  # [B, T, H, V]
    doc_ids,  # [T] int32, read with DOCUMENTS
    states,  # [N, B, H, V, K]: S before the chunks, transposed
    grads,  # [N, B, H, V, K]: dS after the chunks, transposed
    added,  # [B, T, H, V]: N
    dv,  # [B, T, H, V]
    dq,  # [B, T, H / HEADS, K], written
    dk,  # [B, T, H / HEADS, K], written
    dg,  # [K / BK, B, T, H] fp32, sums over these channels; written with GATED
    dbeta,  # [B, T, H] fp32, written
    scale,
    T,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BH,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HEADS: tl.constexpr,
    GATED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program serves BK channels of the keys of one chunk, of HEADS heads that share them, one after the other."""
    key_tiles: tl.constexpr = (K + BK - 1) // BK
    chunk = tl.program_id(0) // key_tiles
    tile = tl.program_id(0) % key_tiles
    start, first_key = chunk * C, tile * BK
    of_group = key_head_offset(tl.program_id(1) * HEADS, T, H, G, K)
    dq += head_offset(tl.program_id(1), T, H // HEADS, K)
    dk += head_offset(tl.program_id(1), T, H // HEADS, K)
    rows = tl.arange(0, C)
    DTYPE: tl.constexpr = k.dtype.element_ty
    for number in tl.range(HEADS, disable_licm=True):
        batch_head = tl.program_id(1) * HEADS + number
        index = chunk.to(tl.int64) * BH + batch_head
        of_head = head_offset(batch_head, T, H, V)
        score_grads = tl.zeros([C, C], tl.float32)
        pair_grads = tl.zeros([C, C], tl.float32)
        own, total = load_decays(sums, batch_head, start, T, C)
        from_start, to_end, survives = border_decays(own, total, doc_ids, start, T, C, DOCUMENTS)
        query_grads = tl.zeros([C, BK], tl.float32)
        row_grads = tl.zeros([C, BK], tl.float32)
        column_grads = tl.zeros([C, BK], tl.float32)
        products = tl.zeros([BV, BV], tl.float32)  # Σ S ⊙ dS on the diagonal
        end = V
        if V <= BV:  # always V, and yet a loop: unrolled, it takes 255 registers, and ptxas 12.8 has addresses wrong
            end = tl.where(start < T, V, start)
        for first_value in tl.range(0, end, BV, disable_licm=True):
            new = load_tile(added + of_head, start, T, H, V, first_value, C, BV)
            value_grads = load_tile(dv + of_head, start, T, H, V, first_value, C, BV)
            output_grads = load_tile(do + of_head, start, T, H, V, first_value, C, BV)
            state = load_transposed(states, index, K, V, first_key, first_value, BK, BV)
            grad = load_transposed(grads, index, K, V, first_key, first_value, BK, BV)
            score_grads = tl.dot(output_grads, tl.trans(new), score_grads, input_precision=PRECISION)
            pair_grads = tl.dot(value_grads, tl.trans(new), pair_grads, input_precision=PRECISION)
            query_grads = tl.dot(output_grads, state, query_grads, input_precision=PRECISION)
            row_grads = tl.dot(value_grads, state, row_grads, input_precision=PRECISION)
            column_grads = tl.dot(new, grad, column_grads, input_precision=PRECISION)
            if GATED:
                products = tl.dot(state, tl.trans(grad), products, input_precision=PRECISION)
        scores, self, pairs = mask_pairs(
            score_grads, pair_grads, beta, dbeta, doc_ids, batch_head, tile, start, scale, T, H, C, DOCUMENTS, DTYPE,
            own,
        )  # fmt: skip
        if GATED:
            values = tl.arange(0, BV)
            products = tl.where(values[:, None] == values[None, :], products, 0.0)
            boundary_term = tl.sum(products) * tl.sum(survives)
        known = tl.where(number > 0, T, 0)
        if HEADS > 1:
            # all threads' stores of the head before
            tl.debug_barrier()
        keys = load_tile(k + of_group, start, T, G, K, first_key, C, BK)
        queries = load_tile(q + of_group, start, T, G, K, first_key, C, BK)
        own_keys = laid_out_like(keys, query_grads)
        own_queries = laid_out_like(queries, query_grads)
        query_grads *= from_start * scale
        query_grads = tl.dot(scores, keys, query_grads, input_precision=PRECISION)
        terms = tl.sum(own_queries.to(tl.float32) * query_grads, axis=1)
        query_grads += self[:, None] * own_keys.to(tl.float32)
        if HEADS > 1:
            query_grads += load_tile(dq, start, known, H // HEADS, K, first_key, C, BK).to(tl.float32)
        store_tile(dq, query_grads, start, T, H // HEADS, K, first_key, C, BK)
        row_grads *= -from_start
        row_grads = tl.dot(pairs, keys, row_grads, input_precision=PRECISION)
        column_grads *= to_end
        if GATED:
            boundary_term += tl.sum(own_keys.to(tl.float32) * column_grads)
        if start < T:  # always: see `_split_product` of the scalar decays
            column_grads = tl.dot(tl.trans(scores), queries, column_grads, input_precision=PRECISION)
        column_grads = tl.dot(tl.trans(pairs), keys, column_grads, input_precision=PRECISION)
        terms += tl.sum(own_keys.to(tl.float32) * (row_grads - column_grads), axis=1)
        row_grads += column_grads + self[:, None] * own_queries.to(tl.float32)
        if HEADS > 1:
            row_grads += load_tile(dk, start, known, H // HEADS, K, first_key, C, BK).to(tl.float32)
        store_tile(dk, row_grads, start, T, H // HEADS, K, first_key, C, BK)
        if GATED:
            later, goes_on, stays = later_tokens(doc_ids, start, T, C, DOCUMENTS)
            decay_grads = tl.sum(tl.where(later, terms[None, :], 0.0), axis=1) + tl.where(goes_on, boundary_term, 0.0)
            by_head = (tile * (BH // H)).to(tl.int64) * T * H + head_offset(batch_head, T, H, 1)
            by_head += (start + rows).to(tl.int64) * H
            tl.store(dg + by_head, tl.where(stays, decay_grads, 0.0), mask=rows < T - start)
