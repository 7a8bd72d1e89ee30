"""Decays of a chunk's tokens, summed from its first one: read from memory, or a constant times the token's position.

Sums are fp32, negative logarithms. All factors are exponentials of differences of two of them, at most 1.

And dg, from the sums over K that the kernels of dq and dk write (`zeco_train.ops.scalar_decay.kernels.walk`). By where
its pairs lie, it is for tokens t of a chunk that b_end decays in all

    dg_t = Σ_{i >= t} (q_i · dq_i − k_i · dk_i  within the chunk)       both from the chunk, or dq from S
         + Σ_{j < t} k_j · dk_j  from dS                                j in the chunk, i after it
         + exp(b_end) <S, dS>                                           j before the chunk, i after it

with S before the chunk and dS after it. The last is <S, dS> after the chunk less all k_j · dk_j from dS, a difference
that rounding errors survive; so nothing passes over a chunk whose decay is below the rounding of its operands. At the
chunk's start the first and the last term are <S, dS> there, for the chunk before.

Pairs that do not cross t cancel in the first sum but for fp32's rounding. A cut, a token that no state survives, ends
the sum of the tokens before it, and its own dg is 0: a restart, or a decay that fp32 rounds away. So strong decays,
whose dg is small, have no long sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.kernels import jit
from zeco_train.ops.gla.kernels.tiles import decay, load_doc_ids

# exp is 0 in fp32 from here on, and a reset written as −1e9 would leave the sums after it no digits.
LEAST: tl.constexpr = tl.constexpr(-104.0)

if triton.knobs.runtime.interpret:

    @jit
    def _product(x, y):
        """Compute x · y in fp32."""
        return x * y
else:

    @jit
    def _product(x, y):
        """Compute x · y, rounded to fp32: fused with a later subtraction, equal sums would differ by their rounding."""
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )


@jit
def decay_sums_kernel(
    g,  # [B, T, H] fp32, log-decays
    sums,  # [B, H, T] fp32, written: their sums inside chunks, each through the token itself
    T,
    H,
    C: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One program sums one chunk of HEADS heads. The output is contiguous in time, as the walks read it."""
    start = tl.program_id(0) * C
    batch = tl.program_id(1).to(tl.int64)
    tokens = tl.arange(0, C)
    heads = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    inside = (tokens < T - start)[:, None] & (heads < H)[None, :]
    offsets = (start + tokens).to(tl.int64)
    own = tl.load(g + (batch * T + offsets)[:, None] * H + heads[None, :], mask=inside, other=0.0)
    # in fp64: sums by a tree of fp32 sums differ by ulps from one token to the next, and decays are such differences
    total = tl.cumsum(tl.maximum(own, LEAST).to(tl.float64), axis=0)
    tl.store(sums + (batch * H + heads)[None, :] * T + offsets[:, None], total.to(tl.float32), mask=inside)


@jit
def load_rate(decays, batch_head, H, FIXED: tl.constexpr):
    """The log-decay of every token of a head, if it is FIXED, else 0, not used."""
    if FIXED:
        return tl.maximum(tl.load(decays + batch_head % H), LEAST)
    return 0.0


@jit
def load_sums_of(decays, rate, batch_head, start, rows, T, C: tl.constexpr, FIXED: tl.constexpr):
    """Log-decay from the start of a chunk through these of its tokens, past the end that through the last.

    decays: [B, H, T], of `decay_sums_kernel`; not read if FIXED.
    """
    rows = tl.minimum(rows, tl.minimum(C, T - start) - 1)
    if FIXED:
        return _product(rate, (rows + 1).to(tl.float32))
    return tl.load(decays + batch_head.to(tl.int64) * T + start + rows)


@jit
def load_sums(decays, rate, batch_head, start, T, C: tl.constexpr, FIXED: tl.constexpr):
    """[C], `load_sums_of` all tokens of a chunk; and that through the last."""
    own = load_sums_of(decays, rate, batch_head, start, tl.arange(0, C), T, C, FIXED)
    return own, load_sums_of(decays, rate, batch_head, start, C - 1, T, C, FIXED)


@jit
def key_head_offset(batch_head, T, H, GROUPS, D):
    """`head_offset` of the tensor [B, T, GROUPS, D] that serves head `batch_head` of H."""
    batch = batch_head // H
    group = (batch_head % H) // (H // GROUPS)
    return batch.to(tl.int64) * T * GROUPS * D + group * D


# Log-decay of a cut: exp of it is half of fp32's rounding.
LEAST_SURVIVING: tl.constexpr = tl.constexpr(-17.3287)


