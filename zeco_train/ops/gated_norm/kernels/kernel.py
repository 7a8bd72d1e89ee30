"""The gated RMS norm and its gradients, each in one pass over its inputs; that of the weight as sums by program.

The equations are those of `zeco_train.ops.gated_norm`. Bytes: x and gate are read, y is written; dy, x and gate are
read, dx and dgate written. Compiled code reads the latter three twice: torch's compiler does not fuse a sum over rows
with what else it computes of them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(tensor, row, columns, inside, stride_n, stride_h, H: tl.constexpr):
    """[BR, BV] of a tensor [N, H, V], rows counted over N and H, in fp32."""
    place = (row // H).to(tl.int64) * stride_n + (row % H).to(tl.int64) * stride_h
    return tl.load(tensor + place[:, None] + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
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


@triton.jit
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


@triton.jit
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
