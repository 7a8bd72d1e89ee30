"""What happens between the tokens of one chunk: scores and their gradients.

Two tokens of a chunk are split at exactly one size of blocks, 32, 16, …, 1 tokens, at the start of the later block. The
decay between them is a product of two factors, each of one token alone and at most 1:

    exp(b_i − b_j) = exp(b_i − b_r) · exp(b_r − b_j),      r = last token of the earlier block,  j <= r < i

So each size is a matrix product of decayed queries with decayed keys. A program has 16 tokens of a chunk, its *own*. At
sizes 32 and 16 all of them lie in a later block, as queries, or all in an earlier one, as keys, opposite to one block
of partners; at sizes below 16 they are partners among themselves, and a mask keeps the pairs of the size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.kernels.gla.tiles import (
    decay,
    head_offset,
    load_row,
    load_rows,
    load_tile,
    state_pointers,
    store_tile,
)


@triton.jit
def _partners(own, WIDTH: tl.constexpr):
    """For the own tokens from `own` on in their chunk, at blocks of WIDTH tokens: are they in the later block; the
    first token of the partners; the last token of the earlier block."""
    block = own // WIDTH
    return (block & 1) == 1, (block ^ 1) * WIDTH, (block | 1) * WIDTH - 1


@triton.jit
def _near_pairs(shift):
    """[16, 16] mask of the (later, earlier) pairs of own tokens that blocks of 2^shift tokens split."""
    block = tl.arange(0, 16) >> shift
    return ((block[:, None] - 1) == block[None, :]) & ((block & 1) == 1)[:, None]


@triton.jit
def _near_factors(b, sums, shift, start, T, H, K, first_key, BK: tl.constexpr):
    """[16, BK], exp(−|b_t − b_r|) of the own tokens for blocks of 2^shift tokens."""
    rows = tl.arange(0, 16)
    reference = ((rows >> (shift + 1)) << (shift + 1)) + (1 << shift) - 1
    return decay(-tl.abs(sums - load_rows(b, reference, start, T, H, K, first_key, BK)))


@triton.jit
def _same_piece(pieces, own_start, start, T, WIDTH: tl.constexpr):
    """[16, WIDTH], which of WIDTH tokens from `start` on are of the same piece as each own token."""
    rows = tl.arange(0, 16)
    others = tl.arange(0, WIDTH)
    own = tl.load(pieces + own_start + rows, mask=rows < T - own_start, other=-1)
    other = tl.load(pieces + start + others, mask=others < T - start, other=-1)
    return own[:, None] == other[None, :]


@triton.jit
def _store_scores(scores, value, own, first, C: tl.constexpr, WIDTH: tl.constexpr):
    """Write [16, WIDTH] of a chunk's scores, at row `own` and column `first`."""
    rows = own + tl.arange(0, 16)
    columns = first + tl.arange(0, WIDTH)
    tl.store(scores + rows[:, None] * C + columns[None, :], value.to(scores.dtype.element_ty))


