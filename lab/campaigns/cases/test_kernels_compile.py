"""Kernels compile for GPUs, within their shared memory: of every operator, of gated norms, of rounding to fp8."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tests.ops.test_gated_norm_kernel import EPS, arguments
from tests.ops.test_kernels import compiled
from tests.support.distributed import run_distributed
from tests.support.kernel_cases import SHARED_MEMORY, KernelCase, compiling
from zeco_train.ops import linear
from zeco_train.ops.gated_norm import kernels as launch

pytestmark = pytest.mark.campaign

# Capability, dtype, case, number of kernels.
COMPILED = {
    "gla, sm_90": (90, torch.bfloat16, KernelCase("gla", 192, (1, 2, 2, 64, 128)), 7),
    "gla, sm_90, the widest heads": (90, torch.bfloat16, KernelCase("gla", 192, (1, 2, 2, 256, 512), 0.2, (0, 70)), 7),
    "gla, sm_90, all keys": (90, torch.bfloat16, KernelCase("gla", 192, (1, 1, 1, 512, 1024), 0.2, (0, 70)), 7),
    "gla, sm_90, all keys in fp32": (90, torch.float32, KernelCase("gla", 192, (1, 1, 1, 512, 512)), 7),
    "gla, sm_90, fp32": (90, torch.float32, KernelCase("gla", 192, (1, 2, 2, 64, 128), 0.2, (0, 70)), 7),
    "gla, sm_90, few values": (90, torch.bfloat16, KernelCase("gla", 63, (1, 2, 2, 64, 8)), 8),
    "gla, sm_90, odd": (90, torch.bfloat16, KernelCase("gla", 192, (1, 2, 2, 40, 24), 0.2, (0, 70)), 8),
    "gla, sm_80": (80, torch.bfloat16, KernelCase("gla", 192, (1, 2, 2, 64, 128), 0.2, (0, 70)), 7),
    "gla, sm_80, all keys": (80, torch.bfloat16, KernelCase("gla", 192, (1, 2, 2, 512, 512), 0.2, (0, 70)), 7),
    "scalar, sm_90": (90, torch.bfloat16, KernelCase("scalar_decay", 512, (1, 2, 2, 64, 64)), 6),
    "fixed, sm_90, the widest heads": (90, torch.bfloat16, KernelCase("fixed_decay", 512, (1, 1, 2, 256, 256)), 6),
    "fixed, sm_90, fp32": (90, torch.float32, KernelCase("fixed_decay", 512, (1, 2, 2, 128, 128), 0.2, (0, 70)), 4),
    "scalar, sm_80": (80, torch.bfloat16, KernelCase("scalar_decay", 512, (1, 2, 2, 128, 128), 0.2, (0, 70)), 6),
    "fixed, sm_90, by chunks": (
        90,
        torch.bfloat16,
        KernelCase("fixed_decay", 512, (1, 2, 2, 256, 512), 0.2, (0, 70)),
        6,
    ),
    "scalar, sm_90, by chunks": (90, torch.bfloat16, KernelCase("scalar_decay", 512, (1, 1, 8, 512, 512)), 7),
    "scalar, sm_80, by chunks": (80, torch.bfloat16, KernelCase("scalar_decay", 512, (1, 1, 2, 512, 272)), 7),
    "scalar, sm_90, Mamba-2": (90, torch.bfloat16, KernelCase("scalar_decay", 512, (1, 1, 16, 128, 64)), 7),
    "scalar, sm_90, Bamba": (90, torch.bfloat16, KernelCase("scalar_decay", 512, (1, 1, 16, 256, 64), 0.2, (0, 70)), 7),
    "fixed, sm_90, Based": (90, torch.bfloat16, KernelCase("fixed_decay", 512, (1, 4, 4, 273, 64), 0.2, (0, 70)), 4),
    "kda, sm_90": (90, torch.bfloat16, KernelCase("kda", 512, (1, 2, 2, 128, 128)), 6),
    "kda, sm_90, the widest heads": (90, torch.bfloat16, KernelCase("kda", 512, (1, 2, 2, 256, 512), 0.2, (0, 70)), 6),
    "gated, sm_90": (90, torch.bfloat16, KernelCase("gated_delta", 512, (1, 1, 2, 128, 256)), 6),
    "delta, sm_90, fp32": (90, torch.float32, KernelCase("delta", 512, (1, 2, 2, 128, 128)), 5),
    "gated, sm_80": (80, torch.bfloat16, KernelCase("gated_delta", 512, (1, 1, 2, 128, 128), 0.2, (0, 70)), 6),
    "gated, sm_80, wide keys": (80, torch.bfloat16, KernelCase("gated_delta", 512, (1, 2, 2, 256, 256)), 6),
    "gsa, sm_90": (90, torch.bfloat16, KernelCase("gsa", 512, (1, 2, 2, 64, 512), 0.2, (0, 70)), 8),
    "gsa, sm_90, fp32": (90, torch.float32, KernelCase("gsa", 512, (1, 2, 2, 128, 64)), 8),
    "gsa, sm_80": (80, torch.bfloat16, KernelCase("gsa", 512, (1, 2, 2, 64, 512), 0.2, (0, 70)), 8),
    "hgrn, sm_90": (90, torch.bfloat16, KernelCase("hgrn", 150, (1, 2, 2, 64, 1), 0.2, (0, 70)), 4),
    "hgrn, sm_80": (80, torch.bfloat16, KernelCase("hgrn", 150, (1, 2, 2, 64, 1), 0.2, (0, 70)), 4),
    "mamba1, sm_90": (90, torch.bfloat16, KernelCase("mamba1", 150, (1, 1, 64, 16, 1), 0.2, (0, 70)), 4),
    "mamba1, sm_90, fp32, many states": (90, torch.float32, KernelCase("mamba1", 150, (1, 1, 64, 64, 1)), 4),
    "mamba1, sm_80": (80, torch.bfloat16, KernelCase("mamba1", 150, (1, 1, 64, 16, 1), 0.2, (0, 70)), 4),
}


@pytest.mark.parametrize("name", COMPILED)
def test_kernels_of_operators_compile(name: str) -> None:
    *arguments, number = COMPILED[name]
    found = run_distributed(compiled, 1, *arguments, fresh=True)[0]
    assert len(found) == number
    assert max(found.values()) <= SHARED_MEMORY[COMPILED[name][0]], found


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
