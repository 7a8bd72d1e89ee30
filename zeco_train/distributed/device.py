"""Selects a rank's device."""

from __future__ import annotations

import os
from enum import Enum

import torch

from zeco_train.distributed.mesh import Launch
from zeco_train.errors import ConfigError
from zeco_train.system.code_cache import use_private_caches


class Device(Enum):
    """Where to run. `auto` uses CUDA devices if there are any."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def find_device(wanted: Device, launch: Launch, key: str = "device") -> torch.device:
    """Select this rank's device and make it current.

    Args:
        wanted: the user's setting.
        launch: the launcher's description of this process.
        key: name of the setting, for errors.

    Raises:
        ConfigError: there are fewer CUDA devices than ranks on this machine; no private folder for compiled code.
    """
    available = torch.cuda.device_count()
    if wanted is Device.cpu or (wanted is Device.auto and not available):
        return torch.device("cpu")
    # Launchers other than torchrun may not set LOCAL_WORLD_SIZE.
    ranks = max(launch.local_world_size, launch.local_rank + 1)
    if ranks > available:
        problem = f"{ranks} ranks on this machine, {available} CUDA devices; or {key}=cpu"
        raise ConfigError(key, wanted.value, problem)
    use_private_caches()  # Triton's kernels are compiled from here on
    _multiply_without_workspaces()
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    return device


def _multiply_without_workspaces() -> None:
    """Give cuBLAS no workspace, unless the user has chosen; before its first product, when torch reads the variables.

    With one cuBLAS takes kernels that hand out their tiles by a counter in it, and clears that before each product: the
    GPU waits for 11 µs, 3.9 ms in a step of gla_1b replayed as a CUDA graph. The kernels that it takes without one hand
    them out in a fixed order and take the same time. Only products of few outputs and long sums, which it would cut
    into parts, take longer: 0.5 ms in the same step.
    """
    # torch refuses an empty workspace where it multiplies by cuBLASLt throughout.
    if not os.environ.keys() & {"CUBLAS_WORKSPACE_CONFIG", "TORCH_BLAS_PREFER_CUBLASLT"}:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
        os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")


def total_memory(device: torch.device) -> tuple[int, str]:
    """Bytes of memory, free or not, and whose they are."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory, "this GPU"
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine"
