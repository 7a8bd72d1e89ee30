"""The update of AdamW (Loshchilov & Hutter, 2019), in the order of torch's fused one, for any number of tensors.

It moves 28 bytes a parameter: gradient, weight and two moments are read, and all but the gradient written. torch's
writes the gradient back as well if it divides it by `grad_scale`, as every step that clips does.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