@jit
def _add_joined(later, is_last_later, own, is_last):
    """Add to a token's own number the sum of those after it, unless it is the last of its sum."""
    return own + tl.where(is_last != 0, 0.0, later), is_last | is_last_later


@jit
def decay_grads_kernel(
    query_sums,  # [QUERY_TILES, B, H, T] fp32: q · dq
    key_sums,  # [KEY_TILES, B, H, T] fp32: k · dk
    key_state_sums,  # [KEY_TILES, B, H, T] fp32: k · dk from dS
    boundary_terms,  # [BORDER_TILES, N / SPAN, B, H] fp32: <S, dS> at spans' ends
    decays,  # [B, H, T] fp32, sums of g inside chunks
    doc_ids,  # [T] int32, read with DOCUMENTS
    dg,  # [B, T, H] fp32, written
    T,
    H,
    BH,
    num_spans,
    C: tl.constexpr,
    SPAN: tl.constexpr,
    QUERY_TILES: tl.constexpr,
    KEY_TILES: tl.constexpr,
    BORDER_TILES: tl.constexpr,
    HEADS: tl.constexpr,
    NEGLIGIBLE: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """One program goes through one span of HEADS heads, from its last chunk to its first.

    HEADS: dg is contiguous in heads, its terms in time. NEGLIGIBLE: where a chunk's decay is no larger, nothing passes
    over it.
    """
    span = tl.program_id(0)
    batch = tl.program_id(1)
    heads = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    is_head = heads < H
    index = batch * H + heads
    rows = tl.arange(0, C)
    size = tl.cast(BH, tl.int64) * T
    at_border = tl.zeros([HEADS], tl.float32)
    for border_tile in range(BORDER_TILES):
        border = (border_tile * num_spans + span) * BH + index
        at_border += tl.load(boundary_terms + border, mask=is_head, other=0.0)
    # the last span's last chunks may lie past the end
    for step in range(tl.cdiv(tl.minimum(SPAN * C, T - span * SPAN * C), C)):
        chunk = tl.minimum((span + 1) * SPAN, tl.cdiv(T, C)) - 1 - step
        start = chunk * C
        inside = is_head[:, None] & (rows < T - start)[None, :]
        place = index.to(tl.int64)[:, None] * T + start + rows[None, :]
        of_state = tl.zeros([HEADS, C], tl.float32)
        terms = tl.zeros([HEADS, C], tl.float32)
        for tile in tl.static_range(QUERY_TILES):
            terms += tl.load(query_sums + tile * size + place, mask=inside, other=0.0)
        for tile in tl.static_range(KEY_TILES):
            terms -= tl.load(key_sums + tile * size + place, mask=inside, other=0.0)
            of_state += tl.load(key_state_sums + tile * size + place, mask=inside, other=0.0)
        sums = tl.load(decays + place, mask=inside, other=0.0)
        sums_before = tl.load(decays + place - 1, mask=inside & (rows > 0)[None, :], other=0.0)
        has_next = (rows < tl.minimum(T - start, C) - 1)[None, :]
        sums_after = tl.load(decays + place + 1, mask=inside & has_next, other=0.0)
        cuts = inside & (sums - sums_before < LEAST_SURVIVING)
        # the sum of a token before a cut ends with it
        is_last = inside & has_next & (sums_after - sums < LEAST_SURVIVING)
        end = index.to(tl.int64) * T + tl.minimum(start + C, T) - 1
        survives = decay(tl.load(decays + end, mask=is_head, other=0.0))
        if DOCUMENTS:
            own, before, end_id = load_doc_ids(doc_ids, start, T, C)
            previous = tl.load(doc_ids + start + rows - 1, mask=(rows < T - start) & (start + rows > 0), other=0)
            following = tl.load(doc_ids + start + rows + 1, mask=rows < tl.minimum(T - start, C) - 1, other=0)
            cuts = cuts | (inside & (own != previous)[None, :])
            is_last = is_last | (inside & has_next & (own != following)[None, :])
            survives = tl.where(before == end_id, survives, 0.0)
        grads, _ = tl.associative_scan((terms + of_state, is_last.to(tl.int32)), 1, _add_joined, reverse=True)
        grads += tl.cumsum(of_state, axis=1) - of_state
        passing = tl.where(survives > NEGLIGIBLE, at_border - tl.sum(of_state, axis=1), 0.0)
        grads = tl.where(cuts, 0.0, grads + passing[:, None])
        at_border = tl.sum(tl.where((rows == 0)[None, :], grads, 0.0), axis=1)
        target = dg + (batch.to(tl.int64) * T + start + rows)[:, None] * H + heads[None, :]
        tl.store(target, tl.trans(grads), mask=tl.trans(inside))
