"""Launches of the kernels that round to fp8."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from zeco_train.kernels.rows.kernels import column_sizes_kernel, columns_kernel, rows_kernel

# Elements of a row that a program's threads load at once: 32 bytes a thread in bf16.
_BLOCK, _WARPS = 2048, 4
# Tiles of columns: lines of 128 bytes are read in bf16, and of 64 written.
_TILE_ROWS, _TILE_COLUMNS = 64, 64
# Rows of a program that looks for the largest numbers; many programs keep enough bytes on their way.
_SIZES_ROWS = 256


def launch_rows(parts: Sequence[Tensor], values: Tensor, scales: Tensor) -> None:
    """Round the rows of matrices [M, K_i], side by side, in bf16 or fp32.

    Args:
        parts: of any strides.
        values: [M, ΣK_i] fp8, contiguous, written.
        scales: [M, 1] fp32, written.
    """
    parts = [_side_by_side(part) for part in parts]
    rows, total = values.shape
    block = min(_BLOCK, triton.next_power_of_2(total))
    rows_kernel[(rows,)](
        tuple(parts), tuple(part.stride(0) for part in parts), values, scales,
        WIDTHS=tuple(part.shape[1] for part in parts), TOTAL=total, BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip


def launch_columns(parts: Sequence[Tensor], values: Tensor, scales: Tensor) -> None:
    """Round the columns of matrices [N_i, D], one above the other, in bf16 or fp32.

    Args:
        parts: of any strides.
        values: [D, ΣN_i] fp8, contiguous, written.
        scales: [D, 1] fp32, written.
    """
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
