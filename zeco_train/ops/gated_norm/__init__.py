"""The gated RMS norm of a layer's output, and the arithmetic that norms share.

With r = (mean(x²) + eps)^-1/2, x̂ = r x, n = w ⊙ x̂ and a gate's function f, swish or σ:

    y  = n ⊙ f(g)
    dg = dy ⊙ n ⊙ f'(g)
    h  = w ⊙ dy ⊙ f(g)
    dx = r (h − x̂ mean(h ⊙ x̂))
    dw = Σ dy ⊙ f(g) ⊙ x̂ over all but the last dimension

Each pass is a custom op, on GPUs with one kernel (`ops/gated_norm/kernels.py`): of the backward pass a compiler
makes two, which read dy, x and g twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import custom_op, register_autograd

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.operator import KernelRule

KERNELS = KernelRule()


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, is_swish: bool) -> Tensor:
    """RMS norm over the last dimension, times a gate.

    Args:
        x: [..., V], bf16, fp32 or fp64.
        gate: [..., V], g.
        weight: [V], w.
        eps: added to the mean square.
        is_swish: f is swish, f(g) = g σ(g); else it is σ.

    Returns:
        [..., V] in the dtype of x, computed in fp32 (fp64 for fp64) and rounded once.

    Raises:
        ValueError: shapes that do not fit.
    """
    if gate.shape != x.shape or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"x {tuple(x.shape)}, gate {tuple(gate.shape)} and weight {tuple(weight.shape)} do not fit: [..., V], "
            "[..., V], [V]"
        )
    y, _ = _gated_norm(x, gate, weight, eps, is_swish)
    return y


@custom_op("zeco::gated_norm", mutates_args=())
def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, is_swish: bool) -> tuple[Tensor, Tensor]:
    # y [..., V], and r [..., 1] in the accumulation dtype
    if KERNELS.serves(x, x):
        from zeco_train.ops.gated_norm.kernels import launch_gated_norm  # late: imports Triton

        # Triton launches on the current device.
        with torch.cuda.device_of(x):
            return launch_gated_norm(x, gate, weight, eps, is_swish)
    normed, rstd = normalise(x, eps)
    gate = gate.to(rstd.dtype)
    normed.mul_(weight)
    if is_swish:
        normed.mul_(gate)
    return normed.mul_(gate.sigmoid()).to(x.dtype).contiguous(), rstd.contiguous()


@_gated_norm.register_fake
def _gated_norm_shapes(x: Tensor, gate: Tensor, weight: Tensor, eps: float, is_swish: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1), dtype=accumulation_dtype(x.dtype))


@custom_op("zeco::gated_norm_backward", mutates_args=())
def _gated_norm_backward(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor, is_swish: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if KERNELS.serves(x, x):
        from zeco_train.ops.gated_norm.kernels import launch_gated_norm_grads  # late: imports Triton

        with torch.cuda.device_of(x):
            dx, dgate, dweight = launch_gated_norm_grads(dy, x, gate, weight, rstd, is_swish)
        return dx, dgate, dweight.to(weight.dtype)
    normed = x.to(rstd.dtype) * rstd
    dy = dy.to(rstd.dtype)
    factor, slope = (swish_and_slope if is_swish else _sigmoid_and_slope)(gate.to(rstd.dtype))
    # `slope` and `factor` are fresh, so the gradients overwrite them.
    dgate = slope.mul_(dy).mul_(normed).mul_(weight)
    dx, dweight = norm_grads(normed, factor.mul_(dy), weight, rstd)
    return dx.to(x.dtype).contiguous(), dgate.to(gate.dtype).contiguous(), dweight.to(weight.dtype)


@_gated_norm_backward.register_fake
def _gated_norm_grad_shapes(dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), gate.new_empty(gate.shape), weight.new_empty(weight.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gate, weight, _, ctx.is_swish = inputs
    ctx.save_for_backward(x, gate, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor, Tensor, Tensor, None, None]:
    return *_gated_norm_backward(dy, *ctx.saved_tensors, ctx.is_swish), None, None


# Rename the ops when this changes: caches of compiled code know them by name only.
register_autograd("zeco::gated_norm", _backward, setup_context=_setup_context)


def normalise(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute x̂ [..., D], a fresh tensor, and r [..., 1], both in the accumulation dtype."""
    wide = x.to(accumulation_dtype(x.dtype))
    rstd = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return wide * rstd, rstd


def norm_grads(normed: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients dx [..., D] and dw [D] of w ⊙ x̂, in the accumulation dtype; w may be [G, D] as well."""
    dweight = (dy * normed).reshape(-1, *weight.shape).sum(dim=0)
    dnormed = dy * weight
    projection = (dnormed * normed).mean(dim=-1, keepdim=True)
    return dnormed.sub_(normed * projection).mul_(rstd), dweight


def l2_normalised(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Vectors of norm 1, x / sqrt(Σx² + eps) over the last dimension, in the dtype of x."""
    if torch.compiler.is_compiling():
        wide = x.to(accumulation_dtype(x.dtype))
        return (wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + eps)).to(x.dtype)
    return _L2Norm.apply(x, eps)


class _L2Norm(torch.autograd.Function):
    # y = r x with r = (Σx² + eps)^-1/2;  dx = r dy − y Σ(y ⊙ r dy)
    # Rounded by the kernels that compute them: of x and y no wide copies are written.

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=accumulation_dtype(x.dtype))
        rnorm = torch.rsqrt(norm.square() + eps)
        normed = torch.mul(x, rnorm, out=torch.empty_like(x))
        # y, which the operator keeps as well, in place of x.
        ctx.save_for_backward(normed, rnorm)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        normed, rnorm = ctx.saved_tensors
        dy = dy * rnorm
        along = (normed * dy).sum(dim=-1, keepdim=True)
        return torch.addcmul(dy, normed, along, value=-1, out=torch.empty_like(normed)), None


def swish_and_slope(gate: Tensor) -> tuple[Tensor, Tensor]:
    """swish(g) = g σ(g) and swish'(g) = σ(g) + swish(g) (1 − σ(g)), as fresh tensors."""
    sigmoid = gate.sigmoid()
    swish = gate * sigmoid
    return swish, sigmoid + swish * (1 - sigmoid)


def _sigmoid_and_slope(gate: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = gate.sigmoid()
    return sigmoid, sigmoid * (1 - sigmoid)
