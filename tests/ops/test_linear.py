"""Rows and products in fp8 against code that shares nothing with ours; the kernels give its bits, also on a GPU."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.distributed import run_distributed
from tests.support.interpreter import skip_overflow_checks
from zeco_train.ops import linear
from zeco_train.ops.linear import Fp8Rows, product, quantise_columns, quantise_rows

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
    (left, right), settings = scaled.call_args
    assert (right.stride(), settings["use_fast_accum"]) == ((1, 64), True)
    # A CPU takes other layouts, too.
    assert left.is_contiguous()
    assert settings["scale_b"].is_contiguous()
    assert (settings["scale_a"].shape, settings["scale_b"].shape) == ((32, 1), (1, 48))
    # Rounded to bf16: half a step of 2⁻⁷ at most.
    torch.testing.assert_close(found.float(), emulated, rtol=2**-8, atol=1e-5)


# Kernels


DTYPES = [torch.bfloat16, torch.float32]


def matrices(dtype: torch.dtype, device: torch.device) -> dict[str, list[Tensor]]:
    """Matrices side by side: sizes around a program's tile, some not contiguous, numbers that are not finite."""
    special = rows_of_many_sizes(torch.float32)[: 40 if device.type == "cuda" else 20]
    special[0], special[1, 5], special[2, 7], special[3, 0] = 0.0, torch.inf, torch.nan, -torch.inf
    special[4], special[5], special[6] = 2.0**-130, 3e38, torch.linspace(-448, 448, 32)
    cases = {"special": [special], "several": [special[:, :16], special[:, 16:17], special[:, 17:]]}
    if device.type == "cuda":
        generator = torch.Generator().manual_seed(0)
        wide = torch.randn(70, 5000, generator=generator) * torch.logspace(-8, 8, 70)[:, None]
        cases |= {
            "one row": [special[6:7]],
            "wide": [wide[:, :3000], wide[:, 3000:]],
            "transposed": [wide.T[:70, :40].T],
        }
    return {name: [part.to(dtype).to(device) for part in parts] for name, parts in cases.items()}


def wrong(dtype: torch.dtype, device: torch.device) -> list[str]:
    """Cases in which the kernels' results have other bits than PyTorch's."""
    found = []
    for name, parts in matrices(dtype, device).items():
        with mock.patch.object(linear, "_has_kernels", return_value=True):
            results = {"rows": quantise_rows(*parts), "columns": quantise_columns(*(part.T for part in parts))}
        with mock.patch.object(linear, "_has_kernels", return_value=False):
            expected = quantise_rows(*(part.cpu() for part in parts))
        found += [f"{name}, {kind}" for kind, rows in results.items() if not _equal(rows, expected)]
    return found


def _equal(found: Fp8Rows, expected: Fp8Rows) -> bool:
    finite = expected.scales.isfinite()
    values = (rows.values.cpu().float().where(finite, torch.zeros(())) for rows in (found, expected))
    return torch.equal(*values) and torch.equal(*(rows.scales.cpu().nan_to_num(-1) for rows in (found, expected)))


def _interpreted(rank: int, world_size: int) -> list[str]:
    import numpy as np
    from triton.runtime import interpreter

    from zeco_train.kernels import rows

    skip_overflow_checks()
    converted = interpreter._convert_float

    def convert(x: np.ndarray, of: object, to: object, rounding: object) -> np.ndarray:
        # The interpreter loses bf16's subnormal numbers; to fp8 it rounds ties up, without a carry into the exponent.
        if (str(of), str(to)) == ("bf16", "fp32"):
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).float().numpy()
        if str(to) == "fp8e4nv":
            return torch.from_numpy(x.view(np.float32)).to(linear.DTYPE).view(torch.uint8).numpy()
        return converted(x, of, to, rounding)

    # The smallest tiles, so that small matrices have several: each program takes milliseconds.
    tiles = {"_BLOCK": 16, "_TILE_ROWS": 16, "_TILE_COLUMNS": 16, "_SIZES_ROWS": 16}
    with mock.patch.object(interpreter, "_convert_float", convert), mock.patch.multiple(rows, **tiles):
        return [f"{dtype}: {case}" for dtype in DTYPES for case in wrong(dtype, torch.device("cpu"))]


def test_kernels_give_the_bits_of_pytorch_under_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_distributed(_interpreted, 1, fresh=True) == [[]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_give_the_bits_of_pytorch_on_gpu(dtype: torch.dtype) -> None:
    assert wrong(dtype, torch.device("cuda")) == []