@triton.jit
def _write_far_scores(
    q,
    k,
    b,
    pieces,
    scores,
    scale,
    chunk_start,
    own,
    T,
    H,
    K,
    C: tl.constexpr,
    BK: tl.constexpr,
    WIDTH: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the scores of the own tokens with their partners at blocks of WIDTH tokens, where the own are the later."""
    is_later, first, reference = _partners(own, WIDTH)
    if is_later:
        total = tl.zeros([16, WIDTH], tl.float32)
        for first_key in range(0, K, BK):
            middle = load_row(b, chunk_start + reference, T, H, K, first_key, BK)
            sums = load_tile(b, chunk_start + own, T, H, K, first_key, 16, BK)
            queries = load_tile(q, chunk_start + own, T, H, K, first_key, 16, BK)
            later = (queries.to(tl.float32) * decay(-tl.abs(sums - middle[None, :]))).to(queries.dtype)
            their_sums = load_tile(b, chunk_start + first, T, H, K, first_key, WIDTH, BK)
            keys = load_tile(k, chunk_start + first, T, H, K, first_key, WIDTH, BK)
            earlier = (keys.to(tl.float32) * decay(-tl.abs(their_sums - middle[None, :]))).to(keys.dtype)
            total += tl.dot(later, tl.trans(earlier), input_precision=PRECISION)
        if DOCUMENTS:
            same = _same_piece(pieces, chunk_start + own, chunk_start + first, T, WIDTH)
            total = tl.where(same, total, 0.0)
        _store_scores(scores, total * scale, own, first, C, WIDTH)


@triton.jit
def scores_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    b,  # [B, T, H, K] fp32, sums of g inside chunks
    pieces,  # [T] int32, read with DOCUMENTS
    scores,  # [N, B, H, C, C], written where j <= i: scale · Σ_K q_i ⊙ k_j ⊙ exp(b_i − b_j)
    scale,
    T,
    H,
    K,
    BH,
    C: tl.constexpr,
    BK: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program makes 16 rows of the scores of one chunk of one head. Pairs with j > i in other sixteens than their
    row's are not written; those in the same are 0."""
    chunk = tl.program_id(0) // (C // 16)
    own = (tl.program_id(0) % (C // 16)) * 16
    batch_head = tl.program_id(1)
    q += head_offset(batch_head, T, H, K)
    k += head_offset(batch_head, T, H, K)
    b += head_offset(batch_head, T, H, K)
    scores += (chunk.to(tl.int64) * BH + batch_head) * C * C
    chunk_start = chunk * C
    start = chunk_start + own
    rows = tl.arange(0, 16)

    _write_far_scores(q, k, b, pieces, scores, scale, chunk_start, own, T, H, K, C, BK, 16, DOCUMENTS, PRECISION)
    _write_far_scores(q, k, b, pieces, scores, scale, chunk_start, own, T, H, K, C, BK, 32, DOCUMENTS, PRECISION)

    near = tl.zeros([16, 16], tl.float32)
    for first_key in range(0, K, BK):
        queries = load_tile(q, start, T, H, K, first_key, 16, BK)
        keys = load_tile(k, start, T, H, K, first_key, 16, BK)
        sums = load_tile(b, start, T, H, K, first_key, 16, BK)
        self = tl.sum(queries.to(tl.float32) * keys.to(tl.float32), axis=1)
        near += tl.where(rows[:, None] == rows[None, :], self[:, None], 0.0)
        for shift in range(4):
            factors = _near_factors(b, sums, shift, start, T, H, K, first_key, BK)
            later = (queries.to(tl.float32) * factors).to(queries.dtype)
            earlier = (keys.to(tl.float32) * factors).to(queries.dtype)
            products = tl.dot(later, tl.trans(earlier), input_precision=PRECISION)
            near += tl.where(_near_pairs(shift), products, 0.0)
    if DOCUMENTS:
        near = tl.where(_same_piece(pieces, start, start, T, 16), near, 0.0)
    _store_scores(scores, near * scale, own, own, C, 16)


@triton.jit
def _far_score_grads(v, do, chunk_start, own, T, H, V, BV: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """[16, WIDTH], do vᵀ of the own tokens and their partners at blocks of WIDTH tokens, or v doᵀ where the own tokens
    are the earlier ones."""
    is_later, first, _ = _partners(own, WIDTH)
    total = tl.zeros([16, WIDTH], tl.float32)
    for first_value in range(0, V, BV):
        if is_later:
            mine = load_tile(do, chunk_start + own, T, H, V, first_value, 16, BV)
            theirs = load_tile(v, chunk_start + first, T, H, V, first_value, WIDTH, BV)
        else:
            mine = load_tile(v, chunk_start + own, T, H, V, first_value, 16, BV)
            theirs = load_tile(do, chunk_start + first, T, H, V, first_value, WIDTH, BV)
        total += tl.dot(mine, tl.trans(theirs), input_precision=PRECISION)
    return total


@triton.jit
def _far_factors(
    q, k, b, queries, keys, sums, chunk_start, own, T, H, K, first_key, BK: tl.constexpr, WIDTH: tl.constexpr
):
    """At blocks of WIDTH tokens: [16, BK] factors of the own tokens; these, queries or keys, times their factors;
    [WIDTH, BK], the partners, keys or queries, times theirs."""
    is_later, first, reference = _partners(own, WIDTH)
    middle = load_row(b, chunk_start + reference, T, H, K, first_key, BK)
    their_sums = load_tile(b, chunk_start + first, T, H, K, first_key, WIDTH, BK)
    if is_later:
        theirs = load_tile(k, chunk_start + first, T, H, K, first_key, WIDTH, BK)
    else:
        theirs = load_tile(q, chunk_start + first, T, H, K, first_key, WIDTH, BK)
    factors = decay(-tl.abs(sums - middle[None, :]))
    mine = tl.where(is_later, queries, keys).to(tl.float32) * factors
    decayed = theirs.to(tl.float32) * decay(-tl.abs(their_sums - middle[None, :]))
    return factors, mine.to(queries.dtype), decayed.to(queries.dtype)


@triton.jit
def intra_grads_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    b,  # [B, T, H, K] fp32, sums of g inside chunks
    do,  # [B, T, H, V]
    pieces,  # [T] int32, read with DOCUMENTS
    states,  # [N, B, H, K, V]: the true states before the chunks
    scores,  # [N, B, H, C, C], written: as in `scores_kernel`
    dq,  # [B, T, H, K], written, complete
    dk,  # [B, T, H, K], written: the part that stays inside the chunk
    terms,  # [B, T, H, K] fp32, written: q ⊙ dq − k ⊙ dk with this dk
    scale,
    T,
    H,
    K,
    V,
    BH,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program makes the gradients of 16 tokens of one head. Nothing here depends on gradients of states:

    dA = scale · do vᵀ,    dq_i = Σ_j dA_ij k_j ⊙ exp(b_i − b_j) + scale · exp(b_i) ⊙ S do_i,
    dk_j = Σ_i dA_ij q_i ⊙ exp(b_i − b_j)

    A pair (i, j) enters `terms` at i and, with the other sign, at j. Both are made of the same rounded factors, so that
    they cancel in the sums over later tokens that make dg: else their rounding would spread over a chunk's tokens,
    which is more than dg itself where decays are strong.
    """
    chunk = tl.program_id(0) // (C // 16)
    own = (tl.program_id(0) % (C // 16)) * 16
    batch_head = tl.program_id(1)
    q += head_offset(batch_head, T, H, K)
    k += head_offset(batch_head, T, H, K)
    b += head_offset(batch_head, T, H, K)
    dq += head_offset(batch_head, T, H, K)
    dk += head_offset(batch_head, T, H, K)
    terms += head_offset(batch_head, T, H, K)
    v += head_offset(batch_head, T, H, V)
    do += head_offset(batch_head, T, H, V)
    index = chunk.to(tl.int64) * BH + batch_head
    scores += index * C * C
    chunk_start = chunk * C
    start = chunk_start + own
    rows = tl.arange(0, 16)
    own_is_own = rows[:, None] == rows[None, :]

    grads_16 = scale * _far_score_grads(v, do, chunk_start, own, T, H, V, BV, 16, PRECISION)
    grads_32 = scale * _far_score_grads(v, do, chunk_start, own, T, H, V, BV, 32, PRECISION)
    near_grads = tl.zeros([16, 16], tl.float32)
    for first_value in range(0, V, BV):
        output_grads = load_tile(do, start, T, H, V, first_value, 16, BV)
        values = load_tile(v, start, T, H, V, first_value, 16, BV)
        near_grads += tl.dot(output_grads, tl.trans(values), input_precision=PRECISION)
    near_grads *= scale
    later_16, first_16, _ = _partners(own, 16)
    later_32, first_32, _ = _partners(own, 32)
    if DOCUMENTS:
        same_16 = _same_piece(pieces, start, chunk_start + first_16, T, 16)
        same_32 = _same_piece(pieces, start, chunk_start + first_32, T, 32)
        near_same = _same_piece(pieces, start, start, T, 16)
        grads_16 = tl.where(same_16, grads_16, 0.0)
        grads_32 = tl.where(same_32, grads_32, 0.0)
        near_grads = tl.where(near_same, near_grads, 0.0)
    self_grads = tl.sum(tl.where(own_is_own, near_grads, 0.0), axis=1)
    grads_16 = grads_16.to(q.dtype.element_ty)
    grads_32 = grads_32.to(q.dtype.element_ty)
    near_grads = near_grads.to(q.dtype.element_ty)

    scores_16 = tl.zeros([16, 16], tl.float32)
    scores_32 = tl.zeros([16, 32], tl.float32)
    near = tl.zeros([16, 16], tl.float32)
    for first_key in range(0, K, BK):
        sums = load_tile(b, start, T, H, K, first_key, 16, BK)
        query_grads = tl.zeros([16, BK], tl.float32)
        for first_value in range(0, V, BV):
            output_grads = load_tile(do, start, T, H, V, first_value, 16, BV)
            pointers, inside = state_pointers(states, index, K, V, first_key, first_value, BK, BV)
            state = tl.load(pointers, mask=inside, other=0.0).to(output_grads.dtype)
            query_grads += tl.dot(output_grads, tl.trans(state), input_precision=PRECISION)
        from_start = decay(sums) * scale
        if DOCUMENTS:
            own_pieces = tl.load(pieces + start + rows, mask=rows < T - start, other=-1)
            before = tl.load(pieces + chunk_start - 1, mask=chunk_start > 0, other=0)
            from_start = tl.where((own_pieces == before)[:, None], from_start, 0.0)
        query_grads *= from_start

        queries = load_tile(q, start, T, H, K, first_key, 16, BK)
        keys = load_tile(k, start, T, H, K, first_key, 16, BK)
        pair_terms = queries.to(tl.float32) * query_grads
        query_grads += self_grads[:, None] * keys.to(tl.float32)
        key_grads = self_grads[:, None] * queries.to(tl.float32)

        factors, mine, theirs = _far_factors(q, k, b, queries, keys, sums, chunk_start, own, T, H, K, first_key, BK, 16)
        if later_16:
            scores_16 += tl.dot(mine, tl.trans(theirs), input_precision=PRECISION)
        seen = tl.dot(grads_16, theirs, input_precision=PRECISION)
        query_grads += tl.where(later_16, factors * seen, 0.0)
        key_grads += tl.where(later_16, 0.0, factors * seen)
        pair_terms += tl.where(later_16, 1.0, -1.0) * mine.to(tl.float32) * seen

        factors, mine, wide_theirs = _far_factors(
            q, k, b, queries, keys, sums, chunk_start, own, T, H, K, first_key, BK, 32
        )
        if later_32:
            scores_32 += tl.dot(mine, tl.trans(wide_theirs), input_precision=PRECISION)
        seen = tl.dot(grads_32, wide_theirs, input_precision=PRECISION)
        query_grads += tl.where(later_32, factors * seen, 0.0)
        key_grads += tl.where(later_32, 0.0, factors * seen)
        pair_terms += tl.where(later_32, 1.0, -1.0) * mine.to(tl.float32) * seen

        self = tl.sum(queries.to(tl.float32) * keys.to(tl.float32), axis=1)
        near += tl.where(own_is_own, self[:, None], 0.0)
        for shift in range(4):
            factors = _near_factors(b, sums, shift, start, T, H, K, first_key, BK)
            later = (queries.to(tl.float32) * factors).to(queries.dtype)
            earlier = (keys.to(tl.float32) * factors).to(queries.dtype)
            pairs = _near_pairs(shift)
            near += tl.where(pairs, tl.dot(later, tl.trans(earlier), input_precision=PRECISION), 0.0)
            pair_grads = tl.where(pairs, near_grads, 0.0).to(queries.dtype)
            seen = tl.dot(pair_grads, earlier, input_precision=PRECISION)
            query_grads += factors * seen
            pair_terms += later.to(tl.float32) * seen
            reached = tl.dot(tl.trans(pair_grads), later, input_precision=PRECISION)
            key_grads += factors * reached
            pair_terms -= earlier.to(tl.float32) * reached
        store_tile(dq, query_grads, start, T, H, K, first_key, 16, BK)
        store_tile(dk, key_grads, start, T, H, K, first_key, 16, BK)
        store_tile(terms, pair_terms, start, T, H, K, first_key, 16, BK)

    if DOCUMENTS:
        scores_16 = tl.where(same_16, scores_16, 0.0)
        scores_32 = tl.where(same_32, scores_32, 0.0)
        near = tl.where(near_same, near, 0.0)
    _store_scores(scores, near * scale, own, own, C, 16)
    if later_16:
        _store_scores(scores, scores_16 * scale, own, first_16, C, 16)
    if later_32:
        _store_scores(scores, scores_32 * scale, own, first_32, C, 32)
