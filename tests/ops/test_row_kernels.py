"""The Triton kernels that round to fp8 give the bits of the PyTorch code: interpreted, and on a GPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.ops.test_linear import rows_of_many_sizes
from tests.support.distributed import run_distributed
from tests.support.interpreter import skip_overflow_checks
from zeco_train.ops import linear as rows_module
from zeco_train.ops.linear import DTYPE, Fp8Rows, quantise_columns, quantise_rows

pytestmark = pytest.mark.numeric

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
        with mock.patch.object(rows_module, "_has_kernels", return_value=True):
            results = {"rows": quantise_rows(*parts), "columns": quantise_columns(*(part.T for part in parts))}
        with mock.patch.object(rows_module, "_has_kernels", return_value=False):
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
            return torch.from_numpy(x.view(np.float32)).to(DTYPE).view(torch.uint8).numpy()
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
