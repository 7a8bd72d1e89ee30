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

Decays by channel are in operands of their own, k⁺ and scale · q⁺, times exp(b − r), and k⁻, times exp(r' − b):

    mild channels     r = r' = b of the chunk's middle token: one product of operands has all pairs
    others            r = 0, r' = b_end: factors of states alone

Where a channel's tokens after the chunk's first all decay to e^-40 or less, its pairs vanish, as they do in a product
of the latter. A chunk of mild and such channels is plain; others take a product for each size. A state is multiplied by
exp(r) before a chunk's tokens, exp(r' − r) with them, and exp(b_end − r') after: its borders.
"""

from __future__ import annotations

import triton.language as tl

from zeco_train.kernels import jit
from zeco_train.ops.gla.kernels.tiles import (
    LARGEST_EXPONENT,
    decay,
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
def load_decays(
    sums, batch_head, start, T, H, K, first_key, C: tl.constexpr, BK: tl.constexpr, BY_CHANNEL: tl.constexpr
):
    """Log-decays from the chunk's start through each token, [C, BK] or C × 1, and through its last, [1, BK] or 1 × 1.

    sums: [B, T, H, K], of `operands_kernel`; or [B, H, T], of `decay_sums_kernel`.
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


VANISHING: tl.constexpr = tl.constexpr(-40.0)
WEAK: tl.constexpr = tl.constexpr(2)


@jit
def load_kind(kinds, index, inside, TILES: tl.constexpr):
    """Of chunk number `index`: 0, 1 if it is plain, WEAK if its states have no factor but after the tokens; else −1."""
    kind = tl.load(kinds + index * TILES, mask=inside, other=-1)
    for tile in tl.static_range(1, TILES):
        kind = tl.minimum(kind, tl.load(kinds + index * TILES + tile, mask=inside, other=-1))
    return kind


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
def load_references(sums, start, T, H, K, first_key, C: tl.constexpr, BK: tl.constexpr):
    """Of a chunk which channels have one reference, r, r', and b of its last token, [BK].

    sums: those of the chunk's head, [T, H, K].
    """
    columns = first_key + tl.arange(0, BK)
    last = tl.minimum(C, T - start) - 1
    sums += start.to(tl.int64) * H * K + columns
    first = tl.load(sums, mask=columns < K, other=0.0)
    middle = tl.load(sums + tl.minimum(last, C // 2 - 1) * H * K, mask=columns < K, other=0.0)
    total = tl.load(sums + last * H * K, mask=columns < K, other=0.0)
    is_weak = total >= -LARGEST_EXPONENT
    distance = tl.maximum(first - middle, middle - total)
    is_mild = is_weak | (tl.maximum(distance, -20.0 - middle) <= LARGEST_EXPONENT)
    reference = tl.where(is_mild & ~is_weak, middle, 0.0)
    return is_mild, reference, tl.where(is_mild, reference, total), total


@jit
def _split_pairs_of_chunk(
    q, k, sums, chunk, T, H, G, K, C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, ONE_LAYOUT: tl.constexpr
):
    """Products of the pairs of a chunk that is not plain, a size of blocks after the other: q and k, k and k."""
    start = chunk * C
    pair_scores = tl.zeros([C, C], tl.float32)
    products = tl.zeros([C, C], tl.float32)
    for first_key in range(0, K, BK):
        queries = load_tile(q, start, T, G, K, first_key, C, BK)
        keys = load_tile(k, start, T, G, K, first_key, C, BK)
        own = load_tile(sums, start, T, H, K, first_key, C, BK)
        if ONE_LAYOUT:
            own = laid_out_like(own, products)
            queries = laid_out_like(queries, products)
            keys = laid_out_like(keys, products)
        for shift in range(6):
            is_later, factors = split_decays(sums, own, shift, start, T, H, K, first_key, C, BK)
            decayed_keys = (keys.to(tl.float32) * factors).to(keys.dtype)
            decayed_queries = (queries.to(tl.float32) * factors).to(keys.dtype)
            split = split_pairs(shift, C) & is_later[:, None]
            of_queries = tl.dot(decayed_queries, tl.trans(decayed_keys), input_precision=PRECISION)
            of_keys = tl.dot(decayed_keys, tl.trans(decayed_keys), input_precision=PRECISION)
            pair_scores = tl.where(split, pair_scores + of_queries, pair_scores)
            products = tl.where(split, products + of_keys, products)
    return pair_scores, products


@jit
def _write_system(
    pair_scores, products, beta, doc_ids, scores, inverses, chunk, batch_head, T, H, BH, C: tl.constexpr,
    DOCUMENTS: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr, SOLVING: tl.constexpr,
):  # fmt: skip
    """P and F of a chunk, from the scores and k_i · k_j of its pairs, and of others, which do not count."""
    start = chunk * C
    rows = tl.arange(0, C)
    visible = rows[:, None] >= rows[None, :]
    if DOCUMENTS:
        doc_ids_of, _, _ = load_doc_ids(doc_ids, start, T, C)
        visible = visible & (doc_ids_of[:, None] == doc_ids_of[None, :])
    strengths = load_strengths(beta + head_offset(batch_head, T, H, 1), start, T, H, C, TOKENS)
    earlier = visible & (rows[:, None] > rows[None, :])
    system = tl.where(earlier, products * strengths[:, None], 0.0)
    offsets = (chunk.to(tl.int64) * BH + batch_head) * C * C + rows[:, None] * C + rows[None, :]
    tl.store(scores + offsets, tl.where(visible, pair_scores, 0.0).to(scores.dtype.element_ty))
    inverse = _inverse(system, C, PRECISION, SOLVING) * strengths[None, :]
    tl.store(inverses + offsets, inverse.to(inverses.dtype.element_ty))


@jit
def systems_kernel(
    q,  # [B, T, G, K]
    k,  # [B, T, G, K]
    sums,  # [B, H, T] fp32, see `load_decays`
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
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVING: tl.constexpr,
):
    """One program serves one chunk of one head, with a decay by head. SOLVING: dtype of the inverse's products."""
    chunk = tl.program_id(0)
    batch_head = tl.program_id(1)
    q += key_head_offset(batch_head, T, H, G, K)
    k += key_head_offset(batch_head, T, H, G, K)
    start = chunk * C
    rows = tl.arange(0, C)
    pair_scores = tl.zeros([C, C], tl.float32)
    products = tl.zeros([C, C], tl.float32)
    for first_key in range(0, K, BK):
        queries = load_tile(q, start, T, G, K, first_key, C, BK)
        keys = load_tile(k, start, T, G, K, first_key, C, BK)
        pair_scores = tl.dot(queries, tl.trans(keys), pair_scores, input_precision=PRECISION)
        products = tl.dot(keys, tl.trans(keys), products, input_precision=PRECISION)
    own, _ = load_decays(sums, batch_head, start, T, H, K, 0, C, BK, False)
    between = decay(tl.where(rows[:, None] >= rows[None, :], own - tl.trans(own), float("-inf")))
    _write_system(
        pair_scores * between * scale, products * between, beta, doc_ids, scores, inverses, chunk, batch_head, T, H, BH,
        C, DOCUMENTS, k.dtype.element_ty, PRECISION, SOLVING,
    )  # fmt: skip


@jit
def channel_systems_kernel(
    q,  # [B, T, G, K]
    k,  # [B, T, G, K]
    sums,  # [B, T, H, K] fp32
    queries,  # [B, T, H, K], as the next two of `operands_kernel`: scale · q⁺
    keys,  # [B, T, H, K]: k⁺
    end_keys,  # [B, T, H, K]: k⁻
    selves,  # [B, T, H, tiles] fp32: parts of scale · q · k
    kinds,  # [N, B, H, TILES] int8
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
    num_chunks,
    C: tl.constexpr,
    BK: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVING: tl.constexpr,
    ONE_LAYOUT: tl.constexpr,
    PLAIN: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILES: tl.constexpr,
):
    """`systems_kernel` with decays by channel, CHUNKS a program: those that are plain, or the others. ONE_LAYOUT: BK is C."""
    batch_head = tl.program_id(1)
    rows = tl.arange(0, C)
    own = head_offset(batch_head, T, H, K)
    is_self = rows[:, None] == rows[None, :]
    for step in range(CHUNKS):
        chunk = tl.program_id(0) * CHUNKS + step
        start = chunk * C
        kind = load_kind(kinds, chunk.to(tl.int64) * BH + batch_head, chunk < num_chunks, TILES)
        if (kind > 0) == PLAIN and kind >= 0:
            if PLAIN:
                pair_scores = tl.zeros([C, C], tl.float32)
                products = tl.zeros([C, C], tl.float32)
                for first_key in range(0, K, BK):
                    earlier = tl.trans(load_tile(end_keys + own, start, T, H, K, first_key, C, BK))
                    later = load_tile(queries + own, start, T, H, K, first_key, C, BK)
                    pair_scores = tl.dot(later, earlier, pair_scores, input_precision=PRECISION)
                    later = load_tile(keys + own, start, T, H, K, first_key, C, BK)
                    products = tl.dot(later, earlier, products, input_precision=PRECISION)
            else:
                of_group = key_head_offset(batch_head, T, H, G, K)
                pair_scores, products = _split_pairs_of_chunk(
                    q + of_group, k + of_group, sums + own, chunk, T, H, G, K, C, BK, PRECISION, ONE_LAYOUT
                )
                pair_scores *= scale
            for tile in tl.static_range(TILES):
                part = load_tile(selves + head_offset(batch_head, T, H, TILES), start, T, H, TILES, tile, C, 1)
                pair_scores = tl.where(is_self, part if tile == 0 else pair_scores + part, pair_scores)
            _write_system(
                pair_scores, products, beta, doc_ids, scores, inverses, chunk,
                batch_head, T, H, BH, C, DOCUMENTS, k.dtype.element_ty, PRECISION, SOLVING,
            )  # fmt: skip


@jit
def operands_kernel(
    q,  # [B, T, G, K]
    k,  # [B, T, G, K]
    g,  # [B, T, H, K] fp32, log-decays, read with PARTS
    sums,  # [B, T, H, K] fp32, their sums inside chunks, each through the token itself; written with PARTS, else read
    doc_ids,  # [T] int32, read with DOCUMENTS
    keys,  # [B, T, H, K], written: k⁺
    end_keys,  # [B, T, H, K], written: k⁻
    queries,  # [B, T, H, K], written: scale · q⁺
    borders,  # [N, B, H, 3, K] fp32, written: factors of a state before, with and after a chunk's tokens
    selves,  # [B, T, H, tiles] fp32, written with PARTS: scale · q · k, of the keys' tiles
    kinds,  # [N, B, H, tiles] int8, written with PARTS, see `load_kind`
    scale,
    T,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    BH,
    C: tl.constexpr,
    BK: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The operands of BK channels of one chunk of one head a program, with decays by channel."""
    tiles: tl.constexpr = (K + BK - 1) // BK
    chunk = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    batch_head = tl.program_id(1)
    q += key_head_offset(batch_head, T, H, G, K)
    k += key_head_offset(batch_head, T, H, G, K)
    own = head_offset(batch_head, T, H, K)
    start = chunk * C
    first_key = tile * BK
    index = chunk.to(tl.int64) * BH + batch_head
    rows = tl.arange(0, C)
    last = tl.minimum(C, T - start) - 1
    if PARTS is not None:
        decays = tl.maximum(load_tile(g + own, start, T, H, K, first_key, C, BK), LEAST)
        pairs = ((rows > 0) & (rows <= last))[:, None]
        slowest = tl.max(tl.where(pairs, decays, LEAST), axis=0)
        written = sum_tokens(rows[:, None] >= rows[None, :], decays, PARTS)
        store_tile(sums + own, written, start, T, H, K, first_key, C, BK)
        # all threads' stores of the sums, before they load them in the layout of keys, with few registers
        tl.debug_barrier()
    through = load_tile(sums + own, start, T, H, K, first_key, C, BK)
    is_mild, reference, end_reference, total = load_references(sums + own, start, T, H, K, first_key, C, BK)
    if PARTS is not None:
        # channels past K are mild
        is_weak = is_mild & (reference == 0.0)
        if DOCUMENTS:
            _, before, end = load_doc_ids(doc_ids, start, T, C)
            is_weak = is_weak & (before == end)
        kind = tl.where(is_weak, WEAK, (is_mild | (slowest <= VANISHING)).to(tl.int32))
        tl.store(kinds + index * tiles + tile, tl.min(kind).to(tl.int8))
    later, earlier = decay(through - reference[None, :]), decay(end_reference[None, :] - through)
    of_keys = load_tile(k, start, T, G, K, first_key, C, BK).to(tl.float32)
    seen = load_tile(q, start, T, G, K, first_key, C, BK).to(tl.float32) * scale
    if PARTS is not None:
        pointers = selves + (head_offset(batch_head, T, H, 1) + (start + rows).to(tl.int64) * H) * tiles + tile
        tl.store(pointers, tl.sum(seen * of_keys, axis=1), mask=rows <= last)
    store_tile(keys + own, of_keys * later, start, T, H, K, first_key, C, BK)
    store_tile(end_keys + own, of_keys * earlier, start, T, H, K, first_key, C, BK)
    store_tile(queries + own, seen * later, start, T, H, K, first_key, C, BK)
    with_tokens = decay(end_reference - reference)
    if DOCUMENTS:
        _, before, end = load_doc_ids(doc_ids, start, T, C)
        with_tokens = tl.where(before == end, with_tokens, 0.0)
    columns = first_key + tl.arange(0, BK)
    pointers = borders + index * 3 * K + columns
    tl.store(pointers, decay(reference), mask=columns < K)
    tl.store(pointers + K, with_tokens, mask=columns < K)
    tl.store(pointers + 2 * K, decay(total - end_reference), mask=columns < K)
