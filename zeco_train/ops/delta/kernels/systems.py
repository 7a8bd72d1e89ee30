"""The token pairs of a chunk: scores P, and F = (I + L)⁻¹ Diag(β) of its triangular system.

    P_ij = scale · Σ_K q_i ⊙ k_j ⊙ exp(b_i − b_j)  for i >= j
    L_ij = β_i · Σ_K k_i ⊙ k_j ⊙ exp(b_i − b_j)    for i > j

Pairs are grouped by sizes of blocks, 1, 2, … 32 tokens, as in `ops.gla.kernels.intra`: with decays by channel
where a chunk is not mild, and always for the inverse. Those of the blocks of a size give those of twice the size:

    | A     |⁻¹   | A⁻¹             |
    | E   B |   = | −B⁻¹ E A⁻¹  B⁻¹ |        T ← T − T L T  for the pairs that the size splits

It is exact substitution by blocks, in products of the whole chunk; powers of L, which may be large where T is not, do
not occur. No number of L or T exceeds 2, since no transition expands: for bf16 tokens the products are of fp16 numbers,
as exact as tf32, times 2^10, so that rows of small β do not underflow.

Decays of a chunk's tokens, of each channel or one a head, as tiles that broadcast alike.
"""

from __future__ import annotations

import triton.language as tl

from zeco_train.kernels import jit
from zeco_train.ops.gla.kernels.tiles import (
    are_mild,
    decay,
    from_middle,
    head_offset,
    laid_out_like,
    load_doc_ids,
    load_last_row,
    load_tile,
    split_decays,
    split_pairs,
    store_tile,
    sum_tokens,
)
from zeco_train.ops.scalar_decay.kernels.decays import LEAST, key_head_offset


