"""Launches of the short convolution's kernels: tiles, grids and strides."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from zeco_train.kernels.short_conv.kernels import grads_kernel, outputs_kernel

# A tile: 64 bf16 channels are a cache line of 128 bytes; more tokens make fewer partial sums of dweight.
_TOKENS = 128
_CHANNELS = 64
_WARPS = 8


def launch_outputs(
    x: Tensor, weight: Tensor, bias: Tensor, incoming: Tensor | None, pieces: Tensor | None, y: Tensor
) -> None:
    """Compute y [B, T, C] with zeros before the shard; or its first w − 1 tokens after the received inputs."""
    x = _side_by_side(x)
    (B, T, C), W = x.shape, weight.shape[2]
    last = T if incoming is None else min(T, W - 1)
    BT, warps = _tile(last)
    outputs_kernel[(triton.cdiv(last, BT), triton.cdiv(C, _CHANNELS), B)](
        x, weight.contiguous(), bias.contiguous(), None if incoming is None else incoming.contiguous(), pieces, y,
        x.stride(0), x.stride(1), last, T, C, W=W, BT=BT, BC=_CHANNELS, DOCUMENTS=pieces is not None,
        RECEIVED=incoming is not None, num_warps=warps,
    )  # fmt: skip


def launch_grads(
    do: Tensor,
    weight: Tensor,
    pieces: Tensor | None,
    first: int,
    last: int,
    dx: Tensor,
    *,
    received: tuple[Tensor, Tensor] | None = None,
    incoming_grad: Tensor | None = None,
) -> Tensor | None:
    """Write dx of the tokens [first, last); those before the shard are the received inputs.

    Args:
        do: [B, T, C].
        weight: [C, 1, w].
        pieces: [T], see `zeco_train.ops.documents`.
        first: the first of the tokens, at least −(w − 1).
        last: the one after them.
        dx: [B, T, C], or [B, 1, w − 1, C] for the received inputs, which then are all tokens; contiguous.
        received: x [B, T, C] and R [B, 1, w − 1, C], for the sums.
        incoming_grad: D_in [B, 1, w − 1, C].

    Returns:
        With `received`: [w + 1, C] fp32, dweight[:, 0, j] in row j, dbias in the last one. Always in the same order.
    """
    do = _side_by_side(do)
    (B, T, C), W = do.shape, weight.shape[2]
    BT, warps = _tile(last - first)
    blocks = triton.cdiv(last - first, BT)
    x, incoming = (None, None) if received is None else (_side_by_side(received[0]), received[1].contiguous())
    sums = None if x is None else torch.empty(B, blocks, W + 1, C, dtype=torch.float32, device=do.device)
    grads_kernel[(blocks, triton.cdiv(C, _CHANNELS), B)](
        do, weight.contiguous(), pieces, x, incoming, None if incoming_grad is None else incoming_grad.contiguous(),
        dx, sums, do.stride(0), do.stride(1), 0 if x is None else x.stride(0), 0 if x is None else x.stride(1),
        first, last, first if last == 0 else 0, W - 1 if last == 0 else T, T, C, W=W, BT=BT, BC=_CHANNELS,
        DOCUMENTS=pieces is not None, SUMS=sums is not None, SENT=incoming_grad is not None, num_warps=warps,
    )  # fmt: skip
    return None if sums is None else sums.sum((0, 1))


def _tile(tokens: int) -> tuple[int, int]:
    """Tokens of a tile, and warps: the few tokens at a border are one small tile."""
    BT = min(_TOKENS, triton.next_power_of_2(tokens))
    return BT, max(1, _WARPS * BT // _TOKENS)


def _side_by_side(x: Tensor) -> Tensor:
    """Return x with its channels side by side, as a part of a projection's output has them already."""
    return x if x.stride(2) == 1 else x.contiguous()
