"""This machine, and the provenance of results: versions, commit, environment variables that affect measurements."""

from __future__ import annotations

import csv
import fcntl
import os
import platform
import shutil
import socket
import struct
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeco_train.errors import ConfigError

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
    "PYTORCH_",
)
_SIOCGIFADDR = 0x8915


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


def free_gb(path: Path) -> float | None:
    """Free GB at `path`, or at its nearest parent that exists; None if that is not writable."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free / 1e9 if os.access(path, os.W_OK) else None


def address_on(variable: str) -> str | None:
    """This machine's IPv4 address on the interface that an environment variable names; None if it is not set.

    Raises ConfigError if there is no such interface, or it has no address.
    """
    if not (name := os.fsencode(os.environ.get(variable, ""))):
        return None
    try:
        # A struct ifreq of 64-bit Linux: 16 bytes of the name with its closing NUL, then the sockaddr.
        if len(name) > 15:
            raise OSError("longer than 15 bytes")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("40s", name))
    except OSError as error:
        problem = f"no interface with an IPv4 address on this node ({error.strerror or error})"
        raise ConfigError(variable, os.fsdecode(name), problem) from error
    return socket.inet_ntoa(answer[20:24])


def query_gpus(queries: Sequence[str]) -> list[dict[str, str]]:
    """Values of `nvidia-smi --query-gpu` for each GPU that CUDA_VISIBLE_DEVICES allows; none without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(queries)}", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    rows = csv.reader(output.splitlines(), skipinitialspace=True)
    return [dict(zip(queries, row, strict=True)) for row in rows if row]


def product_rates() -> list[float]:
    """TFLOP/s of each GPU over about a second of large bf16 matmuls, on all GPUs at once, as in training."""
    import torch

    size, warm_up, products = 8192, 20, 200
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(torch.cuda.device_count())]
    for number, (start, end) in enumerate(events):
        with torch.cuda.device(number):
            a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
            for product in range(warm_up + products):
                if product == warm_up:
                    start.record()
                torch.mm(a, a)
            end.record()
    for _, end in events:
        end.synchronize()
    return [2e-12 * size**3 * products / (1e-3 * start.elapsed_time(end)) for start, end in events]


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