@jit
def channel_sums_kernel(
    g,  # [B, T, H, K] fp32, log-decays
    sums,  # [B, T, H, K] fp32, written: their sums inside chunks, each through the token itself
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One program sums one chunk of one head. PARTS: see `sum_tokens`."""
    start = tl.program_id(0) * C
    batch_head = tl.program_id(1)
    g += head_offset(batch_head, T, H, K)
    sums += head_offset(batch_head, T, H, K)
    rows = tl.arange(0, C)
    for first_key in range(0, K, BK):
        own = tl.maximum(load_tile(g, start, T, H, K, first_key, C, BK), LEAST)
        store_tile(sums, sum_tokens(rows[:, None] >= rows[None, :], own, PARTS), start, T, H, K, first_key, C, BK)


@jit
def load_decays(
    sums, batch_head, start, T, H, K, first_key, C: tl.constexpr, BK: tl.constexpr, BY_CHANNEL: tl.constexpr
):
    """Log-decays from the chunk's start through each token, [C, BK] or C × 1, and through its last, [1, BK] or 1 × 1.

    sums: [B, T, H, K], of `channel_sums_kernel`; or [B, H, T], of `decay_sums_kernel`.
    """
    if BY_CHANNEL:
        own = sums + head_offset(batch_head, T, H, K)
        through = load_tile(own, start, T, H, K, first_key, C, BK)
        total = load_last_row(own, start, T, H, K, first_key, C, BK)[None, :]
    else:
        own = sums + batch_head.to(tl.int64) * T + start
        last = tl.minimum(C, T - start) - 1
        through = tl.load(own + tl.minimum(tl.arange(0, C), last))[:, None]
        total = tl.load(own + last + tl.zeros([1, 1], tl.int32))
    return through, total


@jit
def border_decays(sums, total, doc_ids, start, T, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Of `load_decays`: decays from the chunk's start through each token, after each to its end, and over all of it.

    They are 0 across a restart.
    """
    from_start = decay(sums)
    to_end = decay(total - sums)
    survives = decay(total)
    if DOCUMENTS:
        own, before, end = load_doc_ids(doc_ids, start, T, C)
        from_start = tl.where((own == before)[:, None], from_start, 0.0)
        to_end = tl.where((own == end)[:, None], to_end, 0.0)
        survives = tl.where(before == end, survives, 0.0)
    return from_start, to_end, survives


# Of what fp16 numbers hold in products for the inverse.
_UNIT: tl.constexpr = tl.constexpr(2.0**10)


@jit
def load_strengths(beta, start, T, H, C: tl.constexpr, TOKENS: tl.constexpr):
    """[C], β of a chunk's tokens, of dtype TOKENS, but never 0: what it multiplies is divided by it again.

    What counts as the least is a change of less than rounding; for bf16 it is one that fp16 holds, see `_UNIT`.
    """
    rows = tl.arange(0, C)
    least: tl.constexpr = 2.0**-40 if tl.float32 == TOKENS else 2.0**-24
    strengths = tl.load(beta + (start + rows).to(tl.int64) * H, mask=rows < T - start, other=0.0)
    return tl.maximum(strengths, least, propagate_nan=tl.PropagateNan.ALL)


@jit
def _inverse(system, C: tl.constexpr, PRECISION: tl.constexpr, SOLVING: tl.constexpr):
    """(I + system)⁻¹ of a strictly lower triangular [C, C], fp32; products of numbers in SOLVING."""
    rows = tl.arange(0, C)
    system *= _UNIT
    inverse = tl.where(rows[:, None] == rows[None, :], _UNIT, tl.where(split_pairs(0, C), -system, 0.0))
    system = system.to(SOLVING)
    # log₂ C sizes of blocks; those of one token are done
    for shift in tl.static_range(1, 6):
        known = inverse.to(SOLVING)
        between = tl.dot(known, system, input_precision=PRECISION) * (1.0 / _UNIT)
        between = tl.dot(between.to(SOLVING), known, input_precision=PRECISION) * (1.0 / _UNIT)
        inverse -= tl.where(split_pairs(shift, C), between, 0.0)
    return inverse * (1.0 / _UNIT)


@jit
def systems_kernel(
    q,  # [B, T, G, K]
    k,  # [B, T, G, K]
    sums,  # see `load_decays`
    beta,  # [B, T, H] fp32
    doc_ids,  # [T] int32, read with DOCUMENTS
    scores,  # [N, B, H, C, C], written: P, 0 above the diagonal
    inverses,  # [N, B, H, C, C], written: F
    scale,
    T,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    BH,
    C: tl.constexpr,
    BK: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVING: tl.constexpr,
    ONE_LAYOUT: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program serves one chunk of one head.

    SOLVING: dtype of the inverse's products. ONE_LAYOUT: BK is C. KEYS: see `are_mild`.
    """
    chunk = tl.program_id(0)
    batch_head = tl.program_id(1)
    q += key_head_offset(batch_head, T, H, G, K)
    k += key_head_offset(batch_head, T, H, G, K)
    beta += head_offset(batch_head, T, H, 1)
    start = chunk * C
    rows = tl.arange(0, C)
    pair_scores = tl.zeros([C, C], tl.float32)
    products = tl.zeros([C, C], tl.float32)
    for first_key in range(0, K, BK):
        queries = load_tile(q, start, T, G, K, first_key, C, BK)
        keys = load_tile(k, start, T, G, K, first_key, C, BK)
        if BY_CHANNEL:
            own_sums = sums + head_offset(batch_head, T, H, K)
            own = load_tile(own_sums, start, T, H, K, first_key, C, BK)
            self = tl.sum(queries.to(tl.float32) * keys.to(tl.float32), axis=1)[:, None]
            pair_scores = tl.where(rows[:, None] == rows[None, :], pair_scores + self, pair_scores)
            if ONE_LAYOUT:
                own = laid_out_like(own, products)
                queries = laid_out_like(queries, products)
                keys = laid_out_like(keys, products)
            if are_mild(own_sums, chunk, T, H, K, C, 1, KEYS):
                distances = from_middle(own_sums, own, start, T, H, K, first_key, C, BK)
                factors = decay(distances)
                turned_keys = (keys.to(tl.float32) * decay(-distances)).to(keys.dtype)
                decayed_keys = (keys.to(tl.float32) * factors).to(keys.dtype)
                decayed_queries = (queries.to(tl.float32) * factors).to(keys.dtype)
                of_queries = tl.dot(decayed_queries, tl.trans(turned_keys), input_precision=PRECISION)
                of_keys = tl.dot(decayed_keys, tl.trans(turned_keys), input_precision=PRECISION)
                earlier = rows[:, None] > rows[None, :]
                pair_scores = tl.where(earlier, pair_scores + of_queries, pair_scores)
                products = tl.where(earlier, products + of_keys, products)
            else:
                for shift in range(6):
                    is_later, factors = split_decays(own_sums, own, shift, start, T, H, K, first_key, C, BK)
                    decayed_keys = (keys.to(tl.float32) * factors).to(keys.dtype)
                    decayed_queries = (queries.to(tl.float32) * factors).to(keys.dtype)
                    split = split_pairs(shift, C) & is_later[:, None]
                    of_queries = tl.dot(decayed_queries, tl.trans(decayed_keys), input_precision=PRECISION)
                    of_keys = tl.dot(decayed_keys, tl.trans(decayed_keys), input_precision=PRECISION)
                    pair_scores = tl.where(split, pair_scores + of_queries, pair_scores)
                    products = tl.where(split, products + of_keys, products)
        else:
            pair_scores = tl.dot(queries, tl.trans(keys), pair_scores, input_precision=PRECISION)
            products = tl.dot(keys, tl.trans(keys), products, input_precision=PRECISION)
    visible = rows[:, None] >= rows[None, :]
    if DOCUMENTS:
        doc_ids_of, _, _ = load_doc_ids(doc_ids, start, T, C)
        visible = visible & (doc_ids_of[:, None] == doc_ids_of[None, :])
    if not BY_CHANNEL:
        own, _ = load_decays(sums, batch_head, start, T, H, K, 0, C, BK, BY_CHANNEL)
        between = decay(tl.where(visible, own - tl.trans(own), float("-inf")))
        pair_scores *= between
        products *= between
    pair_scores = tl.where(visible, pair_scores * scale, 0.0)
    strengths = load_strengths(beta, start, T, H, C, k.dtype.element_ty)
    earlier = visible & (rows[:, None] > rows[None, :])
    system = tl.where(earlier, products * strengths[:, None], 0.0)
    offsets = (chunk.to(tl.int64) * BH + batch_head) * C * C + rows[:, None] * C + rows[None, :]
    tl.store(scores + offsets, pair_scores.to(scores.dtype.element_ty))
    inverse = _inverse(system, C, PRECISION, SOLVING) * strengths[None, :]
    tl.store(inverses + offsets, inverse.to(inverses.dtype.element_ty))


@jit
def operands_kernel(
    q,  # [B, T, G, K]
    k,  # [B, T, G, K]
    sums,  # [B, T, H, K] fp32, of `channel_sums_kernel`
    doc_ids,  # [T] int32, read with DOCUMENTS
    start_keys,  # [B, T, H, K], written: k̄
    end_keys,  # [B, T, H, K], written: k̃
    queries,  # [B, T, H, K], written: scale · q̄
    survival,  # [N, B, H, K] fp32, written: decays of a state over the chunks
    scale,
    T,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    BH,
    C: tl.constexpr,
    BK: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """The operands of the walks with decays by channel, of one chunk of one head a program."""
    chunk = tl.program_id(0)
    batch_head = tl.program_id(1)
    q += key_head_offset(batch_head, T, H, G, K)
    k += key_head_offset(batch_head, T, H, G, K)
    own = head_offset(batch_head, T, H, K)
    start = chunk * C
    for first_key in range(0, K, BK):
        through, total = load_decays(sums, batch_head, start, T, H, K, first_key, C, BK, True)
        from_start, to_end, survives = border_decays(through, total, doc_ids, start, T, C, DOCUMENTS)
        keys = load_tile(k, start, T, G, K, first_key, C, BK).to(tl.float32)
        seen = load_tile(q, start, T, G, K, first_key, C, BK).to(tl.float32) * from_start * scale
        store_tile(start_keys + own, keys * from_start, start, T, H, K, first_key, C, BK)
        store_tile(end_keys + own, keys * to_end, start, T, H, K, first_key, C, BK)
        store_tile(queries + own, seen, start, T, H, K, first_key, C, BK)
        columns = first_key + tl.arange(0, BK)
        pointers = survival + (chunk.to(tl.int64) * BH + batch_head) * K + columns[None, :]
        tl.store(pointers, survives, mask=(columns < K)[None, :])
