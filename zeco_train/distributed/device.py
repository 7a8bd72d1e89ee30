"""Selects a rank's device."""

from __future__ import annotations

import os
from enum import Enum

import torch

from zeco_train.errors import ConfigError
from zeco_train.lifecycle.join import Launch
from zeco_train.system.code_cache import use_private_caches


class Device(Enum):
    """Where to run. `auto` uses CUDA devices if there are any."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def find_device(wanted: Device, launch: Launch, key: str = "device") -> torch.device:
    """Select this rank's device and make it current; errors name the setting `key`.

    Raises ConfigError for more ranks on this machine than CUDA devices, or without a private folder for compiled code.
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
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    return device


def total_memory(device: torch.device) -> tuple[int, str]:
    """Bytes of memory, free or not, and whose they are."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory, "this GPU"
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine"
