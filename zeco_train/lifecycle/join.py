"""How a rank joins the others: its launcher's variables, the launcher's store, the rendezvous, and equal setups.

Ranks that differ in configuration, code, versions, environment variables or data would train different models without
notice, or deadlock.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zeco_train.errors import CommunicationError, ConfigError
from zeco_train.system.environment import version
from zeco_train.system.files import FILES_OF_A_PROCESS, allow_open_files
from zeco_train.system.stored_values import flatten

T = TypeVar("T")

logger = logging.getLogger(__name__)

_LAUNCH_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
# Needed for torch's rendezvous.
_NEEDED = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_DIGITS = re.compile(r"[0-9]{1,7}")
_LARGEST_PORT = 65535
_SECONDS_BETWEEN_TRIES = 0.5
# To reach the launcher's store.
_STORE_TIMEOUT = timedelta(seconds=10)
# Groups of all ranks, at most.
_GROUPS = 10
# Of flight recorders.
_ENTRIES = "2000"

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


class OwnRankError(ConfigError):
    """An error in this rank's environment variables, which the other ranks need not have."""


@dataclass(frozen=True)
class Launch:
    """The launcher's description of this process, before any process group exists."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> Launch:
        """Read torchrun's variables; without `RANK` this is a single process, whatever else a cluster has set.

        Raises ConfigError if some are missing, one is no number or out of range, or `MASTER_ADDR` cannot be resolved.
        """
        if "RANK" not in os.environ:
            return cls(0, 1, 0)
        if missing := [name for name in _NEEDED if name not in os.environ]:
            problem = f"is set, but {', '.join(missing)} not: start with torchrun, or unset it for a single process"
            raise ConfigError("variable RANK", os.environ["RANK"], problem)
        values = [os.environ.get(name, default) for name, default in _LAUNCH_VARIABLES]
        for (name, _), value in zip(_LAUNCH_VARIABLES, values, strict=True):
            least = 1 if name.endswith("WORLD_SIZE") else 0
            if not _DIGITS.fullmatch(value) or int(value) < least:
                allowed = f"must be a whole number ≥ {least} of at most 7 digits; start with torchrun"
                raise ConfigError(f"variable {name}", value, allowed)
        launch = cls(*map(int, values))
        for name, number, size, count in (
            ("RANK", launch.rank, "WORLD_SIZE", launch.world_size),
            ("LOCAL_RANK", launch.local_rank, "LOCAL_WORLD_SIZE", launch.local_world_size),
        ):
            # Launchers other than torchrun may not set LOCAL_WORLD_SIZE.
            if size in os.environ and number >= count:
                raise OwnRankError(f"variable {name}", number, f"must be < {size}={count}; start with torchrun")
        check_address(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
        return launch


def check_address(host: str, port: str) -> None:
    """Raise `ConfigError` for a bad rendezvous address; torch would retry for minutes, and end in a traceback."""
    if not _DIGITS.fullmatch(port) or not 1 <= int(port) <= _LARGEST_PORT:
        raise ConfigError("variable MASTER_PORT", port, f"must be a whole number from 1 to {_LARGEST_PORT}")
    try:
        socket.getaddrinfo(host or None, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problem = f"cannot be resolved on {socket.gethostname()} ({reason}); name the machine of rank 0 by its address"
        raise ConfigError("variable MASTER_ADDR", host, problem) from error


def await_listener(host: str, port: int, timeout: timedelta) -> str | None:
    """Wait until a connection to the address succeeds: None, or after `timeout` the problem."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        # Never 0, which would make the socket non-blocking.
        left = max(deadline - time.monotonic(), _SECONDS_BETWEEN_TRIES)
        try:
            socket.create_connection((host, port), timeout=left).close()
        except OSError as error:
            if time.monotonic() + _SECONDS_BETWEEN_TRIES > deadline:
                return f"no process listens at {host}:{port} ({error.strerror or error})"
            time.sleep(_SECONDS_BETWEEN_TRIES)
        else:
            return None


def join(device: torch.device, timeout: timedelta) -> None:
    """Initialise the default process group, unless it exists."""
    if dist.is_initialized():
        return
    # torch's flight recorder; variables that the user has set take precedence.
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _ENTRIES)
    # NCCL's own watchdog aborts the process on a timeout; make it dump first.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    launch = Launch.from_environment()
    if launch.world_size == 1:
        # Within the process: a single rank needs no port.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    prepare_for_peers(launch.world_size)
    if (store := launcher_store(launch)) is None:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # On a timeout, torch would print a page of C++ frames.
        if launch.rank != 0 and (problem := await_listener(host, port, timeout)) is not None:
            detail = f"{problem} within {timeout.total_seconds():g} s; start rank 0 there, with the same MASTER_PORT"
            raise CommunicationError(launch.rank, "joining the other ranks", detail)
        dist.init_process_group(backend, timeout=timeout)
    else:
        store.set_timeout(timeout)
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout)


