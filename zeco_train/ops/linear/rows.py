"""Rows of a matrix in fp8: e4m3 numbers, and one power of two for each row.

A power of two scales without rounding errors, so each number is rounded once, to three bits after its leading one. As
the numbers are floating, the factor of up to 2 by which a row's largest may stay below the format's costs no precision,
only one of 18 binary orders of magnitude: those below 2⁻¹⁷ of a row's largest become 0, and those below 2⁻¹⁴ lose bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype

DTYPE = torch.float8_e4m3fn

# Fields of fp32: 1.75 · 2⁸ = 448 is the largest number of e4m3.
_FRACTION_BITS = 23
_FRACTION = (1 << _FRACTION_BITS) - 1
_INFINITY = 0xFF << _FRACTION_BITS
_LARGEST_FRACTION = 3 << 21  # of 1.75
_LARGEST_EXPONENT = 8
_EXPONENTS = 254  # twice the bias: the exponent fields of x and 1 / x add up to this


class Rows(NamedTuple):
    """A matrix in fp8: values ⊙ scales.

    Attributes:
        values: [M, K] float8_e4m3fn, contiguous.
        scales: [M, 1] fp32, powers of two; NaN for rows that are not finite.
    """

    values: Tensor
    scales: Tensor

    def wide(self, dtype: torch.dtype) -> Tensor:
        """The matrix in bf16, fp32 or fp64, without rounding."""
        return self.values.to(dtype) * self.scales.to(dtype)


def quantise_rows(x: Tensor) -> Rows:
    """Round the rows of x [M, K], in bf16, fp32 or fp64 and of any strides, to the nearest numbers of fp8.

    A row with infinity or NaN gets the scale NaN, so that a product with it is NaN too.
    """
    wide = x.to(accumulation_dtype(x.dtype))
    factors, scales = _powers(x.abs().amax(dim=-1, keepdim=True).to(torch.float32))
    return Rows((wide * factors).to(DTYPE).contiguous(), scales)


def _powers(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Factors 2⁻ᵉ and scales 2ᵉ of rows, fp32, with the least e for which the largest number is at most 448 · 2ᵉ.

    From the bits of fp32, since quotients and logarithms are not rounded alike on all devices. Rows below 2⁻¹¹⁷, whose
    factor would overflow, take the largest factor.
    """
    bits = largest.view(torch.int32)
    above = ((bits & _FRACTION) > _LARGEST_FRACTION).to(torch.int32)
    exponents = ((bits >> _FRACTION_BITS) + above - _LARGEST_EXPONENT).clamp(min=1)
    factors = ((_EXPONENTS - exponents) << _FRACTION_BITS).view(torch.float32)
    scales = (exponents << _FRACTION_BITS).view(torch.float32)
    return factors, scales.masked_fill(bits >= _INFINITY, torch.nan)
