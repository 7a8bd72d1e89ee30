"""Decays of a chunk's tokens, of each channel or one a head, as tiles that broadcast alike."""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.ops.gla.kernels.tiles import (
    decay,
    head_offset,
    load_doc_ids,
    load_last_row,
    load_tile,
    store_tile,
    sum_tokens,
)
from zeco_train.ops.scalar_decay.kernels.decays import LEAST


@triton.jit
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


@triton.jit
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


@triton.jit
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
