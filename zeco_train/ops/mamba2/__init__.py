"""What a Mamba-2 layer computes between its convolution and its last product, but for the operator.

u are the convolution's outputs, split into those of values, keys and queries, l the logits of time steps:

    dt = softplus(l + dt_bias), clamped      g = −exp(A_log) dt          k, q = silu(u_k), silu(u_q)
    v  = dt ⊙ silu(u_v)                      s = D ⊙ silu(u_v)
    o  = ScalarDecay(q, k, v, g)             n = (o + s) ⊙ silu(z)       y = w ⊙ r n,  r = (mean(n²) + eps)^-1/2

The mean is over each group. All but the operator is two custom ops with two passes each, on GPUs one kernel a pass
(`ops/mamba2/kernels.py`): a compiler makes more of them, which read and write the values several times.

s is never in memory. `operands` returns it as a view of one unset number, which carries the gradient: `output` computes
s itself, from u and D, which it takes as constants. ds = do, so the gradient of u is written once, by the pass that has
that of v, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, register_autograd
from torch.nn import functional as F

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.gated_norm import norm_grads, normalise, swish_and_slope
from zeco_train.ops.operator import KernelRule

KERNELS = KernelRule()


def operands(
    u: Tensor, logits: Tensor, decay: Tensor, value_dim: int, groups: int, limit: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operands of `scalar_decay`, and the skip connection's part of `output`.

    Args:
        u: [B, T, H·V + 2·G·K], the convolution's outputs: for values, keys, queries; bf16, fp32 or fp64.
        logits: [B, T, H], l.
        decay: [3, H], dt_bias, A_log and D; fp32, fp64 with fp64.
        value_dim: V.
        groups: G, which divides H.
        limit: least and most time step.

    Returns:
        q, k [B, T, G, K], v [B, T, H, V] in the dtype of u; g [B, T, H] in fp32, fp64 for fp64; and s [B, T, H, V],
        which only `output` may take: its numbers are not set.
    """
    return _operands(u, logits, decay, value_dim, groups, *limit)


def output(
    o: Tensor, skip: Tensor, u: Tensor, z: Tensor, decay: Tensor, weight: Tensor, groups: int, eps: float
) -> Tensor:
    """The norm of the gated sum of the operator's output and the skip connection.

    Args:
        o: [B, T, H, V].
        skip: s, of `operands`, for the same u and decay; their gradients pass through it.
        u: [B, T, H·V + …].
        z: [B, T, H·V], the gate's logits.
        decay: [3, H].
        weight: [H·V], w.
        groups: over each of which the mean is.
        eps: added to the mean square.

    Returns:
        y [B, T, H·V] in the dtype of o, computed in fp32 (fp64 for fp64) and rounded once.
    """
    y, _ = _output(o, skip, u, z, decay, weight, groups, eps)
    return y


