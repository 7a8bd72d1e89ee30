"""A step's time by part, from names of kernels as they are in traces of GPUs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import zeco_train
from zeco_train.bench import trace
from zeco_train.bench.trace import overlap_of


def _event(name: str, cat: str = "kernel", microseconds: float = 500.0) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": 0.0, "dur": microseconds, "args": {"stream": 7}}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute", "products"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<...> >", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "products"),
        ("scores_kernel", "operator"),
        ("forward_walk_kernel", "operator"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "operator"),
        ("triton_red_fused__to_copy_add_mul_pow_rsqrt_4", "elementwise"),
        ("rows_kernel", "elementwise"),
        ("gated_norm_grads_kernel", "elementwise"),
        ("adamw_kernel", "optimizer"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<LpNormFunctor<float>>", "optimizer"),
        ("pack_kernel", "copies"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<...>", "copies"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda(...)>", "copies"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("chain_kernel", "communication"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >", "other"),
    ],
)
def test_names_tell_the_part(name: str, part: str) -> None:
    assert part in trace.PARTS
    assert trace.part_of(_event(name)) == part


def test_every_kernel_of_the_project_is_known() -> None:
    (folder,) = zeco_train.__path__
    kernels = {
        name
        for file in Path(folder).glob("**/*.py")
        for name in re.findall(r"@triton\.jit[^\n]*\ndef (\w+)\(", file.read_text())
        if name.endswith("_kernel")
    }
    assert len(kernels) > 20
    assert kernels == {*trace.own_kernels()}


def test_milliseconds_of_a_step() -> None:
    events = [_event("adamw_kernel"), _event("adamw_kernel"), _event("nvjet_tst"), _event("", "gpu_memset", 250.0)]
    found = overlap_of([*events, _event("not of the device", "cpu_op")]).parts
    assert found == {"products": 0.5, "optimizer": 1.0, "copies": 0.25}
    assert trace.described(found) == "products 0.5, optimizer 1.0, copies 0.2"
