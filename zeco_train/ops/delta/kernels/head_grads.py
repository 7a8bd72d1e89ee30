"""Experiment: gradients of one chunk, transposed, for several heads that share keys."""

from __future__ import annotations

import triton.language as tl

from zeco_train.kernels import jit
from zeco_train.ops.delta.kernels.grads import _round
from zeco_train.ops.delta.kernels.systems import border_decays, load_decays, load_strengths
from zeco_train.ops.gla.kernels.tiles import decay, head_offset, load_doc_ids, load_tile, state_pointers, store_tile
from zeco_train.ops.scalar_decay.kernels.decays import key_head_offset


@jit
def _load_state(states, index, K, V, first_key, first_value, BK: tl.constexpr, BV: tl.constexpr):
    pointers, inside = state_pointers(states, index, V, K, first_value, first_key, BV, BK)
    return tl.load(pointers, mask=inside, other=0.0)


@jit
def head_grads_kernel(
    q, k, sums, beta, do, doc_ids, states, grads, added, dv, dq, dk, dg, dbeta, scale, T, B,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BH,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, HEADS: tl.constexpr, LOOPS: tl.constexpr, MEMORY: tl.constexpr,
    GATED: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    key_tiles: tl.constexpr = (K + BK - 1) // BK
    chunk = tl.program_id(0) // key_tiles
    tile = tl.program_id(0) % key_tiles
    first_key = tile * BK
    start = chunk * C
    head_set = tl.program_id(1)
    first_head = head_set * HEADS
    of_group = key_head_offset(first_head, T, H, G, K)
    dq += head_offset(head_set, T, H // HEADS, K)
    dk += head_offset(head_set, T, H // HEADS, K)
    rows = tl.arange(0, C)
    is_token = rows < T - start
    is_self = rows[:, None] == rows[None, :]
    DTYPE: tl.constexpr = k.dtype.element_ty
    if HEADS > 1 and not MEMORY:
        query_total = tl.zeros([BK, C], tl.float32)
        key_total = tl.zeros([BK, C], tl.float32)
    for number in tl.range(HEADS, disable_licm=True):
        if MEMORY and HEADS > 1:
            # all threads' stores of the head before
            tl.debug_barrier()
            known = tl.where(number > 0, T, 0)
        batch_head = first_head + number
        index = chunk.to(tl.int64) * BH + batch_head
        by_head = head_offset(batch_head, T, H, 1) + (start + rows).to(tl.int64) * H
        of_head = head_offset(batch_head, T, H, V)
        score_grads = tl.zeros([C, C], tl.float32)
        pair_grads = tl.zeros([C, C], tl.float32)
        query_grads = tl.zeros([BK, C], tl.float32)
        row_grads = tl.zeros([BK, C], tl.float32)
        column_grads = tl.zeros([BK, C], tl.float32)
        boundary_term = tl.zeros([BV, BV], tl.float32)  # on its diagonal
        for first_value in tl.range(0, V, BV, disable_licm=True):
            new = load_tile(added + of_head, start, T, H, V, first_value, C, BV)
            value_grads = load_tile(dv + of_head, start, T, H, V, first_value, C, BV)
            output_grads = load_tile(do + of_head, start, T, H, V, first_value, C, BV)
            score_grads = tl.dot(output_grads, tl.trans(new), score_grads, input_precision=PRECISION)
            pair_grads = tl.dot(value_grads, tl.trans(new), pair_grads, input_precision=PRECISION)
            if LOOPS < 3:
                state = _load_state(states, index, K, V, first_key, first_value, BK, BV)
                query_grads = tl.dot(tl.trans(state), tl.trans(output_grads), query_grads, input_precision=PRECISION)
                row_grads = tl.dot(tl.trans(state), tl.trans(value_grads), row_grads, input_precision=PRECISION)
            if LOOPS == 1:
                grad = _load_state(grads, index, K, V, first_key, first_value, BK, BV)
                column_grads = tl.dot(tl.trans(grad), tl.trans(new), column_grads, input_precision=PRECISION)
                if GATED:
                    boundary_term = tl.dot(state, tl.trans(grad), boundary_term, input_precision=PRECISION)
        if tile == 0:
            strengths = load_strengths(beta + head_offset(batch_head, T, H, 1), start, T, H, C, DTYPE)
            strength_grads = tl.sum(tl.where(is_self, pair_grads, 0.0), axis=1) / strengths / strengths
            tl.store(dbeta + by_head, strength_grads, mask=is_token)
        visible = rows[:, None] >= rows[None, :]
        if DOCUMENTS:
            doc_ids_of, _, end = load_doc_ids(doc_ids, start, T, C)
            same = doc_ids_of[:, None] == doc_ids_of[None, :]
            visible = visible & same
        own, total = load_decays(sums, batch_head, start, T, H, K, first_key, C, BK, False)
        between = decay(tl.where(visible, own - tl.trans(own), float("-inf")))
        score_grads *= between * scale
        # each token with itself: its terms of dg cancel
        self = tl.sum(tl.where(is_self, score_grads, 0.0), axis=1)[None, :]
        score_grads = _round(tl.where(is_self, 0.0, score_grads), DTYPE, True)
        pair_grads = _round(tl.where(rows[:, None] > rows[None, :], pair_grads * -between, 0.0), DTYPE, True)
        if LOOPS == 3:
            for first_value in tl.range(0, V, BV, disable_licm=True):
                output_grads = load_tile(do + of_head, start, T, H, V, first_value, C, BV)
                state = _load_state(states, index, K, V, first_key, first_value, BK, BV)
                query_grads = tl.dot(tl.trans(state), tl.trans(output_grads), query_grads, input_precision=PRECISION)
        own, total = load_decays(sums, batch_head, start, T, H, K, first_key, C, BK, False)
        from_start, to_end, survives = border_decays(own, total, doc_ids, start, T, C, DOCUMENTS)
        from_start, to_end = tl.trans(from_start), tl.trans(to_end)
        keys = load_tile(k + of_group, start, T, G, K, first_key, C, BK)
        queries = load_tile(q + of_group, start, T, G, K, first_key, C, BK)
        query_grads *= from_start * scale
        query_grads = tl.dot(tl.trans(keys), tl.trans(score_grads), query_grads, input_precision=PRECISION)
        terms = tl.sum(tl.trans(queries).to(tl.float32) * query_grads, axis=0)
        query_grads += self * tl.trans(keys).to(tl.float32)
        if HEADS > 1 and not MEMORY:
            query_total += query_grads
        else:
            if HEADS > 1:
                before = load_tile(dq, start, known, H // HEADS, K, first_key, C, BK)
                query_grads += tl.trans(before).to(tl.float32)
            store_tile(dq, tl.trans(query_grads), start, T, H // HEADS, K, first_key, C, BK)
        if LOOPS > 1:
            for first_value in tl.range(0, V, BV, disable_licm=True):
                new = load_tile(added + of_head, start, T, H, V, first_value, C, BV)
                grad = _load_state(grads, index, K, V, first_key, first_value, BK, BV)
                column_grads = tl.dot(tl.trans(grad), tl.trans(new), column_grads, input_precision=PRECISION)
                if LOOPS == 3 or GATED:
                    state = _load_state(states, index, K, V, first_key, first_value, BK, BV)
                if LOOPS == 3:
                    value_grads = load_tile(dv + of_head, start, T, H, V, first_value, C, BV)
                    row_grads = tl.dot(tl.trans(state), tl.trans(value_grads), row_grads, input_precision=PRECISION)
                if GATED:
                    boundary_term = tl.dot(state, tl.trans(grad), boundary_term, input_precision=PRECISION)
            keys = load_tile(k + of_group, start, T, G, K, first_key, C, BK)
            queries = load_tile(q + of_group, start, T, G, K, first_key, C, BK)
        wide_keys = tl.trans(keys).to(tl.float32)
        row_grads *= -from_start
        row_grads = tl.dot(tl.trans(keys), tl.trans(pair_grads), row_grads, input_precision=PRECISION)
        column_grads *= to_end
        if GATED:
            leaving = tl.sum(wide_keys * column_grads)
        if start < T:  # always: see `_split_product` of the scalar decays
            column_grads = tl.dot(tl.trans(queries), score_grads, column_grads, input_precision=PRECISION)
        column_grads = tl.dot(tl.trans(keys), pair_grads, column_grads, input_precision=PRECISION)
        terms += tl.sum(wide_keys * (row_grads - column_grads), axis=0)
        wide_queries = tl.trans(queries).to(tl.float32)
        key_grads = row_grads + column_grads + self * wide_queries
        if HEADS > 1 and not MEMORY:
            key_total += key_grads
        else:
            if HEADS > 1:
                before = load_tile(dk, start, known, H // HEADS, K, first_key, C, BK)
                key_grads += tl.trans(before).to(tl.float32)
            store_tile(dk, tl.trans(key_grads), start, T, H // HEADS, K, first_key, C, BK)
        if GATED:
            values = tl.arange(0, BV)
            boundary_term = tl.sum(tl.where(values[:, None] == values[None, :], boundary_term, 0.0))
            boundary_term = boundary_term * tl.sum(survives) + leaving
            later_tokens = rows[:, None] <= rows[None, :]
            stays = is_token
            boundary_terms = boundary_term + tl.zeros([C], tl.float32)
            if DOCUMENTS:
                # not past a restart: terms of the next document add up to 0 only within its rounding
                later_tokens = later_tokens & same
                boundary_terms = tl.where(doc_ids_of == end, boundary_terms, 0.0)
                previous = tl.load(doc_ids + start + rows - 1, mask=is_token & (start + rows > 0), other=0)
                stays = doc_ids_of == previous
            decay_grads = tl.sum(tl.where(later_tokens, terms[None, :], 0.0), axis=1) + boundary_terms
            tl.store(dg + tile.to(tl.int64) * B * T * H + by_head, tl.where(stays, decay_grads, 0.0), mask=is_token)
    if HEADS > 1 and not MEMORY:
        store_tile(dq, tl.trans(query_total), start, T, H // HEADS, K, first_key, C, BK)
        store_tile(dk, tl.trans(key_total), start, T, H // HEADS, K, first_key, C, BK)
