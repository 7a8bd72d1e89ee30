"""Rounding of rows and columns to fp8, with the arithmetic of `zeco_train.ops.linear.rows`, bit for bit.

Sizes are compared as integers: the bits of fp32 without the sign rise with the number, infinity and NaN are above all
others, and a maximum of integers does not depend on the order.
"""

from __future__ import annotations

import triton
import triton.language as tl

FRACTION_BITS = tl.constexpr(23)
FRACTION = tl.constexpr((1 << 23) - 1)
SIZE = tl.constexpr((1 << 31) - 1)  # all but the sign
INFINITY = tl.constexpr(0xFF << 23)
LARGEST_FRACTION = tl.constexpr(3 << 21)
LARGEST_EXPONENT = tl.constexpr(8)
EXPONENTS = tl.constexpr(254)


@triton.jit
def _size_bits(x):
    return x.to(tl.float32).to(tl.int32, bitcast=True) & SIZE


@triton.jit
def _powers(bits):
    """Factors and scales of rows whose largest number has these bits."""
    above = ((bits & FRACTION) > LARGEST_FRACTION).to(tl.int32)
    exponents = tl.maximum((bits >> FRACTION_BITS) + above - LARGEST_EXPONENT, 1)
    factors = ((-exponents + EXPONENTS) << FRACTION_BITS).to(tl.float32, bitcast=True)
    scales = (exponents << FRACTION_BITS).to(tl.float32, bitcast=True)
    return factors, tl.where(bits >= INFINITY, float("nan"), scales)


@triton.jit
def rows_kernel(
    parts,  # a tuple of [M, K_i], elements of a row side by side
    strides,  # a tuple: from row to row of each
    values,  # [M, ΣK_i] fp8, contiguous, written
    scales,  # [M] fp32, written
    WIDTHS: tl.constexpr,  # a tuple: K_i
    TOTAL: tl.constexpr,  # ΣK_i
    BLOCK: tl.constexpr,
):
    """A program rounds one row of matrices side by side; its second look at the row finds it in a cache."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.int32)
    for part in tl.static_range(len(WIDTHS)):
        largest = _sizes_of_row(parts[part] + row * strides[part], largest, WIDTHS[part], BLOCK)
    factor, scale = _powers(tl.max(largest, axis=0))
    tl.store(scales + row, scale)
    target = values + row * TOTAL
    for part in tl.static_range(len(WIDTHS)):
        _round_row(parts[part] + row * strides[part], factor, target, WIDTHS[part], BLOCK)
        target += WIDTHS[part]


@triton.jit
def _sizes_of_row(x, largest, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    for start in tl.static_range(0, WIDTH, BLOCK):
        values = tl.load(x + start + columns, mask=start + columns < WIDTH, other=0.0)
        largest = tl.maximum(largest, _size_bits(values))
    return largest


@triton.jit
def _round_row(x, factor, target, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    for start in tl.static_range(0, WIDTH, BLOCK):
        mask = start + columns < WIDTH
        values = tl.load(x + start + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(target + start + columns, (values * factor).to(target.dtype.element_ty), mask=mask)


@triton.jit
def column_sizes_kernel(
    x,  # [N, D], elements of a row side by side
    stride,  # from row to row
    largest,  # [D] int32, raised to the bits of the largest number of each column
    rows,  # of a program
    N,
    D,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """A program finds the largest numbers of BD columns in some rows."""
    columns = tl.program_id(0) * BD + tl.arange(0, BD)
    first = tl.program_id(1) * rows
    found = tl.zeros([BN, BD], tl.int32)
    for start in range(first, tl.minimum(first + rows, N), BN):
        row = start + tl.arange(0, BN)
        inside = (row < tl.minimum(first + rows, N))[:, None] & (columns < D)
        tile = tl.load(x + row[:, None].to(tl.int64) * stride + columns, mask=inside, other=0.0)
        found = tl.maximum(found, _size_bits(tile))
    tl.atomic_max(largest + columns, tl.max(found, axis=0), mask=columns < D, sem="relaxed")


@triton.jit
def columns_kernel(
    x,  # [N, D], elements of a row side by side
    stride,  # from row to row
    largest,  # [D] int32
    values,  # fp8, written: element (d, n) at d · total + n
    scales,  # [D] fp32, written
    total,
    N,
    D,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """A program rounds a tile of BN rows and BD columns, and writes it transposed."""
    columns = tl.program_id(0) * BD + tl.arange(0, BD)
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    factors, found = _powers(tl.load(largest + columns, mask=columns < D, other=0))
    tile = tl.load(
        x + rows[:, None].to(tl.int64) * stride + columns, mask=(rows < N)[:, None] & (columns < D), other=0.0
    )
    rounded = tl.trans((tile.to(tl.float32) * factors).to(values.dtype.element_ty))
    target = values + columns[:, None].to(tl.int64) * total + rows
    tl.store(target, rounded, mask=(columns < D)[:, None] & (rows < N))
    if tl.program_id(1) == 0:
        tl.store(scales + columns, found, mask=columns < D)
