"""Rounding of rows and columns to fp8, with the arithmetic of `zeco_train.ops.linear`, bit for bit; widths of rows.

Sizes are compared as integers: the bits of fp32 without the sign rise with the number, infinity and NaN are above all
others, and a maximum of integers does not depend on the order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeco_train.kernels import jit

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


# Elements of a row that a program's threads load at once: 32 bytes a thread in bf16.
_BLOCK, _WARPS = 2048, 4
# Tiles of columns: lines of 128 bytes are read in bf16, and of 64 written.
_TILE_ROWS, _TILE_COLUMNS = 64, 64
# Rows of a program that looks for the largest numbers; many programs keep enough bytes on their way.
_SIZES_ROWS = 256


def launch_rows(parts: Sequence[Tensor], values: Tensor, scales: Tensor) -> None:
    """Round the rows of matrices [M, K_i], side by side, to values [M, ΣK_i], contiguous, and scales [M, 1] fp32."""
    parts = [_side_by_side(part) for part in parts]
    rows, total = values.shape
    block = min(_BLOCK, triton.next_power_of_2(total))
    rows_kernel[(rows,)](
        tuple(parts), tuple(part.stride(0) for part in parts), values, scales,
        WIDTHS=tuple(part.shape[1] for part in parts), TOTAL=total, BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip


def launch_columns(parts: Sequence[Tensor], values: Tensor, scales: Tensor) -> None:
    """Round the columns of matrices [N_i, D], one above the other, to values [D, ΣN_i] and scales [D, 1]."""
    columns, total = values.shape
    parts = [_side_by_side(part) for part in parts]
    largest = torch.zeros(columns, dtype=torch.int32, device=values.device)
    tiles, sizes = triton.cdiv(columns, _TILE_COLUMNS), {"BN": _TILE_ROWS, "BD": _TILE_COLUMNS, "num_warps": _WARPS}
    for x in parts:
        grid = tiles, triton.cdiv(len(x), _SIZES_ROWS)
        column_sizes_kernel[grid](x, x.stride(0), largest, _SIZES_ROWS, *x.shape, **sizes)
    start = 0
    for x in parts:
        grid = tiles, triton.cdiv(len(x), _TILE_ROWS)
        columns_kernel[grid](x, x.stride(0), largest, values[:, start:], scales, total, *x.shape, **sizes)
        start += len(x)


def _side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@jit
def resize_kernel(x, y, count, WIDTH: tl.constexpr, NEW: tl.constexpr, BLOCK: tl.constexpr):
    """Copy rows of WIDTH numbers to rows of NEW, cut or filled with zeros, `count` numbers in all; BLOCK a program."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = (first % NEW).to(tl.int32) + tl.arange(0, BLOCK)
    row, column = place // NEW, place % NEW
    inside = tl.arange(0, BLOCK) < count - first
    values = tl.load(x + first // NEW * WIDTH + row * WIDTH + column, mask=inside & (column < WIDTH), other=0.0)
    tl.store(y + first + tl.arange(0, BLOCK), values, mask=inside)
