"""Launches of the short convolution's kernels: tiles, grids and strides."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from zeco_train.ops.short_conv.kernels.kernels import (
    grads_kernel,
    last_grads_kernel,
    outputs_kernel,
    received_grads_kernel,
)


class ShortConvWalk(NamedTuple):
    """How a kernel over all tokens is divided.

    Attributes:
        warps: of a program. A thread has 4 channels: a load is 8 bytes in bf16, 16 in fp32.
        rows: tokens whose loads are issued together.
        programs: about as many are launched: one wave on a large GPU. The same on every device, so that the sums are.
        shortest: tokens of a program, at least. Each reads w − 1 more.
    """

    warps: int
    rows: int
    programs: int
    shortest: int

    @property
    def channels(self) -> int:
        """Channels of a program."""
        return 128 * self.warps

    def run(self, batch: int, tokens: int, channels: int) -> int:
        """Tokens of a program, a multiple of `rows`."""
        runs = max(1, self.programs // (batch * triton.cdiv(channels, self.channels)))
        tokens = max(triton.cdiv(tokens, runs), min(tokens, self.shortest))
        return triton.cdiv(tokens, self.rows) * self.rows


OUTPUTS = ShortConvWalk(warps=1, rows=8, programs=4096, shortest=64)
GRADS = ShortConvWalk(warps=1, rows=8, programs=2048, shortest=64)

# The tiles of tokens at the ends of a shard, and of partial sums.
_CHANNELS = 32
_PARTS = 32


def launch_outputs(
    x: Tensor, weight: Tensor, bias: Tensor, incoming: Tensor | None, doc_ids: Tensor | None, y: Tensor
) -> None:
    """Compute y [B, T, C] with zeros before the shard; or its first w − 1 tokens after the received inputs."""
    x, walk = _side_by_side(x), OUTPUTS
    (B, T, C), W = x.shape, weight.shape[2]
    last = T if incoming is None else min(T, W - 1)
    # The received inputs precede the first run, so there is one.
    run = walk.run(B, T, C) if incoming is None else triton.cdiv(last, walk.rows) * walk.rows
    outputs_kernel[(triton.cdiv(C, walk.channels), triton.cdiv(last, run), B)](
        x, weight.contiguous(), bias.contiguous(), None if incoming is None else incoming.contiguous(), doc_ids, y,
        x.stride(0), x.stride(1), run, last, T, C, W=W, ROWS=walk.rows, BC=walk.channels,
        DOCUMENTS=doc_ids is not None, RECEIVED=incoming is not None, num_warps=walk.warps,
    )  # fmt: skip


def launch_received_grads(do: Tensor, weight: Tensor, doc_ids: Tensor | None, grads: Tensor) -> None:
    """Write D_loc, the gradients of the received inputs, [B, 1, w − 1, C], contiguous."""
    do = _side_by_side(do)
    (B, T, C), W = do.shape, weight.shape[2]
    received_grads_kernel[(triton.cdiv(C, _CHANNELS), B)](
        do, weight.contiguous(), doc_ids, grads, do.stride(0), do.stride(1), T, C, W=W,
        ROWS=triton.next_power_of_2(W - 1), BC=_CHANNELS, DOCUMENTS=doc_ids is not None, num_warps=1,
    )  # fmt: skip


def launch_grads(x: Tensor, do: Tensor, weight: Tensor, doc_ids: Tensor | None, dx: Tensor) -> Tensor:
    """Compute dx with zeros after the shard, and partial sums of dweight and dbias without the received inputs.

    Args:
        x: [B, T, C].
        do: [B, T, C].
        weight: [C, 1, w].
        doc_ids: [T], see `zeco_train.ops.documents`.
        dx: [B, T, C], contiguous, written.

    Returns:
        [parts, w + 1, C] fp32: parts of dweight[:, 0, j] in row j, of dbias in row w.
    """
    x, do, walk = _side_by_side(x), _side_by_side(do), GRADS
    (B, T, C), W = x.shape, weight.shape[2]
    run = walk.run(B, T, C)
    runs = triton.cdiv(T, run)
    sums = torch.empty(B * runs, W + 1, C, dtype=torch.float32, device=x.device)
    grads_kernel[(triton.cdiv(C, walk.channels), runs, B)](
        do, weight.contiguous(), doc_ids, x, dx, sums, do.stride(0), do.stride(1), x.stride(0), x.stride(1), run, T, C,
        W=W, ROWS=walk.rows, BC=walk.channels, DOCUMENTS=doc_ids is not None, num_warps=walk.warps,
    )  # fmt: skip
    return sums


def launch_last_grads(
    do: Tensor,
    weight: Tensor,
    doc_ids: Tensor | None,
    states: tuple[Tensor, Tensor],
    sums: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Complete all gradients: dx of the last w − 1 tokens, and the sums, always in the same order.

    Args:
        do: [B, T, C].
        weight: [C, 1, w].
        doc_ids: [T], see `zeco_train.ops.documents`.
        states: R and D_in, [B, 1, w − 1, C].
        sums: [parts, w + 1, C], see `launch_grads`.
        grads: dx [B, T, C], of which the last w − 1 tokens are written; dweight [C, 1, w] and dbias [C], written.
            Contiguous.
    """
    do, (incoming, incoming_grad) = _side_by_side(do), states
    (B, T, C), W = do.shape, weight.shape[2]
    last_grads_kernel[(triton.cdiv(C, _CHANNELS), W + 1 + B)](
        do, weight.contiguous(), doc_ids, incoming.contiguous(), incoming_grad.contiguous(), sums, *grads,
        do.stride(0), do.stride(1), sums.shape[0], B, T, C, W=W, ROWS=triton.next_power_of_2(W - 1), PARTS=_PARTS,
        BC=_CHANNELS, DOCUMENTS=doc_ids is not None, num_warps=4,
    )  # fmt: skip


def _side_by_side(x: Tensor) -> Tensor:
    """Return x with its channels side by side, as a part of a projection's output has them already."""
    return x if x.stride(2) == 1 else x.contiguous()
