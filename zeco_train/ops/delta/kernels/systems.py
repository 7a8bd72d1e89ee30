"""The token pairs of a chunk: scores P, and F = (I + L)⁻¹ Diag(β) of its triangular system.

    P_ij = scale · Σ_K q_i ⊙ k_j ⊙ exp(b_i − b_j)  for i >= j
    L_ij = β_i · Σ_K k_i ⊙ k_j ⊙ exp(b_i − b_j)    for i > j

Pairs are grouped by sizes of blocks, 1, 2, … 32 tokens, as in `ops.gla.kernels.intra`: with decays by channel
where a chunk is not plain, and always for the inverse. Those of the blocks of a size give those of twice the size:

    | A     |⁻¹   | A⁻¹             |
    | E   B |   = | −B⁻¹ E A⁻¹  B⁻¹ |        T ← T − T L T  for the pairs that the size splits

It is exact substitution by blocks, in products of the whole chunk; powers of L, which may be large where T is not, do
not occur. No number of L or T exceeds 2, since no transition expands: for bf16 tokens the products are of fp16 numbers,
as exact as tf32, times 2^10, so that rows of small β do not underflow.

Decays by channel are in operands, k⁺ and scale · q⁺ times exp(b − r), k⁻ times exp(r' − b), b the sum of log-decays
from the chunk's start through a token, with references of each channel of a chunk that let nothing overflow:

    weak decays, b_end >= −60      r = r' = 0
    mild ones                      r = r' = b of the middle token, both ends within 60 of it, itself at least −80
    others                         r = 0, r' = b_end: no factor exceeds 1, but pairs are not in products of operands

Pairs of others vanish where all tokens but the first decay to e^`VANISHING` or less: they are rounding errors of a
chunk's sums, and are left out, as in products of operands. g of such a channel has no gradient of pairs then, in place
of one of that size. A chunk of weak, mild and vanishing channels is plain: one product of operands has its pairs.

A state has factors, too: exp(r) before a chunk's tokens, exp(r' − r) with them, exp(b_end − r') after them.
"""

from __future__ import annotations

import triton.language as tl

from zeco_train.kernels import jit
from zeco_train.ops.gla.kernels.tiles import (
    LARGEST_EXPONENT,
    VANISHING,
    decay,
    head_offset,
    laid_out_like,
    load_doc_ids,
    load_tile,
    split_decays,
    split_pairs,
    store_tile,
    sum_tokens,
)
from zeco_train.ops.scalar_decay.kernels.decays import LEAST, key_head_offset


@jit
def load_decays(sums, batch_head, start, T, C: tl.constexpr):
    """Log-decays by head from the chunk's start through each token, C × 1, and through its last, 1 × 1.

    sums: [B, H, T], of `decay_sums_kernel`.
    """
    own = sums + batch_head.to(tl.int64) * T + start
    last = tl.minimum(C, T - start) - 1
    through = tl.load(own + tl.minimum(tl.arange(0, C), last))[:, None]
    return through, tl.load(own + last + tl.zeros([1, 1], tl.int32))


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
# Kinds of chunks: plain ones are at least 1. In those of weak decays a state has no factor but after the tokens.
WEAK: tl.constexpr = tl.constexpr(2)