def prepare_for_peers(world_size: int) -> None:
    """Allow and ease the connections of many ranks; call before the first process group.

    gloo keeps a socket for each peer in each group: with 256 ranks more than the default limit of 1,024 open files, and
    gloo aborts. It also reads the addresses of a group's peers from the store one at a time, about 800,000 requests for
    256 ranks; with `GLOO_ENABLE_STORE_V2_API` together.
    """
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    needed = FILES_OF_A_PROCESS + _GROUPS * world_size
    if 0 <= (most := allow_open_files(needed)) < needed:
        logger.warning("ulimit -n: %d open files may be too few for %d ranks; allow %d", most, world_size, needed)


def launcher_store(launch: Launch) -> dist.Store | None:
    """A separate connection to torchrun's store; None with one rank, and under launchers that have no store.

    torchrun keeps one store for all attempts (`--max-restarts`), which after a restart still has the keys of the one
    before, such as addresses of dead ranks. So the keys of each attempt have a prefix.
    """
    if launch.world_size == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    unreachable = f"the launcher's store at {host}:{port} cannot be reached; its node may be gone"
    # torch would print a page of C++ frames.
    if await_listener(host, port, _STORE_TIMEOUT) is not None:
        raise CommunicationError(launch.rank, "start", unreachable)
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=_STORE_TIMEOUT)
    except (dist.DistError, RuntimeError) as error:
        raise CommunicationError(launch.rank, "start", unreachable) from error
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def gather(value: T, world_size: int) -> list[T]:
    """All-gather a picklable value; returns the values by rank. Collective over all ranks."""
    values = [value] * world_size
    # A process alone need not have a process group.
    if world_size > 1:
        dist.all_gather_object(values, value)
    return values


def check_same(values: Mapping[str, Any], world_size: int, remedy: str) -> None:
    """Check that all ranks have the same JSON values, by names for the user. Collective.

    Else raises ConfigError on all, which names the first value that differs, and the ranks in the minority.
    """
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    if len(set(gather(digest, world_size))) == 1:
        return
    everyone = gather(dict(values), world_size)
    differing = [key for key in sorted(set().union(*everyone)) if len({_text(other, key) for other in everyone}) > 1]
    raise _difference(differing, [_text(other, differing[0]) for other in everyone], remedy)


def _difference(keys: Sequence[str], by_rank: Sequence[str], remedy: str) -> ConfigError:
    # `by_rank` has the first key's value on each rank.
    counts = Counter(by_rank)
    # Ties: the lowest rank's value.
    usual = max(counts, key=lambda value: (counts[value], -by_rank.index(value)))
    ranks = [rank for rank, value in enumerate(by_rank) if value != usual]
    others = "the others have" if counts[usual] > 1 else f"{name_ranks([by_rank.index(usual)])} has"
    problem = f"{name_ranks(ranks)} {'differs' if len(ranks) == 1 else 'differ'}, {others} {usual}"
    if len(keys) > 1:
        problem += f" (so do {', '.join(keys[1:5])}{', …' if len(keys) > 5 else ''})"
    return ConfigError(keys[0], by_rank[ranks[0]], f"{problem}; {remedy}")


def setup(config: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A rank's configuration (plain values) and environment, for `check_same`."""
    values = {name: value for name, value in flatten(config) if name.rpartition(".")[2] not in _PATHS}
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


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, such as "rank 3" or "ranks 1, 8–15"."""
    starts = [ranks[0], *(after for before, after in pairwise(ranks) if after != before + 1)]
    ends = [*(before for before, after in pairwise(ranks) if after != before + 1), ranks[-1]]
    spans = [str(a) if a == b else f"{a}–{b}" if b > a + 1 else f"{a}, {b}" for a, b in zip(starts, ends, strict=True)]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(spans)}"


def _text(values: Mapping[str, Any], key: str) -> str:
    return str(values[key]) if key in values else "not set"


def _code_version() -> str:
    """A digest of this project's sources, tracked by git or not."""
    root, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in sorted(path for package in _PACKAGES for path in (root / package).rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