@custom_op("zeco::mamba2_operands", mutates_args=())
def _operands(
    u: Tensor, logits: Tensor, decay: Tensor, value_dim: int, groups: int, least: float, most: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    heads = decay.shape[1]
    skip = _unset(u, heads, value_dim)
    if KERNELS.serves(u, u, decay):
        from zeco_train.ops.mamba2.kernels import launch_operands  # late: imports Triton

        # Triton launches on the current device.
        with torch.cuda.device_of(u):
            return *launch_operands(u, logits, decay, value_dim, groups, least, most), skip
    dtype = accumulation_dtype(u.dtype)
    # Part by part: outputs of an op may not share memory.
    values, keys, queries = (F.silu(x.to(dtype)) for x in _parts(u, heads, value_dim, groups))
    _, _, dt, g = _steps(logits, decay, least, most)
    q, k, v = (x.to(u.dtype).contiguous() for x in (queries, keys, values.mul_(dt.unsqueeze(-1))))
    return q, k, v, g, skip


@_operands.register_fake
def _operands_shapes(
    u: Tensor, logits: Tensor, decay: Tensor, value_dim: int, groups: int, least: float, most: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    heads = decay.shape[1]
    values, keys, queries = _parts(u, heads, value_dim, groups)
    g = logits.new_empty(logits.shape, dtype=accumulation_dtype(logits.dtype))
    q, k, v = (x.new_empty(x.shape) for x in (queries, keys, values))
    return q, k, v, g, _unset(u, heads, value_dim)


@custom_op("zeco::mamba2_operands_backward", mutates_args=())
def _operands_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, dg: Tensor, ds: Tensor, u: Tensor, logits: Tensor, decay: Tensor,
    least: float, most: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if KERNELS.serves(u, u, decay):
        from zeco_train.ops.mamba2.kernels import launch_operand_grads  # late: imports Triton

        with torch.cuda.device_of(u):
            return launch_operand_grads(dq, dk, dv, dg, ds, u, logits, decay, least, most)
    dtype = accumulation_dtype(u.dtype)
    dq, dk, dv, ds = (x.to(dtype) for x in (dq, dk, dv, ds))
    swish, slope = swish_and_slope(u.to(dtype))
    values = swish[..., : dv.shape[2] * dv.shape[3]].view(dv.shape)
    shifted, raw, dt, g = _steps(logits, decay, least, most)
    skips = decay[2].unsqueeze(-1)
    dvalues = dv * dt.unsqueeze(-1) + ds * skips
    du = slope.mul_(torch.cat([x.flatten(-2) for x in (dvalues, dk, dq)], -1)).to(u.dtype)
    ddt = ((dv * values).sum(-1) - decay[1].exp() * dg) * ((raw >= least) & (raw <= most))
    dlogits = torch.ops.aten.softplus_backward(ddt, shifted, 1, 20)
    sums = dlogits.sum((0, 1)), (dg * g).sum((0, 1)), (ds * values).sum((0, 1, 3))
    return du, dlogits.to(logits.dtype).contiguous(), torch.stack(sums).to(decay.dtype)


@_operands_backward.register_fake
def _operand_grad_shapes(
    dq: Tensor, dk: Tensor, dv: Tensor, dg: Tensor, ds: Tensor, u: Tensor, logits: Tensor, decay: Tensor,
    least: float, most: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return u.new_empty(u.shape), logits.new_empty(logits.shape), decay.new_empty(decay.shape)


def _setup_operands(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    u, logits, decay, _, _, *ctx.limit = inputs
    ctx.save_for_backward(u, logits, decay)


def _backward_operands(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    return *_operands_backward(*grads, *ctx.saved_tensors, *ctx.limit), None, None, None, None


@custom_op("zeco::mamba2_output", mutates_args=())
def _output(
    o: Tensor, skip: Tensor, u: Tensor, z: Tensor, decay: Tensor, weight: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor]:
    # y [B, T, H·V], and r [B, T, G] in the accumulation dtype
    if KERNELS.serves(o, o, decay):
        from zeco_train.ops.mamba2.kernels import launch_output  # late: imports Triton

        with torch.cuda.device_of(o):
            return launch_output(o, u, z, decay, weight, groups, eps)
    total, gate = _total_and_gate(o, u, z, decay)
    normed, rstd = normalise(total.mul_(F.silu(gate)).unflatten(-1, (groups, -1)), eps)
    return normed.flatten(-2).mul_(weight).to(o.dtype), rstd.squeeze(-1).contiguous()


@_output.register_fake
def _output_shapes(
    o: Tensor, skip: Tensor, u: Tensor, z: Tensor, decay: Tensor, weight: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor]:
    return o.new_empty(z.shape), o.new_empty((*z.shape[:-1], groups), dtype=accumulation_dtype(o.dtype))


@custom_op("zeco::mamba2_output_backward", mutates_args=())
def _output_backward(
    dy: Tensor, o: Tensor, u: Tensor, z: Tensor, decay: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if KERNELS.serves(o, o, decay):
        from zeco_train.ops.mamba2.kernels import launch_output_grads  # late: imports Triton

        with torch.cuda.device_of(o):
            do, dz, dweight = launch_output_grads(dy, o, u, z, decay, weight, rstd)
        return do, dz, dweight.to(weight.dtype)
    total, gate = _total_and_gate(o, u, z, decay)
    swish, slope = swish_and_slope(gate)
    groups, scale = (rstd.shape[-1], -1), rstd.unsqueeze(-1)
    normed = (total * swish).unflatten(-1, groups) * scale
    factors = weight.to(rstd.dtype).unflatten(0, groups)
    dn, dweight = norm_grads(normed, dy.to(rstd.dtype).unflatten(-1, groups), factors, scale)
    dn = dn.flatten(-2)
    do, dz = swish.mul_(dn).view(o.shape).to(o.dtype), slope.mul_(dn).mul_(total).to(z.dtype)
    return do, dz, dweight.flatten().to(weight.dtype)


@_output_backward.register_fake
def _output_grad_shapes(
    dy: Tensor, o: Tensor, u: Tensor, z: Tensor, decay: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (o, z, weight))  # type: ignore[return-value]


def _setup_output(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    o, _, u, z, decay, weight, _, _ = inputs
    ctx.save_for_backward(o, u, z, decay, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward_output(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    do, dz, dweight = _output_backward(dy, *ctx.saved_tensors)
    # o and s are added; the gradients of u and D are those of s.
    return do, do, None, dz, None, dweight, None, None


# Rename the ops when these change: caches of compiled code know them by name only.
register_autograd("zeco::mamba2_operands", _backward_operands, setup_context=_setup_operands)
register_autograd("zeco::mamba2_output", _backward_output, setup_context=_setup_output)


def _unset(u: Tensor, heads: int, value_dim: int) -> Tensor:
    return u.new_empty(()).expand(*u.shape[:2], heads, value_dim)


# Views of [B, T, H·V + 2·G·K]: [B, T, H, V], and two of [B, T, G, K].
def _parts(u: Tensor, heads: int, value_dim: int, groups: int) -> list[Tensor]:
    inner = heads * value_dim
    group = (u.shape[-1] - inner) // 2
    values, keys, queries = u.split((inner, group, group), dim=-1)
    return [values.unflatten(-1, (heads, value_dim)), *(x.unflatten(-1, (groups, -1)) for x in (keys, queries))]


# l + dt_bias, its softplus, dt, g: [B, T, H] in the accumulation dtype, as log-decays are summed over the whole shard.
def _steps(logits: Tensor, decay: Tensor, least: float, most: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shifted = logits.to(accumulation_dtype(logits.dtype)) + decay[0]
    raw = F.softplus(shifted)
    dt = raw.clamp(least, most)
    return shifted, raw, dt, -decay[1].exp() * dt


# o + s, a fresh tensor, and z: [B, T, H·V] in the accumulation dtype.
def _total_and_gate(o: Tensor, u: Tensor, z: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(o.dtype)
    values = F.silu(u[..., : z.shape[-1]].to(dtype)).unflatten(-1, o.shape[2:])
    return values.mul_(decay[2].unsqueeze(-1)).add_(o).flatten(-2), z.to(dtype)
