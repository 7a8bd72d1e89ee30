"""Decays of a chunk's tokens, summed from its first one: read from memory, or a constant times the token's position.

Sums are fp32, negative logarithms. All factors are exponentials of differences of two of them, at most 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

# exp is 0 in fp32 from here on, and a reset written as −1e9 would leave the sums after it no digits.
LEAST: tl.constexpr = tl.constexpr(-104.0)

if triton.knobs.runtime.interpret:

    @triton.jit
    def _product(x, y):
        """Compute x · y in fp32."""
        return x * y
else:

    @triton.jit
    def _product(x, y):
        """Compute x · y, rounded to fp32: fused with a later subtraction, equal sums would differ by their rounding."""
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
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


@triton.jit
def load_rate(decays, batch_head, H, FIXED: tl.constexpr):
    """The log-decay of every token of a head, if it is FIXED, else 0, not used."""
    if FIXED:
        return tl.maximum(tl.load(decays + batch_head % H), LEAST)
    return 0.0


@triton.jit
def load_sums(decays, rate, batch_head, start, T, C: tl.constexpr, FIXED: tl.constexpr):
    """[C], log-decay from the chunk's start through each token, past the end that through the last; and the last.

    decays: [B, H, T], of `decay_sums_kernel`; not read if FIXED.
    """
    last = tl.minimum(C, T - start) - 1
    rows = tl.minimum(tl.arange(0, C), last)
    if FIXED:
        return _product(rate, (rows + 1).to(tl.float32)), _product(rate, (last + 1).to(tl.float32))
    first = decays + batch_head.to(tl.int64) * T + start
    return tl.load(first + rows), tl.load(first + last)


@triton.jit
def key_head_offset(batch_head, T, H, GROUPS, D):
    """`head_offset` of the tensor [B, T, GROUPS, D] that serves head `batch_head` of H."""
    batch = batch_head // H
    group = (batch_head % H) // (H // GROUPS)
    return batch.to(tl.int64) * T * GROUPS * D + group * D
