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


def pick_device(wanted: str | torch.device) -> torch.device:
    """The device of a name as torch's, or of "auto", for a process that has no launcher; ConfigError: there is none."""
    available = torch.cuda.device_count()
    try:
        found = torch.device(("cuda" if available else "cpu") if wanted == "auto" else wanted)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda") or (found.type == "cuda" and (found.index or 0) >= available):
        last = f", cuda or cuda:N with N < {available}" if available else "; there are no CUDA devices here"
        raise ConfigError("device", wanted, f"must be auto, cpu{last}")
    if found.type == "cpu":
        return torch.device("cpu")
    use_private_caches()
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


def total_memory(device: torch.device) -> tuple[int, str]:
    """Bytes of memory, free or not, and whose they are."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory, "this GPU"
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine"
