"""The update of AdamW (Loshchilov & Hutter, 2019), in the order of torch's fused one, for any number of tensors.

It moves 28 bytes a parameter: gradient, weight and two moments are read, and all but the gradient written. torch's
writes the gradient back as well if it divides it by `grad_scale`, as every step that clips does.

The launch takes tables of addresses, which stay valid in a CUDA graph.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _pointer(table, index, ALIGNED: tl.constexpr):
    """The fp32 tensor at the address with this index."""
    pointer = tl.load(table + index).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _update(
    weights, grads, means, squares, offsets, left, scale, rate, weight_decay, step_size, rest1, rest2, correction2, eps,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Update the elements at offsets below `left`; WHOLE: these are all, so 16 bytes can be moved at a time."""
    inside = None if WHOLE else offsets < left
    grad = tl.div_rn(tl.load(grads + offsets, mask=inside), scale)
    weight = tl.load(weights + offsets, mask=inside)
    mean = tl.load(means + offsets, mask=inside)
    square = tl.load(squares + offsets, mask=inside)
    weight -= rate * weight_decay * weight
    mean += rest1 * (grad - mean)
    square += rest2 * (grad * grad - square)
    weight -= tl.div_rn(step_size * mean, tl.div_rn(tl.sqrt_rn(square), correction2) + eps)
    tl.store(weights + offsets, weight, mask=inside)
    tl.store(means + offsets, mean, mask=inside)
    tl.store(squares + offsets, square, mask=inside)


