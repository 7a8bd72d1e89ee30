"""The short convolution's kernels: a program computes a tile of BT tokens and BC channels.

Tokens are counted from the shard's first one; the received inputs are tokens −(W − 1) … −1, of piece 0. A tile loads
shifted tiles, W of them, all but the first from caches: memory sees one read of a tensor. Tensors over tokens [B, T, C]
have strides, with channels side by side; states [B, 1, W − 1, C] are contiguous. Sums are fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(x, batch, tokens, channels, batch_stride, token_stride, mask):
    """[BT, BC] in fp32, zeros where the mask is false."""
    offsets = batch * batch_stride + tokens[:, None] * token_stride + channels[None, :]
    return tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def outputs_kernel(
    x,  # [B, T, C]
    weight,  # [C, 1, W]
    bias,  # [C]
    incoming,  # [B, 1, W - 1, C] fp32, if RECEIVED
    pieces,  # [T] int32, if DOCUMENTS
    y,  # [B, T, C], contiguous, written
    x_batch,
    x_token,
    last,  # tokens to compute
    T,
    C,
    W: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    RECEIVED: tl.constexpr,
):
    """Compute y of the first `last` tokens, from zeros or from the received inputs."""
    batch = tl.program_id(2).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    channels = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = tokens < last
    columns = (channels < C)[None, :]
    total = tl.zeros((BT, BC), tl.float32) + tl.load(bias + channels, mask=channels < C, other=0.0).to(tl.float32)
    if DOCUMENTS:
        piece = tl.load(pieces + tokens, mask=inside, other=0)
    for lag in tl.static_range(W):
        source = tokens - lag
        seen = inside & (source >= 0)
        before = inside & (source < 0)
        if DOCUMENTS:
            seen = seen & (tl.load(pieces + source, mask=seen, other=-1) == piece)
            before = before & (piece == 0)
        value = _load(x, batch, source, channels, x_batch, x_token, seen[:, None] & columns)
        if RECEIVED:
            value += _load(incoming, batch, source + W - 1, channels, C * (W - 1), C, before[:, None] & columns)
        tap = tl.load(weight + channels * W + (W - 1 - lag), mask=channels < C, other=0.0).to(tl.float32)
        total += value * tap[None, :]
    offsets = (batch * T + tokens)[:, None] * C + channels[None, :]
    tl.store(y + offsets, total.to(y.dtype.element_ty), mask=inside[:, None] & columns)


@triton.jit
def grads_kernel(
    do,  # [B, T, C]
    weight,  # [C, 1, W]
    pieces,  # [T] int32, if DOCUMENTS
    x,  # [B, T, C], if SUMS
    incoming,  # [B, 1, W - 1, C] fp32, R, if SUMS
    incoming_grad,  # [B, 1, W - 1, C] fp32, D_in, if SENT
    dx,  # [B, rows, C], contiguous, written: row 0 is token `row_0`
    sums,  # [B, blocks, W + 1, C] fp32, written if SUMS: dbias in row W
    do_batch,
    do_token,
    x_batch,
    x_token,
    first,  # tokens to compute, from -(W - 1) on
    last,
    row_0,
    rows,
    T,
    C,
    W: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    SUMS: tl.constexpr,
    SENT: tl.constexpr,
):
    """Compute dx of the tokens [first, last), stored from `row_0` on; with SUMS also parts of dweight, and dbias."""
    batch = tl.program_id(2).to(tl.int64)
    tokens = first + tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    channels = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = tokens < last
    here = inside & (tokens >= 0)
    columns = (channels < C)[None, :]
    if DOCUMENTS:
        piece = tl.load(pieces + tokens, mask=here, other=0)
    total = tl.zeros((BT, BC), tl.float32)
    if SENT:
        kept = here & (tokens >= T - (W - 1))
        if DOCUMENTS:
            kept = kept & (piece == tl.load(pieces + T - 1))
        total += _load(incoming_grad, batch, tokens - T + W - 1, channels, C * (W - 1), C, kept[:, None] & columns)
    if SUMS:
        value = _load(x, batch, tokens, channels, x_batch, x_token, here[:, None] & columns)
        before = inside & (tokens < 0)
        value += _load(incoming, batch, tokens + W - 1, channels, C * (W - 1), C, before[:, None] & columns)
        block = batch * tl.num_programs(0) + tl.program_id(0)
        of_block = sums + block * (W + 1) * C + channels
    for lag in tl.static_range(W):
        target = tokens + lag
        seen = inside & (target >= 0) & (target < T)
        if DOCUMENTS:
            seen = seen & (tl.load(pieces + target, mask=seen, other=-1) == piece)
        grad = _load(do, batch, target, channels, do_batch, do_token, seen[:, None] & columns)
        tap = tl.load(weight + channels * W + (W - 1 - lag), mask=channels < C, other=0.0).to(tl.float32)
        total += grad * tap[None, :]
        if SUMS:
            tl.store(of_block + (W - 1 - lag) * C, tl.sum(grad * value, axis=0), mask=channels < C)
            if lag == 0:
                tl.store(of_block + W * C, tl.sum(grad, axis=0), mask=channels < C)
    offsets = (batch * rows + tokens - row_0)[:, None] * C + channels[None, :]
    stored = inside & (tokens >= row_0)
    tl.store(dx + offsets, total.to(dx.dtype.element_ty), mask=stored[:, None] & columns)
