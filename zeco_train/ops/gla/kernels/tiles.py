"""Helpers shared by the operators' kernels: loads of a chunk's tiles, and masks at document and chunk borders.

A chunk is `C` tokens of one head. Tensors over tokens are [B, T, H, D], contiguous; a kernel gets a pointer to the
first element of its (batch, head) and steps over tokens with a stride of H·D. Offsets that grow with T are 64-bit.

`b` is the cumulative sum of g from the chunk's first token through each token: all exponents are differences b_i − b_j
with i >= j, so no factor exceeds 1 and nothing is divided by a decay. `doc_ids`, [T] int32, is the number of restarts
through each token; a token sees another one, or a state at a border, if both have the same. Before the rank it is 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.kernels import jit

# Factors of e^60 leave room for tokens of 1e12 in fp32 and bf16. Products of a query with a later key, up to e^120, may
# overflow; they are dropped.
LARGEST_EXPONENT: tl.constexpr = tl.constexpr(60.0)
# fp32 rounds to 2^-24, and sums over a chunk are of up to 2^12 pairs in 2^8 channels: those of 2^-44 do not count.
VANISHING: tl.constexpr = tl.constexpr(-44 * 0.6931472)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)

if triton.knobs.runtime.interpret:

    @jit
    def decay(x):
        """exp(x), fp32."""
        return tl.exp(x)

    @jit
    def decay_between(x):
        """exp(−|x|), fp32."""
        return tl.exp(-tl.abs(x))

    @jit
    def round_to_bf16(x):
        """fp32 to bf16."""
        return x.to(tl.bfloat16)
else:

    @jit
    def decay(x):
        """exp(x), fp32; results below 2^-126 are 0. `tl.exp` takes four more instructions to keep these."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * LOG2_E], dtype=tl.float32, is_pure=True, pack=1
        )

    @jit
    def decay_between(x):
        """exp(−|x|), fp32, as `decay`; the sign is in the constant: `decay(-tl.abs(x))` would add a subtraction."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [tl.abs(x) * -LOG2_E], dtype=tl.float32, is_pure=True, pack=1
        )

    @jit
    def round_to_bf16(x):
        """fp32 to bf16, two per instruction; Triton takes one instruction each if they are then used separately."""
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@jit
def head_offset(batch_head, T, H, D):
    """Elements before the first one of a (batch, head) in [B, T, H, D]."""
    batch = batch_head // H
    return batch.to(tl.int64) * T * H * D + (batch_head % H) * D


@jit
def load_tile(x, start, T, H, D, first_column, C: tl.constexpr, WIDTH: tl.constexpr):
    """[C, WIDTH] of one head's tokens from `start` on, columns from `first_column` on; zeros outside."""
    rows = tl.arange(0, C)
    columns = first_column + tl.arange(0, WIDTH)
    inside = (rows < T - start)[:, None] & (columns < D)[None, :]
    pointers = x + start.to(tl.int64) * H * D + (rows * H * D)[:, None] + columns[None, :]
    return tl.load(pointers, mask=inside, other=0.0)


@jit
def store_tile(x, value, start, T, H, D, first_column, C: tl.constexpr, WIDTH: tl.constexpr):
    """The inverse of `load_tile`, in the dtype of x."""
    rows = tl.arange(0, C)
    columns = first_column + tl.arange(0, WIDTH)
    inside = (rows < T - start)[:, None] & (columns < D)[None, :]
    pointers = x + start.to(tl.int64) * H * D + (rows * H * D)[:, None] + columns[None, :]
    tl.store(pointers, value.to(x.dtype.element_ty), mask=inside)


@jit
def load_last_row(b, start, T, H, D, first_column, C: tl.constexpr, WIDTH: tl.constexpr):
    """[WIDTH], b at the chunk's last token: its summed log-decay."""
    last = tl.minimum(start + C, T) - 1
    columns = first_column + tl.arange(0, WIDTH)
    return tl.load(b + last.to(tl.int64) * H * D + columns, mask=columns < D, other=0.0)


@jit
def load_rows(b, rows, start, T, H, D, first_column, WIDTH: tl.constexpr):
    """[len(rows), WIDTH], b at the given tokens of the chunk."""
    columns = first_column + tl.arange(0, WIDTH)
    inside = (rows < T - start)[:, None] & (columns < D)[None, :]
    pointers = b + start.to(tl.int64) * H * D + (rows * H * D)[:, None] + columns[None, :]
    return tl.load(pointers, mask=inside, other=0.0)


@jit
def split_pairs(shift, C: tl.constexpr):
    """[C, C], the pairs, in either order, that are split by blocks of 2^shift tokens (ops/gla/kernels/intra.py)."""
    block = tl.arange(0, C) >> shift
    return (block ^ 1)[:, None] == block[None, :]


@jit
def split_decays(b, sums, shift, start, T, H, K, first_key, C: tl.constexpr, BK: tl.constexpr):
    """For blocks of 2^shift tokens: [C], which tokens lie in later blocks; [C, BK], decays to their pair's middle."""
    block = tl.arange(0, C) >> shift
    reference = ((block | 1) << shift) - 1
    factors = decay_between(sums - load_rows(b, reference, start, T, H, K, first_key, BK))
    return (block & 1) == 1, factors


@jit
def laid_out_like(x, product):
    """x, in the register layout of a matrix product of the same shape.

    Triton keeps a loaded tile in the layout of its load, and converts it through shared memory wherever it meets a
    product, here at every size. A select between the two that it cannot fold makes it convert x here, once.
    """
    never = tl.program_id(0) < 0
    return tl.where(never, product.to(x.dtype), x)


@jit
def load_doc_ids(doc_ids, start, T, C: tl.constexpr):
    """[C] doc_ids of the chunk's tokens (−1 past the end), that before the chunk, and that of its last token."""
    rows = tl.arange(0, C)
    own = tl.load(doc_ids + start + rows, mask=rows < T - start, other=-1)
    before = tl.load(doc_ids + start - 1, mask=start > 0, other=0)
    end = tl.load(doc_ids + tl.minimum(start + C, T) - 1)
    return own, before, end


@jit
def sum_tokens(which, x, PARTS: tl.constexpr):
    """[C, WIDTH], for each row of the mask `which` [C, C] the sum of those tokens of x [C, WIDTH], fp32.

    A product with ones, several times faster than a cumulative sum along the rows. PARTS: x is split into this many
    bf16 parts of 8 bits each: 3 are exact, 2 are enough for gradients of bf16 tokens. 0: tf32 parts, exact, which
    Triton's interpreter also supports.
    """
    if PARTS == 0:
        return tl.dot(which.to(tl.float32), x, input_precision="tf32x3")
    ones = tl.where(which, 2.0, 0.0).to(tl.bfloat16)
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    # products by factors of 2 and 1/2, which are exact, do not accumulate in turn: all but the last of such products
    # Triton would lay out for four warps
    total = tl.dot(ones, middle) * 0.5 + tl.dot(ones, high) * 0.5
    if PARTS == 3:
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        total += tl.dot(ones, low) * 0.5
    return total


@jit
def state_pointers(states, index, K, V, first_key, first_value, BK: tl.constexpr, BV: tl.constexpr):
    """Pointers to a [BK, BV] tile of state number `index` in [.., K, V], and which of them lie inside."""
    keys = first_key + tl.arange(0, BK)
    values = first_value + tl.arange(0, BV)
    inside = (keys < K)[:, None] & (values < V)[None, :]
    return states + index.to(tl.int64) * K * V + (keys * V)[:, None] + values[None, :], inside