@jit
def load_kind(kinds, index, inside, TILES: tl.constexpr):
    """The least kind of the TILES tiles of chunk number `index`; −1 unless `inside`."""
    kind = tl.load(kinds + index * TILES, mask=inside, other=-1)
    for tile in tl.static_range(1, TILES):
        kind = tl.minimum(kind, tl.load(kinds + index * TILES + tile, mask=inside, other=-1))
    return kind


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
    """[BK], of a chunk's channels: 0, 1 if decays are mild, or WEAK; r, r', b_end. sums: [T, H, K], of its head."""
    columns = first_key + tl.arange(0, BK)
    last = tl.minimum(C, T - start) - 1
    sums += start.to(tl.int64) * H * K + columns
    first = tl.load(sums, mask=columns < K, other=0.0)
    middle = tl.load(sums + tl.minimum(last, C // 2 - 1) * H * K, mask=columns < K, other=0.0)
    total = tl.load(sums + last * H * K, mask=columns < K, other=0.0)
    distance = tl.maximum(tl.maximum(first - middle, middle - total), -20.0 - middle)
    is_mild = distance <= LARGEST_EXPONENT
    is_weak = total >= -LARGEST_EXPONENT
    reference = tl.where(is_mild & ~is_weak, middle, 0.0)
    kinds = tl.where(is_weak, WEAK, is_mild.to(tl.int32))
    return kinds, reference, tl.where(kinds > 0, reference, total), total


@jit
def systems_kernel(
    q,  # [B, T, G, K], as the next read with BY_CHANNEL
    k,  # [B, T, G, K]
    sums,  # [B, H, T] fp32, see `load_decays`; with BY_CHANNEL [B, T, H, K], as the next five of `operands_kernel`
    queries,  # [B, T, G, K]: q; or [B, T, H, K]: scale · q⁺
    keys,  # [B, T, G, K]: k; or [B, T, H, K]: k⁺
    end_keys,  # [B, T, H, K], read with BY_CHANNEL: k⁻
    selves,  # [B, T, H, TILES] fp32, as the next read with BY_CHANNEL
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
    C: tl.constexpr,
    BK: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVING: tl.constexpr,
    TILES: tl.constexpr,
    PLAIN: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """One program serves CHUNKS chunks of one head; with BY_CHANNEL those that are plain, or only the others.

    SOLVING: dtype of the inverse's products.
    """
    HEADS: tl.constexpr = H if BY_CHANNEL else G
    batch_head = tl.program_id(1)
    queries += key_head_offset(batch_head, T, H, HEADS, K)
    keys += key_head_offset(batch_head, T, H, HEADS, K)
    beta += head_offset(batch_head, T, H, 1)
    if BY_CHANNEL:
        q += key_head_offset(batch_head, T, H, G, K)
        k += key_head_offset(batch_head, T, H, G, K)
        sums += head_offset(batch_head, T, H, K)
        end_keys += head_offset(batch_head, T, H, K)
        selves += head_offset(batch_head, T, H, TILES)
    rows = tl.arange(0, C)
    for step in range(CHUNKS):
        chunk = tl.program_id(0) * CHUNKS + step
        start = chunk * C
        index = chunk.to(tl.int64) * BH + batch_head
        kind = load_kind(kinds, index, start < T, TILES) if BY_CHANNEL else WEAK
        if kind >= 0 and (kind > 0) == PLAIN:
            pair_scores = tl.zeros([C, C], tl.float32)
            products = tl.zeros([C, C], tl.float32)
            for first_key in range(0, K, BK):
                if PLAIN:
                    later = load_tile(keys, start, T, HEADS, K, first_key, C, BK)
                    earlier = tl.trans(load_tile(end_keys, start, T, H, K, first_key, C, BK) if BY_CHANNEL else later)
                    products = tl.dot(later, earlier, products, input_precision=PRECISION)
                    later = load_tile(queries, start, T, HEADS, K, first_key, C, BK)
                    pair_scores = tl.dot(later, earlier, pair_scores, input_precision=PRECISION)
                else:
                    own = load_tile(sums, start, T, H, K, first_key, C, BK)
                    of_queries = load_tile(q, start, T, G, K, first_key, C, BK)
                    of_keys = load_tile(k, start, T, G, K, first_key, C, BK)
                    if BK == C:
                        own = laid_out_like(own, products)
                        of_queries = laid_out_like(of_queries, products)
                        of_keys = laid_out_like(of_keys, products)
                    for shift in range(6):
                        is_later, factors = split_decays(sums, own, shift, start, T, H, K, first_key, C, BK)
                        decayed_keys = (of_keys.to(tl.float32) * factors).to(k.dtype.element_ty)
                        decayed_queries = (of_queries.to(tl.float32) * (factors * scale)).to(k.dtype.element_ty)
                        split = split_pairs(shift, C) & is_later[:, None]
                        between = tl.dot(decayed_queries, tl.trans(decayed_keys), input_precision=PRECISION)
                        pair_scores = tl.where(split, pair_scores + between, pair_scores)
                        between = tl.dot(decayed_keys, tl.trans(decayed_keys), input_precision=PRECISION)
                        products = tl.where(split, products + between, products)
            visible = rows[:, None] >= rows[None, :]
            if DOCUMENTS:
                doc_ids_of, _, _ = load_doc_ids(doc_ids, start, T, C)
                visible = visible & (doc_ids_of[:, None] == doc_ids_of[None, :])
            if BY_CHANNEL:
                # of a token with itself, not the product of rounded operands, nor of those that vanish
                for tile in tl.static_range(TILES):
                    part = load_tile(selves, start, T, H, TILES, tile, C, 1)
                    part += 0.0 if tile == 0 else pair_scores
                    pair_scores = tl.where(rows[:, None] == rows[None, :], part, pair_scores)
            else:
                own, _ = load_decays(sums, batch_head, start, T, C)
                between = decay(tl.where(visible, own - tl.trans(own), float("-inf")))
                pair_scores *= between * scale
                products *= between
            strengths = load_strengths(beta, start, T, H, C, k.dtype.element_ty)
            earlier = visible & (rows[:, None] > rows[None, :])
            system = tl.where(earlier, products * strengths[:, None], 0.0)
            offsets = index * C * C + rows[:, None] * C + rows[None, :]
            tl.store(scores + offsets, tl.where(visible, pair_scores, 0.0).to(scores.dtype.element_ty))
            inverse = _inverse(system, C, PRECISION, SOLVING) * strengths[None, :]
            tl.store(inverses + offsets, inverse.to(inverses.dtype.element_ty))


@jit
def write_operands(
    sources, written, chunk, batch_head, scale, T, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, BH, first_key,
    C: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BK channels of a chunk of one head, whose tensors these are, see `operands_kernel`; kinds and scale · q · k."""
    q, k, sums = sources
    keys, end_keys, queries, borders = written
    start = chunk * C
    through = load_tile(sums, start, T, H, K, first_key, C, BK)
    kinds, reference, end_reference, total = load_references(sums, start, T, H, K, first_key, C, BK)
    of_keys = load_tile(k, start, T, G, K, first_key, C, BK)
    seen = load_tile(q, start, T, G, K, first_key, C, BK)
    later, earlier = decay(through - reference[None, :]), decay(end_reference[None, :] - through)
    of_keys, seen = of_keys.to(tl.float32), seen.to(tl.float32) * scale
    selves = tl.sum(seen * of_keys, axis=1)
    store_tile(keys, of_keys * later, start, T, H, K, first_key, C, BK)
    store_tile(end_keys, of_keys * earlier, start, T, H, K, first_key, C, BK)
    store_tile(queries, seen * later, start, T, H, K, first_key, C, BK)
    columns = first_key + tl.arange(0, BK)
    pointers = borders + (chunk.to(tl.int64) * BH + batch_head) * 3 * K + columns
    tl.store(pointers, decay(reference), mask=columns < K)
    tl.store(pointers + K, decay(end_reference - reference), mask=columns < K)
    tl.store(pointers + 2 * K, decay(total - end_reference), mask=columns < K)
    return kinds, selves


@jit
def operands_kernel(
    q,  # [B, T, G, K]
    k,  # [B, T, G, K]
    g,  # [B, T, H, K] fp32, log-decays
    sums,  # [B, T, H, K] fp32, written: their sums inside chunks, each through the token itself
    keys,  # [B, T, H, K], written: k⁺
    end_keys,  # [B, T, H, K], written: k⁻
    queries,  # [B, T, H, K], written: scale · q⁺
    borders,  # [N, B, H, 3, K] fp32, written: factors of a state before, with and after a chunk's tokens
    selves,  # [B, T, H, tiles] fp32, written: scale · q · k, of the keys' tiles
    kinds,  # [N, B, H, tiles] int8, written: the least kinds of their channels
    scale,
    T,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    BH,
    C: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The operands of BK channels of one chunk of one head a program, with decays by channel."""
    tiles: tl.constexpr = (K + BK - 1) // BK
    chunk = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    batch_head = tl.program_id(1)
    of_group = key_head_offset(batch_head, T, H, G, K)
    own = head_offset(batch_head, T, H, K)
    start, first_key = chunk * C, tile * BK
    rows = tl.arange(0, C)
    last = tl.minimum(C, T - start) - 1
    decays = tl.maximum(load_tile(g + own, start, T, H, K, first_key, C, BK), LEAST)
    pairs = ((rows > 0) & (rows <= last))[:, None]
    slowest = tl.max(tl.where(pairs, decays, LEAST), axis=0)
    through = sum_tokens(rows[:, None] >= rows[None, :], decays, PARTS)
    store_tile(sums + own, through, start, T, H, K, first_key, C, BK)
    # all threads' stores of the sums, before they load them in the layout of keys, with few registers
    tl.debug_barrier()
    sources = q + of_group, k + of_group, sums + own
    written = keys + own, end_keys + own, queries + own, borders
    kind, of_selves = write_operands(sources, written, chunk, batch_head, scale, T, H, G, K, BH, first_key, C, BK)
    # channels past K are weak
    kind = tl.maximum(kind, (slowest <= VANISHING).to(tl.int32))
    tl.store(kinds + (chunk.to(tl.int64) * BH + batch_head) * tiles + tile, tl.min(kind).to(tl.int8))
    pointers = selves + (head_offset(batch_head, T, H, 1) + (start + rows).to(tl.int64) * H) * tiles + tile
    tl.store(pointers, of_selves, mask=rows <= last)
