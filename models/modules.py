"""Building blocks: norms, the SwiGLU product and rotary embeddings, and holders of parameters.

Their statistics and products are computed in fp32 (fp64 for fp64 inputs) whatever the dtype of the inputs, and rounded
once, as in flash-linear-attention. Plain autograd would keep three to five intermediates of the size of the input for
each module; these Functions keep only their inputs, which saves most of a layer's memory at long sequences. A compiler
does the same, with more fusion, so under `torch.compile` the plain operations are used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from models.parameters import BIAS, SCALE, ParameterRule, uniform
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.gated_norm import gated_norm, norm_grads, normalise, swish_and_slope
from zeco_train.ops.mamba2 import output


class Embedding(nn.Embedding):
    """`torch.nn.Embedding`, whose gradient is summed in fp32 (fp64 for fp64) on CPUs, too, and rounded once.

    torch's CPU kernel adds up the rows of a token in their dtype, and a sum of hundreds of rows in bf16 stops growing.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Map ids [...] int64 → [..., size]."""
        return _EmbeddingFunction.apply(input, self.weight)


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def parameter_rules(self) -> Mapping[str, ParameterRule]:
        return {"weight": SCALE}


class RMSNorm(_Norm):
    """Root-mean-square norm over the last dimension, y = w ⊙ x / sqrt(mean(x²) + eps) (Zhang and Sennrich, 2019).

    `zero_centred`: the factor is 1 + weight in place of the weight, which begins at 0.
    """

    def __init__(self, size: int, eps: float, zero_centred: bool = False) -> None:
        super().__init__(size, eps)
        self.zero_centred = zero_centred
        if zero_centred:
            nn.init.zeros_(self.weight)

    def parameter_rules(self) -> Mapping[str, ParameterRule]:
        """The weight begins where the factor is 1."""
        return {"weight": BIAS if self.zero_centred else SCALE}

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Map x [..., size] → [..., size], in `dtype`, or in that of x."""
        dtype = dtype or x.dtype
        if torch.compiler.is_compiling():
            return normalise(x, self.eps)[0].mul(_factor(self.weight, self.zero_centred)).to(dtype)
        return _RMSNormFunction.apply(x, self.weight, self.eps, dtype, self.zero_centred)


class GateFunction(Enum):
    """Elementwise function of an output gate: swish(g) = g σ(g), or σ(g)."""

    swish = "swish"
    sigmoid = "sigmoid"


class GatedRMSNorm(_Norm):
    """RMS norm of x times a gate: y = w ⊙ x / sqrt(mean(x²) + eps) ⊙ f(gate) (arXiv 2312.06635, section 4.4)."""

    def __init__(self, size: int, eps: float, gate_function: GateFunction = GateFunction.swish) -> None:
        super().__init__(size, eps)
        self.gate_function = gate_function

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Map x, gate [..., size] → [..., size], in the dtype of x."""
        return gated_norm(x, gate, self.weight, self.eps, self.gate_function is GateFunction.swish)


class RMSNormOfGated(_Norm):
    """RMS norm by groups of Mamba-2's gated output, see `zeco_train.ops.mamba2` (arXiv 2405.21060, section 7.1)."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__(size, eps)
        self.groups = groups

    def forward(self, o: Tensor, skip: Tensor, u: Tensor, gate: Tensor, decay: Tensor) -> Tensor:
        """Map o, skip [B, T, H, V], u, gate [B, T, H·V], decay [3, H] → [B, T, H·V], in the dtype of o."""
        return output(o, skip, u, gate, decay, self.weight, self.groups, self.eps)


class ShortConvolution(nn.Module):
    """The parameters of a causal convolution of each channel with its own weights: weight [C, 1, w], bias [C]."""

    def __init__(self, channels: int, width: int, bias: bool) -> None:
        super().__init__()
        self._range = width**-0.5
        self.weight = nn.Parameter(torch.empty(channels, 1, width).uniform_(-self._range, self._range))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-self._range, self._range)) if bias else None

    def operands(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the operator `short_conv`; without a bias, zeros."""
        return self.weight, self.weight.new_zeros(self.weight.shape[0]) if self.bias is None else self.bias

    def parameter_rules(self) -> Mapping[str, ParameterRule]:
        """Initial values as of `torch.nn.Conv1d`."""
        weight = ParameterRule(uniform(-self._range, self._range), decays=True, draws=1)
        return {"weight": weight} if self.bias is None else {"weight": weight, "bias": weight._replace(decays=False)}


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """swish(gate) ⊙ up, for two tensors of one shape and dtype (Shazeer, 2020)."""
    if torch.compiler.is_compiling():
        wide = gate.to(accumulation_dtype(gate.dtype))
        return (wide * wide.sigmoid() * up).to(gate.dtype)
    return _SwiGLUFunction.apply(gate, up)


