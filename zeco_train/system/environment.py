"""Provenance of results: machine, versions, commit, and environment variables that affect measurements."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_PACKAGES = ("zeco-train", "torch", "triton", "fla-core", "flash-linear-attention", "nvidia-cudnn-frontend", "numpy")
_VARIABLES = (
    "CUBLAS",
    "NCCL_",
    "TORCH_BLAS",
    "TORCH_SYMM_MEM",
    "TORCH_NCCL",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NVSHMEM_",
    "OMP_NUM_THREADS",
)


def environment(device: torch.device, commit: str = "") -> dict[str, Any]:
    """Versions, devices, commit and variables that affect measurements; for JSON.

    Without `commit` git is asked for it; a copy of the tree may have no git data, or outdated data.
    """
    import torch

    found = installation(commit) | {"device": device.type}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device_name": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    else:
        found |= {"device_name": processor(), "threads": torch.get_num_threads()}
    return found


def installation(commit: str = "") -> dict[str, Any]:
    """The software part of `environment`, without importing torch, which takes seconds."""
    commit = commit or _commit() or ""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version(name) for name in _PACKAGES},
        "commit": commit,
        "dirty": commit.endswith("+") if commit else None,
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
    }


def processor() -> str:
    """The CPU's name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def process_memory(kind: str) -> int | None:
    """A memory field of /proc/self/status in bytes; None on systems other than Linux."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return 1024 * int(lines[kind].split()[0])


def version(package: str) -> str | None:
    """A package's version; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    # The commit of this source tree, with `+` if it has uncommitted changes; None without git, and for a package
    # installed in the folder of another repository, as in a virtual environment there.
    file = Path(__file__).resolve()
    answers = []
    for command in (
        # The path of the working folder in its repository: empty at the top.
        ["rev-parse", "--show-prefix"],
        # Fails if the file is not tracked.
        ["ls-files", "--error-unmatch", str(file)],
        ["rev-parse", "HEAD"],
        ["status", "--porcelain", "--untracked-files=no"],
    ):
        try:
            done = subprocess.run(
                ["git", *command], cwd=file.parents[2], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        answers.append(done.stdout.strip())
    prefix, _, commit, changes = answers
    return None if prefix else commit + ("+" if changes else "")
