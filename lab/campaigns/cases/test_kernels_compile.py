"""Kernels beside the operators' compile for GPUs, within their shared memory."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tests.ops.test_gated_norm_kernel import EPS, arguments
from tests.support.distributed import run_distributed
from tests.support.kernel_cases import SHARED_MEMORY, compiling
from zeco_train.ops import linear
from zeco_train.ops.gated_norm import kernels as launch

pytestmark = pytest.mark.campaign

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def _of_gated_norm(rank: int, world_size: int, dtype: torch.dtype, width: int) -> dict[str, int]:
    inputs = arguments((1, 64, 4, width), dtype, torch.device("cpu"))
    dy = inputs.pop("dy")
    with compiling(90) as shared:
        _, rstd = launch.launch_gated_norm(**inputs, eps=EPS, is_swish=True)
        launch.launch_gated_norm_grads(dy, **inputs, rstd=rstd, is_swish=True)
    return shared


@DTYPES
@pytest.mark.parametrize("width", [2048, 128])
def test_kernels_of_gated_norms_compile(dtype: torch.dtype, width: int) -> None:
    [shared] = run_distributed(_of_gated_norm, 1, dtype, width, fresh=True)
    assert shared.keys() == {"gated_norm_kernel", "gated_norm_grads_kernel"}
    assert max(shared.values()) <= SHARED_MEMORY[90]


def _of_rows(rank: int, world_size: int, dtype: torch.dtype) -> dict[str, int]:
    parts = [torch.empty(64, width, dtype=dtype) for width in (1024, 1024, 2048)]
    with compiling(90) as shared, mock.patch.object(linear, "_has_kernels", return_value=True):
        linear.quantise_rows(*parts)
        linear.quantise_columns(*(part.T.contiguous() for part in parts))
    return shared


@DTYPES
def test_kernels_that_round_to_fp8_compile(dtype: torch.dtype) -> None:
    [shared] = run_distributed(_of_rows, 1, dtype, fresh=True)
    assert shared.keys() == {"rows_kernel", "column_sizes_kernel", "columns_kernel"}
    assert max(shared.values()) <= SHARED_MEMORY[90]
