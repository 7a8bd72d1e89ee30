"""Products of two matrices in fp8."""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.ops.linear.rows import Fp8Rows
from zeco_train.ops.operator import KernelRule, Target, problem

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
    """The matrix product a bᵀ.

    Emulated, operands are the rounded ones in `dtype`: products and sums are then those of that dtype.

    Args:
        a: [M, K].
        b: [N, K].
        dtype: of the result.
        fast: let GPUs add with fewer bits (14 on Hopper, says DeepSeek-V3's report, arXiv 2412.19437) before they add
            to an fp32 sum.

    Returns:
        [M, N].
    """
    if is_emulated(dtype, a.values.device):
        return a.wide(dtype) @ b.wide(dtype).T
    return torch._scaled_mm(
        a.values, b.values.T, scale_a=a.scales, scale_b=b.scales.T, out_dtype=dtype, use_fast_accum=fast
    )