@triton.jit
def adamw_kernel(
    table,  # [5, N] int64: addresses of weights, gradients, first and second moments, and counts of steps, all fp32
    layout,  # [2, N] int64: elements of each tensor, and its first program
    owners,  # [programs] int32: the tensor of each program
    lr,  # a number on the device, fp32, as are the next two
    grad_scale,  # gradients are divided by it; None: by nothing
    found_inf,  # 1: nothing is changed; None: as 0
    log2_beta1,
    log2_beta2,
    rest1,  # 1 − β₁
    rest2,  # 1 − β₂
    eps,
    weight_decay,
    N,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """A program updates CHUNK elements of one tensor. ALIGNED: all addresses are multiples of 16 bytes."""
    is_skipped = False
    if found_inf is not None:
        is_skipped = tl.load(found_inf) != 0.0
    if not is_skipped:
        program = tl.program_id(0)
        tensor = tl.load(owners + program)
        first = (program - tl.load(layout + N + tensor)) * CHUNK
        left = tl.minimum(tl.load(layout + tensor) - first, CHUNK).to(tl.int32)
        weights = _pointer(table, tensor, ALIGNED) + first
        grads = _pointer(table, N + tensor, ALIGNED) + first
        means = _pointer(table, 2 * N + tensor, ALIGNED) + first
        squares = _pointer(table, 3 * N + tensor, ALIGNED) + first
        # fp64: 1 − β₂^t of the first steps would lose most of its digits
        step = tl.load(_pointer(table, 4 * N + tensor, False)).to(tl.float64)
        correction1 = (1.0 - tl.exp2(step * log2_beta1)).to(tl.float32)
        correction2 = tl.sqrt(1.0 - tl.exp2(step * log2_beta2)).to(tl.float32)
        scale = 1.0
        if grad_scale is not None:
            scale = tl.load(grad_scale)
        rate = tl.load(lr)
        step_size = rate / correction1
        if left == CHUNK:
            for start in range(0, CHUNK, BLOCK):
                _update(
                    weights, grads, means, squares, start + tl.arange(0, BLOCK), left, scale, rate, weight_decay,
                    step_size, rest1, rest2, correction2, eps, True,
                )  # fmt: skip
        else:
            for start in range(0, CHUNK, BLOCK):
                _update(
                    weights, grads, means, squares, start + tl.arange(0, BLOCK), left, scale, rate, weight_decay,
                    step_size, rest1, rest2, correction2, eps, False,
                )  # fmt: skip


# Elements of a program, and of one turn of its loop: 8 of each tensor a thread.
_CHUNK, _BLOCK, _WARPS = 2048, 1024, 4
_ALIGNMENT = 16


class Updater:
    """Updates lists of tensors; a list is one launch.

    Gradients may move from step to step, so their addresses are copied to the device in each. What a CUDA graph copies
    must stay on the host as long as the graph.
    """

    def __init__(self) -> None:
        # By sizes of tensors, for good: captured launches read them.
        self._layouts: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        # Page-locked memory cannot be allocated during a capture: the next one's, by stream and weights' addresses. A
        # capture's warm-up runs on its stream.
        self._spare: dict[tuple[int, ...], Tensor] = {}
        self._captured: list[Tensor] = []

    def update(
        self,
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        means: Sequence[Tensor],
        squares: Sequence[Tensor],
        steps: Sequence[Tensor],
        *,
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """One step, in place, of fp32 tensors on one device, weights and gradients contiguous.

        `means` and `squares` are the first and second moments; `steps`, scalars in fp32, how many steps were made
        before, counted up. A captured step reads the tensor `lr` anew. Gradients are divided by the scalar
        `grad_scale`; with the scalar `found_inf` 1 nothing is changed.
        """
        if not weights:
            return
        device = weights[0].device
        torch._foreach_add_(list(steps), 1.0)
        if found_inf is not None:
            # Lists: one number of all would be read by the host.
            torch._foreach_sub_(list(steps), [found_inf] * len(steps))
        assert all(tensor.is_contiguous() for tensor in (*weights, *grads))
        rows = [[tensor.data_ptr() for tensor in tensors] for tensors in (weights, grads, means, squares, steps)]
        sizes = tuple(tensor.numel() for tensor in weights)
        if sizes not in self._layouts:
            self._layouts[sizes] = _layout(sizes, device)
        layout, owners = self._layouts[sizes]
        if not len(owners):
            return
        rate = lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float32, device=device)
        adamw_kernel[(len(owners),)](
            self._table(rows, device), layout, owners, rate, grad_scale, found_inf,
            *(math.log2(beta) if beta else -math.inf for beta in betas), *(1.0 - beta for beta in betas),
            eps, weight_decay, len(sizes), CHUNK=_CHUNK, BLOCK=_BLOCK,
            ALIGNED=all(address % _ALIGNMENT == 0 for row in rows[:4] for address in row), num_warps=_WARPS,
        )  # fmt: skip

    def _table(self, rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        # [rows, N] int64 on the device
        if device.type != "cuda":
            return torch.tensor(rows, dtype=torch.int64)
        return self._addresses(rows, torch.cuda.current_stream(device).cuda_stream).to(device, non_blocking=True)

    def _addresses(self, rows: Sequence[Sequence[int]], stream: int) -> Tensor:
        # in page-locked memory, which keeps them until the device has copied them
        numbers, key = torch.tensor([*itertools.chain(*rows)], dtype=torch.int64), (stream, *rows[0])
        if not torch.cuda.is_current_stream_capturing():
            if key not in self._spare:
                self._spare[key] = _page_locked(numbers)
            # The allocator gives it to no later step before the copy is done.
            return _page_locked(numbers).copy_(numbers)
        host = self._spare.pop(key, None)
        if host is None:
            raise RuntimeError("AdamW: a step of these weights has to run on this stream before it is captured")
        self._captured.append(host)
        return host.copy_(numbers)


def _page_locked(like: Tensor) -> Tensor:
    return torch.empty_like(like, pin_memory=True)


def _layout(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    programs = [triton.cdiv(size, _CHUNK) for size in sizes]
    firsts = [0, *itertools.accumulate(programs)][:-1]
    owners = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), torch.tensor(programs))
    return torch.tensor([sizes, firsts], device=device), owners.to(device)
