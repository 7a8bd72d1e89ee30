"""Checks that configuration, code, versions, environment variables and data are the same on every rank.

Ranks that differ in one of these would train different models without notice, or deadlock.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from zeco_train.distributed.mesh import Launch, ProcessMesh, gather, init_mesh, join
from zeco_train.errors import ConfigError
from zeco_train.system.environment import version

# Not compared, only their contents: a node may have its own copy of the data, or mount the run's folder elsewhere.
_PATHS = ("run_dir", "path", "validation_path", "cache_dir", "load")

# Variables that select the algorithm of a collective or of products, or the order in which a rank issues its work;
# those for a node's hardware (network interfaces and the like) may differ.
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NCCL_ALGO",
    "NCCL_LAUNCH_ORDER_IMPLICIT",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "NVSHMEM_DISABLE_NVLS",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
)

_PACKAGES = ("zeco_train", "models", "data")


def join_alike(
    settings: Mapping[str, Any],
    launch: Launch,
    sp_size: int,
    device: torch.device,
    timeout: timedelta,
    more: Mapping[str, Any] | None = None,
) -> ProcessMesh:
    """Initialise the process groups, and check that all ranks have the same setup. Collective.

    Args:
        settings: plain values of the configuration.
        launch: this rank and the others.
        sp_size: ranks of a sequence.
        device: of this rank.
        timeout: longest wait for a peer.
        more: JSON values that must be the same, too.

    Raises:
        ConfigError: ranks that differ.
    """
    join(device, timeout)
    # Before the first operation in which ranks of different settings would deadlock, such as the creation of groups.
    remedy = "start all ranks with the same command line, code and environment"
    check_same(setup(settings, device) | dict(more or {}), launch.world_size, remedy)
    return init_mesh(launch, sp_size, device, timeout)


def check_same(values: Mapping[str, Any], world_size: int, remedy: str) -> None:
    """Check that all ranks have the same values; only a digest is gathered, unless they differ. Collective.

    Args:
        values: JSON values, by the name shown to the user.
        world_size: number of ranks.
        remedy: advice to the user if they differ.

    Raises:
        ConfigError: on every rank; names the first value that differs, and the ranks that differ from the majority.
    """
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    if len(set(gather(digest, world_size))) == 1:
        return
    everyone = gather(dict(values), world_size)
    differing = [key for key in sorted(set().union(*everyone)) if len({_text(other, key) for other in everyone}) > 1]
    raise _difference(differing, [_text(other, differing[0]) for other in everyone], remedy)


def setup(config: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A rank's configuration (plain values) and environment, for `check_same`."""
    values = {name: value for name, value in flat(config) if name.rpartition(".")[2] not in _PATHS}
    values |= {f"variable {name}": os.environ.get(name, "not set") for name in _VARIABLES}
    values |= {
        "code": _code_version(),
        "device": device.type,
        "version of python": platform.python_version(),
        "version of torch": torch.__version__,
    }
    if device.type == "cuda":
        values |= {"version of triton": version("triton"), "version of fla-core": version("fla-core")}
    return values


def _difference(keys: Sequence[str], by_rank: Sequence[str], remedy: str) -> ConfigError:
    """The error for the values `keys`, which differ; `by_rank` has the first one's value on each rank."""
    counts = Counter(by_rank)
    # Ties: the lowest rank's value.
    usual = max(counts, key=lambda value: (counts[value], -by_rank.index(value)))
    ranks = [rank for rank, value in enumerate(by_rank) if value != usual]
    others = "the others have" if counts[usual] > 1 else f"{name_ranks([by_rank.index(usual)])} has"
    problem = f"{name_ranks(ranks)} {'differs' if len(ranks) == 1 else 'differ'}, {others} {usual}"
    if len(keys) > 1:
        problem += f" (so do {', '.join(keys[1:5])}{', …' if len(keys) > 5 else ''})"
    return ConfigError(keys[0], by_rank[ranks[0]], f"{problem}; {remedy}")


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, such as "rank 3" or "ranks 1, 8–15"."""
    starts = [ranks[0], *(after for before, after in pairwise(ranks) if after != before + 1)]
    ends = [*(before for before, after in pairwise(ranks) if after != before + 1), ranks[-1]]
    spans = [str(a) if a == b else f"{a}–{b}" if b > a + 1 else f"{a}, {b}" for a, b in zip(starts, ends, strict=True)]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(spans)}"


def _text(values: Mapping[str, Any], key: str) -> str:
    return str(values[key]) if key in values else "not set"


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten to pairs such as (`data.seq_len`, 4096); list items by their index."""
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _code_version() -> str:
    """A digest of this project's sources, tracked by git or not."""
    root, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in sorted(path for package in _PACKAGES for path in (root / package).rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
