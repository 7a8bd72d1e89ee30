"""Interactions between the tokens of one chunk: scores and their gradients.

Two tokens of a chunk are split at exactly one size of blocks, 32, 16, …, 1 tokens, at the start of the later block. The
decay between them is a product of two factors, each of one token alone and at most 1:

    exp(b_i − b_j) = exp(b_i − b_r) · exp(b_r − b_j),      r = last token of the earlier block,  j <= r < i

At each size a token is a query if it lies in the later block of its pair, else a key. So each size needs only one tile
X [C, K] of queries and keys, by row, times their factors:

    X Xᵀ         scores of the pairs that the size splits, and of others, which a mask drops
    Y = G X      factors ⊙ Y: dq in the rows of queries, −dk in those of keys
    X ⊙ Y        q ⊙ dq − k ⊙ dk

G [C, C] has the gradients dA of the size's pairs below the diagonal, −dAᵀ above it, and 0 elsewhere. Half of a product
is masked, but each factor is computed once, and tensor cores are not the bottleneck.

Where no channel decays by more than e^-60 between the chunk's middle token and either end, that token is r for all
pairs. Some factors then exceed 1. Rounding is relative, and in the pairs that are kept a large factor meets a small
one, so the error is the same. One product takes the place of six, and two exponentials that of six. Such chunks are
called mild; with GLA's initial gates all are (docs/benchmarks.md).
"""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.kernels import jit
from zeco_train.ops.gla.kernels.tiles import (
    are_mild,
    decay,
    from_middle,
    head_offset,
    laid_out_like,
    load_doc_ids,
    load_tile,
    round_to_bf16,
    split_decays,
    split_pairs,
    state_pointers,
    store_tile,
)


@jit
def _join(queries, keys):
    """bf16 queries and keys as upper and lower halves of 32 bits.

    Both stay in registers through all sizes. Joined, they take half as many, and one instruction extracts either, by
    role, as fp32.
    """
    upper = queries.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    return upper | keys.to(tl.uint16, bitcast=True).to(tl.uint32)


if triton.knobs.runtime.interpret:

    @jit
    def _take(joined, is_query):
        """fp32 queries or keys of `_join`, by row."""
        return tl.where(is_query[:, None], joined & 0xFFFF0000, joined << 16).to(tl.float32, bitcast=True)
else:

    @jit
    def _take(joined, is_query):
        """fp32 queries or keys of `_join`, by row: two bytes of it, above two of 0."""
        which = tl.where(is_query, 0x3244, 0x1044)[:, None].to(tl.uint32)
        joined, which = tl.broadcast(joined, which)
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;", "=f,r,r", [joined, which], dtype=tl.float32, is_pure=True, pack=1
        )


@jit
def _decayed(
    b,
    sums,
    joined,
    queries,
    keys,
    shift,
    start,
    T,
    H,
    K,
    first_key,
    C: tl.constexpr,
    BK: tl.constexpr,
    JOINED: tl.constexpr,
):
    """For blocks of 2^shift tokens: [C], which tokens are queries; [C, BK], the factors; [C, BK], X."""
    is_query, factors = split_decays(b, sums, shift, start, T, H, K, first_key, C, BK)
    if JOINED:
        tokens = round_to_bf16(_take(joined, is_query) * factors)
    else:
        tokens = (tl.where(is_query[:, None], queries, keys).to(tl.float32) * factors).to(queries.dtype)
    return is_query, factors, tokens


