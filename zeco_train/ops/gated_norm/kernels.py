"""The gated RMS norm and its gradients (`zeco_train.ops.gated_norm`), each in one pass over its inputs.

x and gate are read, y is written; dy, x and gate are read, dx and dgate written, and of dweight sums by program.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from zeco_train.kernels import cdiv, jit, next_power_of_2


@jit
def _tile(tensor, row, columns, inside, stride_n, stride_h, H: tl.constexpr):
    """[BR, BV] of a tensor [N, H, V], rows counted over N and H, in fp32."""
    place = (row // H).to(tl.int64) * stride_n + (row % H).to(tl.int64) * stride_h
    return tl.load(tensor + place[:, None] + columns, mask=inside, other=0.0).to(tl.float32)


@jit
def _opening_and_slope(logits, IS_SWISH: tl.constexpr):
    """The gate's function, swish or σ, and its derivative."""
    sigmoid = 1.0 / (1.0 + tl.exp(-logits))
    if IS_SWISH:
        opening = logits * sigmoid
        slope = sigmoid + opening * (1.0 - sigmoid)
    else:
        opening = sigmoid
        slope = sigmoid * (1.0 - sigmoid)
    return opening, slope


@jit
def gated_norm_kernel(
    x,  # [N, H, V], elements of a row side by side, as is the next
    gate,
    weight,  # [V]
    y,  # [N, H, V], written
    rstd,  # [N, H] fp32, written: 1 / sqrt(mean(x²) + eps)
    x_n,  # from n to n + 1, and from h to h + 1, of each
    x_h,
    gate_n,
    gate_h,
    rows,  # N · H
    eps,
    H: tl.constexpr,
    V: tl.constexpr,
    IS_SWISH: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
):
    """A program computes BR rows."""
    columns = tl.arange(0, BV)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    inside = (row < rows)[:, None] & (columns < V)
    values = _tile(x, row, columns, inside, x_n, x_h, H)
    opening, _ = _opening_and_slope(_tile(gate, row, columns, inside, gate_n, gate_h, H), IS_SWISH)
    factors = tl.load(weight + columns, mask=columns < V, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / V + eps)
    tl.store(rstd + row, scale, mask=row < rows)
    tl.store(y + row.to(tl.int64)[:, None] * V + columns, values * scale[:, None] * factors * opening, mask=inside)


@jit
def gated_norm_grads_kernel(
    dy,  # [N, H, V], elements of a row side by side, as are the next two
    x,
    gate,
    weight,  # [V]
    rstd,  # [N, H] fp32: 1 / sqrt(mean(x²) + eps)
    dx,  # [N, H, V], written, as is the next
    dgate,
    dweights,  # [programs, V] fp32, written: the sums of each program's rows
    dy_n,  # from n to n + 1, and from h to h + 1, of each
    dy_h,
    x_n,
    x_h,
    gate_n,
    gate_h,
    rows,  # N · H
    run,  # rows of a program, a multiple of BR
    H: tl.constexpr,
    V: tl.constexpr,
    IS_SWISH: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
):
    """A program walks over its rows, BR at a time."""
    program = tl.program_id(0)
    columns = tl.arange(0, BV)
    factors = tl.load(weight + columns, mask=columns < V, other=0.0).to(tl.float32)
    # Added up over rows at the end: threads that hold different rows would have to meet in each turn.
    sums = tl.zeros([BR, BV], tl.float32)
    for start in range(program * run, tl.minimum(program * run + run, rows), BR):
        row = start + tl.arange(0, BR)
        inside = (row < rows)[:, None] & (columns < V)
        grad = _tile(dy, row, columns, inside, dy_n, dy_h, H)
        logits = _tile(gate, row, columns, inside, gate_n, gate_h, H)
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        normed = _tile(x, row, columns, inside, x_n, x_h, H) * scale
        opening, slope = _opening_and_slope(logits, IS_SWISH)
        dnormed = grad * opening
        sums += dnormed * normed
        dnormed *= factors
        projection = tl.sum(dnormed * normed, axis=1)[:, None] / V
        target = row.to(tl.int64)[:, None] * V + columns
        tl.store(dx + target, (dnormed - normed * projection) * scale, mask=inside)
        tl.store(dgate + target, slope * grad * normed * factors, mask=inside)
    tl.store(dweights + program * V + columns, tl.sum(sums, axis=0), mask=columns < V)


# Elements of a tile.
_TILE = 2048
# About as many walk over the rows in the backward pass, on every device, so that sums are the same: eight for each
# multiprocessor of an H100.
_PROGRAMS = 1056


def launch_gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, is_swish: bool) -> tuple[Tensor, Tensor]:
    """The gated norm y [..., V], and 1 / sqrt(mean(x²) + eps), [..., 1] fp32, of x, gate [..., V], weight [V]."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    x, gate = _matrices(x), _matrices(gate)
    H, V = x.shape[1:]
    rows, (tile, width, warps) = x.shape[0] * H, _tile_sizes(V)
    if x.numel():
        gated_norm_kernel[(cdiv(rows, tile),)](
            x, gate, weight.contiguous(), y, rstd, *_strides(x, gate), rows, eps,
            H=H, V=V, IS_SWISH=is_swish, BR=tile, BV=width, num_warps=warps,
        )  # fmt: skip
    return y, rstd


def launch_gated_norm_grads(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor, is_swish: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dx, dgate [..., V], dweight [V] fp32; rstd [..., 1] fp32 is that of `launch_gated_norm`."""
    dx, dgate = (torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (x, gate))
    dy, x, gate = (_matrices(tensor) for tensor in (dy, x, gate))
    H, V = x.shape[1:]
    rows, (tile, width, warps) = x.shape[0] * H, _tile_sizes(V)
    run = cdiv(cdiv(rows, _PROGRAMS), tile) * tile
    programs = cdiv(rows, run) if x.numel() else 0
    dweights = torch.empty(programs, V, dtype=torch.float32, device=x.device)
    if programs:
        gated_norm_grads_kernel[(programs,)](
            dy, x, gate, weight.contiguous(), rstd.contiguous(), dx, dgate, dweights, *_strides(dy, x, gate), rows, run,
            H=H, V=V, IS_SWISH=is_swish, BR=tile, BV=width, num_warps=warps,
        )  # fmt: skip
    return dx, dgate, dweights.sum(dim=0)


def _tile_sizes(columns: int) -> tuple[int, int, int]:
    # Rows and columns of a tile, and its warps: on H200s the fastest of 2, 4 and 8 for 128 and 2,048 columns.
    width = next_power_of_2(max(columns, 1))
    return max(1, _TILE // width), width, 8 if width <= 128 else max(4, min(width // 512, 16))


def _matrices(x: Tensor) -> Tensor:
    # [..., V] as [N, H, V]: a view, if elements of a row are side by side and the dimensions before H are regular. H is
    # that of [B, T, H, V], else 1: kernels are compiled for each.
    if x.ndim < 4:
        x = x.unsqueeze(-2)
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.flatten(0, -3) if x.ndim > 2 else x.unsqueeze(0)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]
