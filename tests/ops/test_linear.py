"""Rows and products in fp8, against code that shares nothing with ours."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from torch import Tensor

from zeco_train.ops.linear import product, quantise_rows

pytestmark = pytest.mark.numeric

# All numbers ≥ 0 of e4m3, from its definition: 4 bits of exponent with bias 7, 3 of fraction, the last one is NaN.
E4M3 = torch.tensor(
    [
        math.ldexp(fraction / 8 + (exponent > 0), max(exponent, 1) - 7)
        for exponent in range(16)
        for fraction in range(8)
        if (exponent, fraction) != (15, 7)
    ],
    dtype=torch.float64,
)


def by_search(x: Tensor) -> Tensor:
    """The rows rounded to fp8: the nearest of all numbers of the format; of two, that with an even last bit."""
    found = []
    for row in x.double():
        largest = row.abs().max().item()
        scale = 1.0 if largest == 0 else 2.0 ** math.ceil(math.log2(largest / 448))
        distances = (row.abs()[:, None] / scale - E4M3).abs()
        odd = torch.arange(len(E4M3)) % 2
        # Distances of this format are multiples of 2⁻⁹ or, to a number of few bits, of its last one.
        nearest = (distances + 1e-12 * odd).argmin(-1)
        found.append(E4M3[nearest] * row.sign() * scale)
    return torch.stack(found)


def rows_of_many_sizes(dtype: torch.dtype) -> Tensor:
    """[40, 32]: rows of sizes 1e-30 … 1e30, elements of very different sizes within each."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 32, generator=generator) * torch.randn(40, 32, generator=generator).mul(3).exp()
    return (x * torch.logspace(-30, 30, 40)[:, None]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_are_rounded_to_the_nearest_numbers(dtype: torch.dtype) -> None:
    x = rows_of_many_sizes(dtype)
    # Ties, the largest number and the limit at which a row takes the next scale.
    x[0] = torch.tensor([448.0, -448, 17, 19, -25, 0.0009765625, 0.0029296875, 1e-9, *[0.0] * 24])
    x[1] = torch.tensor([450.0, -7, *[0.0] * 30])
    rows = quantise_rows(x)
    assert rows.values.dtype == torch.float8_e4m3fn
    assert torch.equal(rows.wide(torch.float64), by_search(x))
    assert torch.equal(torch.frexp(rows.scales).mantissa, torch.full_like(rows.scales, 0.5))  # powers of two
    # The range is used, but for a power of two.
    assert (rows.values.double().abs().amax(-1) >= 224).all()


def test_dtypes_and_strides_do_not_change_rows() -> None:
    x = rows_of_many_sizes(torch.bfloat16)
    expected = quantise_rows(x)
    for same in (x.float(), x.double(), x.T.contiguous().T):
        found = quantise_rows(same)
        assert torch.equal(found.values.float(), expected.values.float())
        assert torch.equal(found.scales, expected.scales)
        assert found.values.is_contiguous()


def test_rows_that_are_zero_subnormal_or_not_finite() -> None:
    tiny = 2.0**-130  # subnormal in bf16
    x = torch.tensor([[0.0, -0.0], [tiny, -tiny / 8], [1.0, torch.inf], [torch.nan, 1.0], [3e38, -3e38], [1.0, -1.0]])
    x = x.bfloat16()
    found = quantise_rows(x).wide(torch.float64)
    assert torch.equal(found[0], torch.zeros(2, dtype=torch.float64))
    assert torch.equal(found[1], x[1].double())
    assert found[2:4].isnan().all()
    torch.testing.assert_close(found[4:], x[4:].double(), rtol=2**-4, atol=0)
    # A row that is not finite reaches its own outputs, and those of no other row.
    y = product(quantise_rows(x), quantise_rows(torch.ones(3, 2)), torch.float32)
    assert y[2:4].isnan().all()
    assert y[[0, 1, 4, 5]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_product_is_that_of_the_rounded_rows(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(size, 64, generator=generator, dtype=torch.float64).to(dtype) for size in (24, 48))
    found = product(quantise_rows(a), quantise_rows(b), dtype)
    exact, sizes = (by_search(a) @ by_search(b).T, by_search(a).abs() @ by_search(b).abs().T)
    terms = 1 if dtype == torch.bfloat16 else 64  # bf16 is summed in fp32 and rounded once
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= terms * torch.finfo(dtype).eps * sizes).all()
    # The error of rounding, a step of 2⁻³ at most: of this format and no finer one.
    error = (found.double() - a.double() @ b.double().T).norm() / exact.norm()
    assert 0.01 < error < 0.06


def test_emulation_equals_torch_scaled_product() -> None:
    """The product that runs on GPUs, as PyTorch computes it on CPUs: also its layouts and scales are accepted."""
    generator = torch.Generator().manual_seed(2)
    a, b = (quantise_rows(torch.randn(size, 64, generator=generator).bfloat16()) for size in (32, 48))
    emulated = product(a, b, torch.float32)
    with (
        mock.patch("zeco_train.ops.linear.is_emulated", return_value=False),
        mock.patch.object(torch, "_scaled_mm", wraps=torch._scaled_mm) as scaled,
    ):
        found = product(a, b, torch.bfloat16, fast=True)
    assert found.dtype == torch.bfloat16
    (_, right), settings = scaled.call_args
    assert (right.stride(), settings["use_fast_accum"]) == ((1, 64), True)
    # Rounded to bf16: half a step of 2⁻⁷ at most.
    torch.testing.assert_close(found.float(), emulated, rtol=2**-8, atol=1e-5)