@jit
def scores_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    b,  # [B, T, H, K] fp32, sums of g inside chunks
    doc_ids,  # [T] int32, read with DOCUMENTS
    scores,  # [N, B, H, C, C], written: scale · Σ_K q_i ⊙ k_j ⊙ exp(b_i − b_j) where j <= i; elsewhere undefined
    scale,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    BH,
    C: tl.constexpr,
    BK: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
    JOINED: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program computes the scores of one chunk of one head.

    JOINED: see `_join`; bf16 only. KEYS: see `are_mild`.
    """
    chunk = tl.program_id(0)
    batch_head = tl.program_id(1)
    q += head_offset(batch_head, T, H, K)
    k += head_offset(batch_head, T, H, K)
    b += head_offset(batch_head, T, H, K)
    scores += (chunk.to(tl.int64) * BH + batch_head) * C * C
    start = chunk * C
    rows = tl.arange(0, C)

    total = tl.zeros([C, C], tl.float32)
    for first_key in range(0, K, BK):
        queries = load_tile(q, start, T, H, K, first_key, C, BK)
        keys = load_tile(k, start, T, H, K, first_key, C, BK)
        sums = load_tile(b, start, T, H, K, first_key, C, BK)
        self = tl.sum(queries.to(tl.float32) * keys.to(tl.float32), axis=1)[:, None]
        total = tl.where(rows[:, None] == rows[None, :], total + self, total)
        # after the loads, which are under way meanwhile
        if are_mild(b, chunk, T, H, K, C, 1, KEYS):
            distances = from_middle(b, sums, start, T, H, K, first_key, C, BK)
            own_queries = (queries.to(tl.float32) * decay(distances)).to(queries.dtype)
            own_keys = (keys.to(tl.float32) * decay(-distances)).to(keys.dtype)
            products = tl.dot(own_queries, tl.trans(own_keys), input_precision=PRECISION)
            total = tl.where(rows[:, None] > rows[None, :], total + products, total)
        else:
            joined = _join(queries, keys) if JOINED else queries
            # log₂ C sizes of blocks.
            for shift in range(6):
                _, _, tokens = _decayed(b, sums, joined, queries, keys, shift, start, T, H, K, first_key, C, BK, JOINED)
                products = tl.dot(tokens, tl.trans(tokens), input_precision=PRECISION)
                total = tl.where(split_pairs(shift, C), total + products, total)
    if DOCUMENTS:
        own, _, _ = load_doc_ids(doc_ids, start, T, C)
        total = tl.where(own[:, None] == own[None, :], total, 0.0)
    tl.store(scores + rows[:, None] * C + rows[None, :], (total * scale).to(scores.dtype.element_ty))


@jit
def _of_values(
    v,
    do,
    states,
    index,
    start,
    T,
    H,
    K,
    V,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    TURNED: tl.constexpr,
    ONE_TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """[C, C] do vᵀ; with TURNED its transpose, a product of its own, with sums in the same order; [C, BK] do Sᵀ."""
    grads = tl.zeros([C, C], tl.float32)
    turned = tl.zeros([C, C], tl.float32)
    state_grads = tl.zeros([C, BK], tl.float32)
    for first_value in range(0, V, BV):
        output_grads = load_tile(do, start, T, H, V, first_value, C, BV)
        values = load_tile(v, start, T, H, V, first_value, C, BV)
        if ONE_TILE:
            pointers, inside = state_pointers(states, index, K, V, 0, first_value, BK, BV)
            state = tl.load(pointers, mask=inside, other=0.0)
            state_grads += tl.dot(output_grads, tl.trans(state), input_precision=PRECISION)
        grads += tl.dot(output_grads, tl.trans(values), input_precision=PRECISION)
        if TURNED:
            turned += tl.dot(values, tl.trans(output_grads), input_precision=PRECISION)
    return grads, turned, state_grads


@jit
def _chunk_grads(
    q,
    k,
    v,
    b,
    do,
    doc_ids,
    states,
    dq,
    dk,
    terms,
    index,
    start,
    loaded_sums,
    loaded_queries,
    loaded_keys,
    scale,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
    JOINED: tl.constexpr,
    ONE_TILE: tl.constexpr,
    MILD: tl.constexpr,
):
    """The gradients of one chunk of one head, see `intra_grads_kernel`.

    With MILD and ONE_TILE the tiles of b, q and k are loaded already.
    """
    rows = tl.arange(0, C)
    grads, turned, state_grads = _of_values(
        v, do, states, index, start, T, H, K, V, C, BK, BV, not MILD, ONE_TILE, PRECISION
    )
    if MILD:
        pair_grads = tl.where(rows[:, None] >= rows[None, :], grads * scale, 0.0)
    else:
        # G, of all sizes; a product of its own costs less than the transpose
        pair_grads = tl.where(rows[:, None] >= rows[None, :], grads * scale, turned * -scale)
    if DOCUMENTS:
        own, before, _ = load_doc_ids(doc_ids, start, T, C)
        pair_grads = tl.where(own[:, None] == own[None, :], pair_grads, 0.0)
    self_grads = tl.sum(tl.where(rows[:, None] == rows[None, :], pair_grads, 0.0), axis=1)
    if MILD:
        earlier = tl.where(rows[:, None] > rows[None, :], pair_grads, 0.0).to(do.dtype.element_ty)

    for first_key in range(0, K, BK):
        if ONE_TILE:
            query_grads = state_grads
        else:
            query_grads = tl.zeros([C, BK], tl.float32)
            for first_value in range(0, V, BV):
                output_grads = load_tile(do, start, T, H, V, first_value, C, BV)
                pointers, inside = state_pointers(states, index, K, V, first_key, first_value, BK, BV)
                state = tl.load(pointers, mask=inside, other=0.0)
                query_grads += tl.dot(output_grads, tl.trans(state), input_precision=PRECISION)
        if MILD and ONE_TILE:
            sums = loaded_sums
            queries = loaded_queries
            keys = loaded_keys
        else:
            sums = load_tile(b, start, T, H, K, first_key, C, BK)
            queries = load_tile(q, start, T, H, K, first_key, C, BK)
            keys = load_tile(k, start, T, H, K, first_key, C, BK)
        sums = laid_out_like(sums, query_grads)
        queries = laid_out_like(queries, query_grads)
        keys = laid_out_like(keys, query_grads)
        from_start = decay(sums) * scale
        if DOCUMENTS:
            from_start = tl.where((own == before)[:, None], from_start, 0.0)
        query_grads *= from_start
        pair_terms = queries.to(tl.float32) * query_grads
        if MILD:
            # few tiles at a time, each stored once complete: registers bound the number of programs at work
            distances = from_middle(b, sums, start, T, H, K, first_key, C, BK)
            own_keys = (keys.to(tl.float32) * decay(-distances)).to(keys.dtype)
            seen = tl.dot(earlier, own_keys, input_precision=PRECISION)
            factors = decay(distances)
            query_grads += self_grads[:, None] * keys.to(tl.float32) + factors * seen
            store_tile(dq, query_grads, start, T, H, K, first_key, C, BK)
            own_queries = (queries.to(tl.float32) * factors).to(queries.dtype)
            pair_terms += own_queries.to(tl.float32) * seen
            seen = tl.dot(tl.trans(earlier), own_queries, input_precision=PRECISION)
            pair_terms -= own_keys.to(tl.float32) * seen
            key_grads = self_grads[:, None] * queries.to(tl.float32) + decay(-distances) * seen
        else:
            query_grads += self_grads[:, None] * keys.to(tl.float32)
            key_grads = self_grads[:, None] * queries.to(tl.float32)
            joined = _join(queries, keys) if JOINED else queries
            for shift in range(6):
                is_query, factors, tokens = _decayed(
                    b, sums, joined, queries, keys, shift, start, T, H, K, first_key, C, BK, JOINED
                )
                size_grads = tl.where(split_pairs(shift, C), pair_grads, 0.0).to(tokens.dtype)
                seen = tl.dot(size_grads, tokens, input_precision=PRECISION)
                moved = factors * seen
                to_query = tl.where(is_query, 1.0, 0.0)[:, None]
                query_grads += to_query * moved
                key_grads += (to_query - 1.0) * moved
                pair_terms += tokens.to(tl.float32) * seen
            store_tile(dq, query_grads, start, T, H, K, first_key, C, BK)
        store_tile(dk, key_grads, start, T, H, K, first_key, C, BK)
        store_tile(terms, pair_terms, start, T, H, K, first_key, C, BK)


@jit
def intra_grads_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    b,  # [B, T, H, K] fp32, sums of g inside chunks
    do,  # [B, T, H, V]
    doc_ids,  # [T] int32, read with DOCUMENTS
    states,  # [N, B, H, K, V]: true states before the chunks
    dq,  # [B, T, H, K], written, complete
    dk,  # [B, T, H, K], written: the part inside the chunk
    terms,  # [B, T, H, K] fp32, written: q ⊙ dq − k ⊙ dk with this dk
    scale,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BH,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
    JOINED: tl.constexpr,
    ONE_TILE: tl.constexpr,
    MILD: tl.constexpr,
    CHUNKS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program computes the gradients of some chunks of one head, as far as they need no gradients of states.

    dA = scale · do vᵀ,    dq_i = Σ_j dA_ij k_j ⊙ exp(b_i − b_j) + scale · exp(b_i) ⊙ S do_i,
    dk_j = Σ_i dA_ij q_i ⊙ exp(b_i − b_j)

    A pair (i, j) enters `terms` at i and, with the other sign, at j. Both come from the same rounded factors, so that
    they cancel in dg's sums over later tokens: otherwise their rounding errors would spread over a chunk's tokens, and
    where decays are strong they exceed dg itself.

    MILD: only chunks that are mild, a program each; else only the others, a program for CHUNKS. One program for either
    kind would take the registers of both. JOINED: see `_join`; bf16 only. ONE_TILE: K <= BK; dq's part from the state
    is then computed in the one loop over V. KEYS: see `are_mild`.
    """
    batch_head = tl.program_id(1)
    q += head_offset(batch_head, T, H, K)
    k += head_offset(batch_head, T, H, K)
    b += head_offset(batch_head, T, H, K)
    dq += head_offset(batch_head, T, H, K)
    dk += head_offset(batch_head, T, H, K)
    terms += head_offset(batch_head, T, H, K)
    v += head_offset(batch_head, T, H, V)
    do += head_offset(batch_head, T, H, V)
    if MILD:
        chunk = tl.program_id(0)
        # issued before the check and the loads of the values, so that their latencies overlap
        sums = load_tile(b, chunk * C, T, H, K, 0, C, BK)
        queries = load_tile(q, chunk * C, T, H, K, 0, C, BK)
        keys = load_tile(k, chunk * C, T, H, K, 0, C, BK)
        if are_mild(b, chunk, T, H, K, C, 1, KEYS):
            _chunk_grads(
                q, k, v, b, do, doc_ids, states, dq, dk, terms, chunk.to(tl.int64) * BH + batch_head, chunk * C,
                sums, queries, keys, scale, T, H, K, V, C, BK, BV, DOCUMENTS, PRECISION, JOINED, ONE_TILE, MILD,
            )  # fmt: skip
    else:
        first_chunk = tl.program_id(0) * CHUNKS
        if not are_mild(b, first_chunk, T, H, K, C, CHUNKS, KEYS):
            for step in range(tl.minimum(CHUNKS, tl.cdiv(T, C) - first_chunk)):
                chunk = first_chunk + step
                if not are_mild(b, chunk, T, H, K, C, 1, KEYS):
                    _chunk_grads(
                        q, k, v, b, do, doc_ids, states, dq, dk, terms, chunk.to(tl.int64) * BH + batch_head, chunk * C,
                        0, 0, 0, scale, T, H, K, V, C, BK, BV, DOCUMENTS, PRECISION, JOINED, ONE_TILE, MILD,
                    )  # fmt: skip