class _EmbeddingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = weight.shape[0]
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        # The CUDA kernel sums in fp32 itself.
        wide = dy if dy.device.type == "cuda" else dy.to(accumulation_dtype(dy.dtype))
        return None, torch.ops.aten.embedding_dense_backward(wide, ids, ctx.rows, -1, False).to(dy.dtype)


class _RMSNormFunction(torch.autograd.Function):
    # With r = (mean(x²) + eps)^-1/2, x̂ = r x and h = w ⊙ dy, w the weight, or 1 + it:
    # y = w ⊙ x̂;  dw = Σ dy ⊙ x̂ over all but the last dimension;  dx = r (h − x̂ mean(h ⊙ x̂))

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, zero_centred: bool) -> Tensor:
        normed, rstd = normalise(x, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.zero_centred = zero_centred
        return normed.mul_(_factor(weight, zero_centred)).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        normed = x.to(rstd.dtype) * rstd
        dx, dweight = norm_grads(normed, dy.to(rstd.dtype), _factor(weight, ctx.zero_centred), rstd)
        return dx.to(x.dtype), dweight.to(weight.dtype), None, None, None


class _SwiGLUFunction(torch.autograd.Function):
    # y = swish(g) ⊙ u;  dg = dy ⊙ u ⊙ swish'(g),  du = dy ⊙ swish(g)

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        wide = gate.to(accumulation_dtype(gate.dtype))
        return wide.sigmoid().mul_(wide).mul_(up).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        swish, slope = swish_and_slope(gate.to(accumulation_dtype(gate.dtype)))
        return slope.mul_(up).mul_(dy).to(gate.dtype), swish.mul_(dy).to(up.dtype)


# 1 + weight in the accumulation dtype: bf16 would round it.
def _factor(weight: Tensor, zero_centred: bool) -> Tensor:
    return weight.to(accumulation_dtype(weight.dtype)) + 1 if zero_centred else weight


# Positions are split at this power of two, see `_turns`.
_LOW_BITS = 12


def rotate(q: Tensor, k: Tensor, positions: Tensor, theta: float, size: int | None = None) -> tuple[Tensor, Tensor]:
    """Rotary position embeddings (Su et al., 2021, arXiv 2104.09864), exact at any position.

    Channels j and j + K/2 of a head of K are rotated by the angle position · theta^(-2j/K): the halves of a head, not
    neighbouring channels, as in flash-linear-attention and transformers.

    Args:
        q: [B, T, H, K], K even.
        k: likewise.
        positions: [T] int64, positions of the tokens; or [B, T] if sequences differ, as [B, 1] in generation.
        theta: base of the frequencies.
        size: channels of a head that are rotated, the first ones, an even number; None: all.

    Returns:
        q and k, in their shapes and dtypes. Angles are computed in fp64, the rotation in fp32 (fp64 for fp64).
    """
    # In [-π, π], so fp32 is enough for them.
    size = q.shape[-1] if size is None else size
    angles = (_turns(positions, theta, size) * (2 * math.pi)).to(accumulation_dtype(q.dtype)).unsqueeze(-2)
    cos, sin = angles.cos(), angles.sin()
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


# The angles as fractions of a turn, in [-1/2, 1/2]: [..., size / 2] in fp64. A position is a · 2^12 + b. A frequency f,
# in turns, times 2^12 is exact, and so is its distance to the nearest whole number, so that no product below is large:
# errors stay below 1e-12 up to 2^24 tokens. At position 8 million, angles in fp32 would be multiples of 0.5.
def _turns(positions: Tensor, theta: float, size: int) -> Tensor:
    exponents = torch.arange(0, size, 2, dtype=torch.float64, device=positions.device) / -size
    frequencies = torch.pow(theta, exponents) / (2 * math.pi)
    high = (positions >> _LOW_BITS).unsqueeze(-1).double()
    low = (positions & ((1 << _LOW_BITS) - 1)).unsqueeze(-1).double()
    turns = high * _fraction(frequencies * (1 << _LOW_BITS)) + low * frequencies
    return _fraction(turns)


def _fraction(turns: Tensor) -> Tensor:
    return turns - turns.round()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # cos and sin are [T, 1, R/2] or [B, T, 1, R/2]; channels from R on stay.
    half = cos.shape[-1]
    first, second, rest = x.to(cos.dtype).split((half, half, x.shape[-1] - 2 * half), dim=-1)
    rotated = first * cos - second * sin, first * sin + second * cos
    return torch.cat((*rotated, rest) if rest.shape[-1] else rotated, dim=-1).to(x.dtype)
