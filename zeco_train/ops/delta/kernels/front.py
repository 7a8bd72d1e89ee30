"""Experiment: decays' sums, operands of the walks and systems of mild chunks in one kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.ops.delta.kernels.grads import _round
from zeco_train.ops.delta.kernels.systems import _inverse, load_strengths
from zeco_train.ops.gla.kernels.tiles import (
    LARGEST_EXPONENT,
    decay,
    head_offset,
    laid_out_like,
    load_doc_ids,
    load_tile,
    store_tile,
    sum_tokens,
)
from zeco_train.ops.scalar_decay.kernels.decays import LEAST, key_head_offset


@triton.jit
def front_kernel(
    q, k, g, beta, doc_ids, sums, start_keys, end_keys, queries, survival, scores, inverses, scale, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, BH,
    C: tl.constexpr, BK: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, SOLVING: tl.constexpr,
    PARTS: tl.constexpr, ONE_LAYOUT: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    batch_head = tl.program_id(1)
    q += key_head_offset(batch_head, T, H, G, K)
    k += key_head_offset(batch_head, T, H, G, K)
    of_head = head_offset(batch_head, T, H, K)
    beta += head_offset(batch_head, T, H, 1)
    start = chunk * C
    rows = tl.arange(0, C)
    DTYPE: tl.constexpr = k.dtype.element_ty
    visible = rows[:, None] >= rows[None, :]
    sees_start = tl.full([C, 1], 1.0, tl.float32)
    sees_end = sees_start
    is_whole = True
    if DOCUMENTS:
        doc_ids_of, before, end = load_doc_ids(doc_ids, start, T, C)
        visible = visible & (doc_ids_of[:, None] == doc_ids_of[None, :])
        sees_start = tl.where(doc_ids_of == before, 1.0, 0.0)[:, None]
        sees_end = tl.where(doc_ids_of == end, 1.0, 0.0)[:, None]
        is_whole = before == end
    pair_scores = tl.zeros([C, C], tl.float32)
    products = tl.zeros([C, C], tl.float32)
    self = tl.zeros([C], tl.float32)
    farthest = 0.0
    for first_key in range(0, K, BK):
        own = tl.maximum(load_tile(g + of_head, start, T, H, K, first_key, C, BK), LEAST)
        own = sum_tokens(rows[:, None] >= rows[None, :], own, PARTS)
        store_tile(sums + of_head, own, start, T, H, K, first_key, C, BK)
        middle = tl.sum(tl.where((rows == C // 2)[:, None], own, 0.0), axis=0)[None, :]
        total = tl.sum(tl.where((rows == C - 1)[:, None], own, 0.0), axis=0)[None, :]
        query = load_tile(q, start, T, G, K, first_key, C, BK)
        key = load_tile(k, start, T, G, K, first_key, C, BK)
        if ONE_LAYOUT:
            query = laid_out_like(query, own)
            key = laid_out_like(key, own)
        wide_query = query.to(tl.float32)
        wide_key = key.to(tl.float32)
        self += tl.sum(wide_query * wide_key, axis=1)
        from_start = decay(own) * sees_start
        store_tile(start_keys + of_head, wide_key * from_start, start, T, H, K, first_key, C, BK)
        store_tile(queries + of_head, wide_query * from_start * scale, start, T, H, K, first_key, C, BK)
        store_tile(end_keys + of_head, wide_key * (decay(total - own) * sees_end), start, T, H, K, first_key, C, BK)
        columns = first_key + tl.arange(0, BK)
        pointers = survival + (chunk.to(tl.int64) * BH + batch_head) * K + columns[None, :]
        tl.store(pointers, tl.where(is_whole, decay(total), 0.0), mask=(columns < K)[None, :])
        distances = own - middle
        farthest = tl.maximum(farthest, tl.max(tl.abs(distances)))
        factors = decay(distances)
        turned_keys = (wide_key * decay(-distances)).to(DTYPE)
        pair_scores = tl.dot((wide_query * factors).to(DTYPE), tl.trans(turned_keys), pair_scores, input_precision=PRECISION)
        products = tl.dot((wide_key * factors).to(DTYPE), tl.trans(turned_keys), products, input_precision=PRECISION)
    if farthest <= LARGEST_EXPONENT:
        is_self = rows[:, None] == rows[None, :]
        pair_scores = tl.where(is_self, self[:, None], pair_scores)
        pair_scores = tl.where(visible, pair_scores * scale, 0.0)
        strengths = load_strengths(beta, start, T, H, C, DTYPE)
        system = tl.where(visible & (rows[:, None] > rows[None, :]), products * strengths[:, None], 0.0)
        offsets = (chunk.to(tl.int64) * BH + batch_head) * C * C + rows[:, None] * C + rows[None, :]
        tl.store(scores + offsets, pair_scores.to(scores.dtype.element_ty))
        inverse = _inverse(system, C, PRECISION, SOLVING) * strengths[None, :]
        tl.store(inverses + offsets, inverse.to(inverses.dtype.element_ty))
