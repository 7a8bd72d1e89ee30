"""Selecting a device: cuBLAS works without workspaces, so that nothing is cleared between products."""

from __future__ import annotations

import os

import pytest
import torch

from tests.support.distributed import run_distributed
from zeco_train.distributed import device as device_module
from zeco_train.distributed.device import Device, find_device
from zeco_train.distributed.mesh import Launch

CONFIG, LT_SIZE, PREFERRED = "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_BLAS_PREFER_CUBLASLT"


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(device_module, "use_private_caches", lambda: None)
    for name in (CONFIG, LT_SIZE, PREFERRED):
        # Set first, so that the fixture's end removes what the test sets.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, {CONFIG: ":0:0", LT_SIZE: "0"}),
        ({CONFIG: ":4096:8"}, {CONFIG: ":4096:8"}),
        ({LT_SIZE: "1024"}, {CONFIG: ":0:0", LT_SIZE: "1024"}),
        ({PREFERRED: "1"}, {PREFERRED: "1"}),
    ],
)
def test_cublas_gets_no_workspace_unless_the_user_has_chosen(
    chosen: dict[str, str], expected: dict[str, str], one_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    assert find_device(Device.auto, Launch(0, 1, 0)) == torch.device("cuda", 0)
    assert {name: os.environ[name] for name in (CONFIG, LT_SIZE, PREFERRED) if name in os.environ} == expected


def test_cpus_leave_the_environment_as_it_is(one_gpu: None) -> None:
    assert find_device(Device.cpu, Launch(0, 1, 0)) == torch.device("cpu")
    assert CONFIG not in os.environ


def _kernels(rank: int, world_size: int) -> list[str]:
    device = find_device(Device.cuda, Launch(0, 1, 0))
    x, weight = (torch.randn(8192, 2048, dtype=torch.bfloat16, device=device) for _ in range(2))
    bias = torch.zeros(8192, dtype=torch.bfloat16, device=device)

    def products() -> None:
        torch.nn.functional.linear(x, weight)
        torch.nn.functional.linear(x, weight, bias)
        (x.T @ weight).addmm_(x.T, weight)

    products()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        products()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.gpu
def test_nothing_is_cleared_between_products() -> None:
    """Nor does torch refuse products without a workspace: with a bias they are cuBLASLt's."""
    names = run_distributed(_kernels, 1, fresh=True)[0]
    assert len(names) >= 4
    assert not [name for name in names if "memset" in name.lower()], names
