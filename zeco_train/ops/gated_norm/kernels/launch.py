"""Launches of the gated norm's kernels: tiles and strides."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from zeco_train.ops.gated_norm.kernels.kernel import gated_norm_grads_kernel, gated_norm_kernel

# Elements of a tile.
_TILE = 2048
# About as many walk over the rows in the backward pass, on every device, so that sums are the same: eight for each
# multiprocessor of an H100.
_PROGRAMS = 1056


def launch_gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, is_swish: bool) -> tuple[Tensor, Tensor]:
    """The gated norm y [..., V], and 1 / sqrt(mean(x²) + eps), [..., 1] fp32.

    Args:
        x: [..., V], of a dtype that is computed in fp32, as are the next two.
        gate: [..., V].
        weight: [V].
        eps: added to the mean square.
        is_swish: the gate's function is swish; else it is the sigmoid.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    x, gate = _matrices(x), _matrices(gate)
    H, V = x.shape[1:]
    rows, (tile, width, warps) = x.shape[0] * H, _tile_sizes(V)
    if x.numel():
        gated_norm_kernel[(triton.cdiv(rows, tile),)](
            x, gate, weight.contiguous(), y, rstd, *_strides(x, gate), rows, eps,
            H=H, V=V, IS_SWISH=is_swish, BR=tile, BV=width, num_warps=warps,
        )  # fmt: skip
    return y, rstd


def launch_gated_norm_grads(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor, is_swish: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dx [..., V], dgate [..., V], dweight [V] fp32 of the gated norm.

    Args:
        dy: [..., V], gradient of the output.
        x: [..., V], input.
        gate: [..., V].
        weight: [V].
        rstd: [..., 1] fp32, of the forward pass.
        is_swish: see `launch_gated_norm`.
    """
    dx, dgate = (torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (x, gate))
    dy, x, gate = (_matrices(tensor) for tensor in (dy, x, gate))
    H, V = x.shape[1:]
    rows, (tile, width, warps) = x.shape[0] * H, _tile_sizes(V)
    run = triton.cdiv(triton.cdiv(rows, _PROGRAMS), tile) * tile
    programs = triton.cdiv(rows, run) if x.numel() else 0
    dweights = torch.empty(programs, V, dtype=torch.float32, device=x.device)
    if programs:
        gated_norm_grads_kernel[(programs,)](
            dy, x, gate, weight.contiguous(), rstd.contiguous(), dx, dgate, dweights, *_strides(dy, x, gate), rows, run,
            H=H, V=V, IS_SWISH=is_swish, BR=tile, BV=width, num_warps=warps,
        )  # fmt: skip
    return dx, dgate, dweights.sum(dim=0)


def _tile_sizes(columns: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and its warps: on H200s the fastest of 2, 4 and 8 for 128 and 2,048 columns."""
    width = triton.next_power_of_2(max(columns, 1))
    return max(1, _TILE // width), width, 8 if width <= 128 else max(4, min(width // 512, 16))


def _matrices(x: Tensor) -> Tensor:
    """[..., V] as [N, H, V]: a view, if elements of a row are side by side and the dimensions before H are regular.

    H is that of [B, T, H, V], else 1: kernels are compiled for each.
    """
    if x.ndim < 4:
        x = x.unsqueeze(-2)
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.flatten(0, -3) if x.ndim > 2 else x.unsqueeze(0)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]
