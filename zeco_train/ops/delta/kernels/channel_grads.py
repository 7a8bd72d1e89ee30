"""Experiment: gradients of one mild chunk with decays by channel, one reference for all factors."""

from __future__ import annotations

import triton.language as tl

from zeco_train.kernels import jit
from zeco_train.ops.delta.kernels.grads import _round
from zeco_train.ops.delta.kernels.systems import load_strengths
from zeco_train.ops.gla.kernels.tiles import (
    are_mild,
    decay,
    head_offset,
    laid_out_like,
    load_doc_ids,
    load_last_row,
    load_tile,
    state_pointers,
    store_tile,
)
from zeco_train.ops.scalar_decay.kernels.decays import key_head_offset


@jit
def _load_state(states, index, K, V, first_key, first_value, BK: tl.constexpr, BV: tl.constexpr):
    pointers, inside = state_pointers(states, index, V, K, first_value, first_key, BV, BK)
    return tl.load(pointers, mask=inside, other=0.0)


@jit
def _load_middle(b, start, T, H, K, first_key, C: tl.constexpr, BK: tl.constexpr):
    columns = first_key + tl.arange(0, BK)
    middle = tl.minimum(start + C // 2, T) - 1
    return tl.load(b + middle.to(tl.int64) * H * K + columns, mask=columns < K, other=0.0)[None, :]


@jit
def channel_grads_kernel(
    q, k, sums, beta, do, doc_ids, states, grads, added, dv, dq, dk, dg, dbeta, scale, T, B,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BH,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KEYS: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, LOOPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    key_tiles: tl.constexpr = (K + BK - 1) // BK
    chunk = tl.program_id(0) // key_tiles
    tile = tl.program_id(0) % key_tiles
    first_key = tile * BK
    start = chunk * C
    batch_head = tl.program_id(1)
    index = chunk.to(tl.int64) * BH + batch_head
    rows = tl.arange(0, C)
    is_token = rows < T - start
    is_self = rows[:, None] == rows[None, :]
    DTYPE: tl.constexpr = k.dtype.element_ty
    q += key_head_offset(batch_head, T, H, G, K)
    k += key_head_offset(batch_head, T, H, G, K)
    sums += head_offset(batch_head, T, H, K)
    dq += head_offset(batch_head, T, H, K)
    dk += head_offset(batch_head, T, H, K)
    dg += head_offset(batch_head, T, H, K)
    do += head_offset(batch_head, T, H, V)
    dv += head_offset(batch_head, T, H, V)
    added += head_offset(batch_head, T, H, V)
    by_head = head_offset(batch_head, T, H, 1) + (start + rows).to(tl.int64) * H
    if are_mild(sums, chunk, T, H, K, C, 1, KEYS):
        score_grads = tl.zeros([C, C], tl.float32)
        pair_grads = tl.zeros([C, C], tl.float32)
        query_grads = tl.zeros([C, BK], tl.float32)
        row_grads = tl.zeros([C, BK], tl.float32)
        column_grads = tl.zeros([C, BK], tl.float32)
        boundary_term = tl.zeros([BK, BK], tl.float32)
        for first_value in tl.range(0, V, BV, disable_licm=True):
            new = load_tile(added, start, T, H, V, first_value, C, BV)
            value_grads = load_tile(dv, start, T, H, V, first_value, C, BV)
            output_grads = load_tile(do, start, T, H, V, first_value, C, BV)
            score_grads = tl.dot(output_grads, tl.trans(new), score_grads, input_precision=PRECISION)
            pair_grads = tl.dot(value_grads, tl.trans(new), pair_grads, input_precision=PRECISION)
            if LOOPS < 3:
                state = _load_state(states, index, K, V, first_key, first_value, BK, BV)
                query_grads = tl.dot(output_grads, state, query_grads, input_precision=PRECISION)
            if LOOPS == 1:
                grad = _load_state(grads, index, K, V, first_key, first_value, BK, BV)
                boundary_term = tl.dot(tl.trans(state), grad, boundary_term, input_precision=PRECISION)
                row_grads = tl.dot(value_grads, state, row_grads, input_precision=PRECISION)
                column_grads = tl.dot(new, grad, column_grads, input_precision=PRECISION)
        if tile == 0:
            strengths = load_strengths(beta + head_offset(batch_head, T, H, 1), start, T, H, C, DTYPE)
            strength_grads = tl.sum(tl.where(is_self, pair_grads, 0.0), axis=1) / strengths / strengths
            tl.store(dbeta + by_head, strength_grads, mask=is_token)
        visible = rows[:, None] >= rows[None, :]
        sees_start = tl.where(is_token, 1.0, 0.0)[:, None]
        sees_end = sees_start
        if DOCUMENTS:
            doc_ids_of, before, end = load_doc_ids(doc_ids, start, T, C)
            same = doc_ids_of[:, None] == doc_ids_of[None, :]
            visible = visible & same
            sees_start = tl.where(doc_ids_of == before, 1.0, 0.0)[:, None]
            sees_end = tl.where(doc_ids_of == end, 1.0, 0.0)[:, None]
        score_grads = tl.where(visible, score_grads * scale, 0.0)
        self = tl.sum(tl.where(is_self, score_grads, 0.0), axis=1)[:, None]
        score_grads = _round(tl.where(is_self, 0.0, score_grads), DTYPE, True)
        pair_grads = _round(tl.where(visible & (rows[:, None] > rows[None, :]), -pair_grads, 0.0), DTYPE, True)
        if LOOPS == 3:
            for first_value in tl.range(0, V, BV, disable_licm=True):
                output_grads = load_tile(do, start, T, H, V, first_value, C, BV)
                state = _load_state(states, index, K, V, first_key, first_value, BK, BV)
                query_grads = tl.dot(output_grads, state, query_grads, input_precision=PRECISION)
        middle = _load_middle(sums, start, T, H, K, first_key, C, BK)
        own = laid_out_like(load_tile(sums, start, T, H, K, first_key, C, BK), query_grads)
        distances = tl.where(is_token[:, None], own - middle, 0.0)
        keys = laid_out_like(load_tile(k, start, T, G, K, first_key, C, BK), query_grads).to(tl.float32)
        queries = laid_out_like(load_tile(q, start, T, G, K, first_key, C, BK), query_grads).to(tl.float32)
        later = decay(distances)
        turned_keys = _round(keys * decay(-distances), DTYPE, True)
        own_queries = _round(queries * later, DTYPE, True)
        query_grads *= (decay(middle) * scale) * sees_start
        if start < T:
            query_grads = tl.dot(score_grads, turned_keys, query_grads, input_precision=PRECISION)
        terms = own_queries.to(tl.float32) * query_grads
        store_tile(dq, query_grads * later + self * keys, start, T, H, K, first_key, C, BK)

        if LOOPS > 1:
            for first_value in tl.range(0, V, BV, disable_licm=True):
                new = load_tile(added, start, T, H, V, first_value, C, BV)
                value_grads = load_tile(dv, start, T, H, V, first_value, C, BV)
                state = _load_state(states, index, K, V, first_key, first_value, BK, BV)
                grad = _load_state(grads, index, K, V, first_key, first_value, BK, BV)
                boundary_term = tl.dot(tl.trans(state), grad, boundary_term, input_precision=PRECISION)
                row_grads = tl.dot(value_grads, state, row_grads, input_precision=PRECISION)
                column_grads = tl.dot(new, grad, column_grads, input_precision=PRECISION)
        channels = tl.arange(0, BK)
        boundary_term = tl.sum(tl.where(channels[:, None] == channels[None, :], boundary_term, 0.0), axis=0)
        middle = _load_middle(sums, start, T, H, K, first_key, C, BK)
        total = load_last_row(sums, start, T, H, K, first_key, C, BK)[None, :]
        own = laid_out_like(load_tile(sums, start, T, H, K, first_key, C, BK), row_grads)
        distances = tl.where(is_token[:, None], own - middle, 0.0)
        keys = laid_out_like(load_tile(k, start, T, G, K, first_key, C, BK), row_grads).to(tl.float32)
        later = decay(distances)
        earlier = decay(-distances)
        turned_keys = _round(keys * earlier, DTYPE, True)
        own_keys = _round(keys * later, DTYPE, True)
        row_grads *= -decay(middle) * sees_start
        if start < T:
            row_grads = tl.dot(pair_grads, turned_keys, row_grads, input_precision=PRECISION)
        terms += own_keys.to(tl.float32) * row_grads
        key_grads = row_grads * later
        column_grads *= decay(total - middle) * sees_end
        leaving = tl.sum(turned_keys.to(tl.float32) * column_grads, axis=0)[None, :]
        queries = laid_out_like(load_tile(q, start, T, G, K, first_key, C, BK), row_grads).to(tl.float32)
        own_queries = _round(queries * later, DTYPE, True)
        if start < T:
            column_grads = tl.dot(tl.trans(score_grads), own_queries, column_grads, input_precision=PRECISION)
        if T > 0:
            column_grads = tl.dot(tl.trans(pair_grads), own_keys, column_grads, input_precision=PRECISION)
        terms -= turned_keys.to(tl.float32) * column_grads
        key_grads += column_grads * earlier + self * queries
        store_tile(dk, key_grads, start, T, H, K, first_key, C, BK)
        survives = decay(total)
        later_tokens = rows[:, None] <= rows[None, :]
        if DOCUMENTS:
            survives = tl.where(before == end, survives, 0.0)
            later_tokens = later_tokens & same
        boundary_terms = boundary_term[None, :] * survives + leaving
        stays = is_token
        if DOCUMENTS:
            boundary_terms = tl.where((doc_ids_of == end)[:, None], boundary_terms, 0.0)
            previous = tl.load(doc_ids + start + rows - 1, mask=is_token & (start + rows > 0), other=0)
            stays = doc_ids_of == previous
        decay_grads = tl.zeros([C, BK], tl.float32)
        if PARTS == 0:
            decay_grads = tl.dot(later_tokens.to(tl.float32), terms, input_precision="tf32x3")
        else:
            ones = later_tokens.to(tl.bfloat16)
            high = terms.to(tl.bfloat16)
            rest = (terms - high.to(tl.float32)).to(tl.bfloat16)
            if start < T:
                decay_grads = tl.dot(ones, high, decay_grads)
            decay_grads = tl.dot(ones, rest, decay_grads)
        decay_grads += boundary_terms
        store_tile(dg, tl.where(stays[:, None], decay_grads, 0.0), start, T, H, K, first_key, C, BK)
