"""Matrix products of linear layers in fp8, one scale for each row of both operands.

`quantise_rows` rounds the rows of a matrix to fp8, `product` multiplies two such matrices: on GPUs by their fp8 units,
elsewhere emulated. `models.projections` uses both for y = x Wᵀ and dx = dy W:

    y   a scale for each token of x, and for each output of W
    dx  a scale for each token of dy, and for each input of W
    dW  in the compute dtype: it sums over tokens, so its scales would depend on how a sequence is split over ranks

A token's scale depends on that token alone, and FSDP gathers a weight before its use, so the loss depends on neither
split. torchao's recipe `rowwise_with_gw_hp` has the same products, with one scale for the whole W in dx.

Rows are e4m3 numbers and one power of two, which scales without rounding: each number is rounded once, to three bits
after its leading one. Numbers below 2⁻¹⁷ of a row's largest become 0, and those below 2⁻¹⁴ lose bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.operator import KernelRule, Target, problem


class Matmul(Enum):
    """Format of the operands of the blocks' linear layers. `bf16`: the compute dtype, whichever it is."""

    bf16 = "bf16"
    fp8 = "fp8"


DTYPE = torch.float8_e4m3fn
_KERNELS = KernelRule()

# Fields of fp32: 1.75 · 2⁸ = 448 is the largest number of e4m3.
_FRACTION_BITS = 23
_FRACTION = (1 << _FRACTION_BITS) - 1
_INFINITY = 0xFF << _FRACTION_BITS
_LARGEST_FRACTION = 3 << 21  # of 1.75
_LARGEST_EXPONENT = 8
_EXPONENTS = 254  # twice the bias: the exponent fields of x and 1 / x add up to this


class Fp8Rows(NamedTuple):
    """A matrix in fp8, values ⊙ scales; the scales are powers of two, NaN for rows that are not finite."""

    values: Tensor  # [M, K] float8_e4m3fn, contiguous
    scales: Tensor  # [M, 1] fp32

    def wide(self, dtype: torch.dtype) -> Tensor:
        """The matrix in bf16, fp32 or fp64, without rounding."""
        return self.values.to(dtype) * self.scales.to(dtype)


def quantise_rows(*parts: Tensor) -> Fp8Rows:
    """Round the rows of matrices side by side, [M, K_i] each, to the nearest numbers of fp8.

    A row with infinity or NaN gets the scale NaN, so that a product with it is NaN too. All parts have one dtype: bf16,
    fp32 or fp64.
    """
    if _has_kernels(parts[0]):
        from zeco_train.kernels.rows import launch_rows  # late: imports Triton

        rows = _empty(parts[0], len(parts[0]), sum(part.shape[1] for part in parts))
        launch_rows(parts, *rows)
        return rows
    x = torch.cat([*parts], -1) if len(parts) > 1 else parts[0]
    factors, scales = _powers(x.abs().amax(dim=-1, keepdim=True).to(torch.float32))
    return Fp8Rows((x.to(accumulation_dtype(x.dtype)) * factors).to(DTYPE).contiguous(), scales)


def quantise_columns(*parts: Tensor) -> Fp8Rows:
    """`quantise_rows` of the transposed matrices: parts [N_i, D] → rows [D, ΣN_i]."""
    if _has_kernels(parts[0]):
        from zeco_train.kernels.rows import launch_columns  # late: imports Triton

        rows = _empty(parts[0], parts[0].shape[1], sum(map(len, parts)))
        launch_columns(parts, *rows)
        return rows
    return quantise_rows(*(part.T for part in parts))


def _has_kernels(x: Tensor) -> bool:
    # A compiler rounds where it computes x, which saves a pass over it.
    return not torch.compiler.is_compiling() and _KERNELS.serves(x, x)


def _empty(like: Tensor, rows: int, width: int) -> Fp8Rows:
    return Fp8Rows(like.new_empty((rows, width), dtype=DTYPE), like.new_empty((rows, 1), dtype=torch.float32))


def _powers(largest: Tensor) -> tuple[Tensor, Tensor]:
    # Factors 2⁻ᵉ and scales 2ᵉ of rows, fp32, with the least e for which the largest number is at most 448 · 2ᵉ, or for
    # rows below 2⁻¹¹⁷ the largest factor that does not overflow. From the bits of fp32, since quotients and logarithms
    # are not rounded alike on all devices.
    bits = largest.view(torch.int32)
    above = ((bits & _FRACTION) > _LARGEST_FRACTION).to(torch.int32)
    exponents = ((bits >> _FRACTION_BITS) + above - _LARGEST_EXPONENT).clamp(min=1)
    factors = ((_EXPONENTS - exponents) << _FRACTION_BITS).view(torch.float32)
    scales = (exponents << _FRACTION_BITS).view(torch.float32)
    return factors, scales.masked_fill(bits >= _INFINITY, torch.nan)


# Compute capability of the first GPUs with fp8 products (Ada; Hopper has 9.0).
FIRST_CAPABILITY = (8, 9)
# The widths of a linear layer on GPUs must be multiples of this.
WIDTH_MULTIPLE = 16
# The units of GPUs give results in bf16; for other dtypes products are emulated.
PRODUCTS = KernelRule((torch.bfloat16,))


def is_emulated(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products with results of this dtype are emulated."""
    return problem(PRODUCTS, Target.of(device), 0, 0, dtype) is not None


def product(a: Fp8Rows, b: Fp8Rows, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """The matrix product a bᵀ [M, N] in `dtype`, of a [M, K] and b [N, K].

    Emulated, operands are the rounded ones in `dtype`: products and sums are then those of that dtype. `fast` lets GPUs
    add with fewer bits (14 on Hopper, says DeepSeek-V3's report, arXiv 2412.19437) before they add to an fp32 sum.
    """
    if is_emulated(dtype, a.values.device):
        return a.wide(dtype) @ b.wide(dtype).T
    return torch._scaled_mm(
        a.values, b.values.T, scale_a=a.scales, scale_b=b.scales.T, out_dtype=dtype, use_fast_accum=fast
    )


class Aside(NamedTuple):
    """A linear layer beside an operator, y = x Wᵀ, which the operator computes while its scan is under way.

    So does its backward pass with dW. `edge` stands for y and has dy as its gradient. The backward of the op that made
    it adds up the gradients of x of all its readers, in the same order as without an `Aside`, so rounded alike.
    """

    x: Tensor  # [..., D]
    weight: Tensor  # [N, D]
    more: tuple[Tensor, ...]  # as of `linear`
    edge: Tensor  # [..., N], without values


def linear(x: Tensor, weight: Tensor, more: Sequence[Tensor] = ()) -> Tensor:
    """The product x Wᵀ [..., N] of x [..., D] and W [N, D]; `more`: the bias [N], or x as `Fp8Rows` for one in fp8."""
    if len(more) == 2:
        return product(Fp8Rows(*more), quantise_rows(weight), x.dtype, fast=True).view(*x.shape[:-1], -1)
    return F.linear(x, weight, *more)


def weight_grad(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of a weight, dyᵀ x [N, D], of dy [..., N] and x [..., D]."""
    return dy.flatten(0, -2).T @ x.flatten(0, -2)
