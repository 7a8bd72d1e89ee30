"""The process mesh: `dp · sp = world`, ranks of one SP group adjacent.

Creates the process groups and passes them to the modules that communicate; only this module reads the launcher's
environment.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from data.loader.batches import DataSplit
from zeco_train.collectives.topology import Topology, find_topology
from zeco_train.distributed.postmortem import record_communication
from zeco_train.errors import CommunicationError, ConfigError, ZecoError
from zeco_train.sp.registry import BACKENDS
from zeco_train.system.files import FILES_OF_A_PROCESS, allow_open_files

T = TypeVar("T")

logger = logging.getLogger(__name__)


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

        Raises:
            ConfigError: some are missing, one is not a number or out of range, or `MASTER_ADDR` cannot be resolved.
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


def check_address(host: str, port: str) -> None:
    """Check the rendezvous address; torch itself would retry for minutes, and end in a traceback.

    Raises:
        ConfigError: the port is invalid, or the host cannot be resolved.
    """
    if not _DIGITS.fullmatch(port) or not 1 <= int(port) <= _LARGEST_PORT:
        raise ConfigError("variable MASTER_PORT", port, f"must be a whole number from 1 to {_LARGEST_PORT}")
    try:
        socket.getaddrinfo(host or None, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problem = f"cannot be resolved on {socket.gethostname()} ({reason}); name the machine of rank 0 by its address"
        raise ConfigError("variable MASTER_ADDR", host, problem) from error


def await_listener(host: str, port: int, timeout: timedelta) -> str | None:
    """Wait until a connection to the address succeeds.

    Returns:
        None on success; the problem after `timeout`.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        # Never 0, which would make the socket non-blocking.
        left = max(deadline - time.monotonic(), _SECONDS_BETWEEN_TRIES)
        try:
            socket.create_connection((host, port), timeout=left).close()
        except OSError as error:
            if time.monotonic() + _SECONDS_BETWEEN_TRIES > deadline:
                return f"nobody listens at {host}:{port} ({error.strerror or error})"
            time.sleep(_SECONDS_BETWEEN_TRIES)
        else:
            return None


@dataclass(frozen=True)
class ProcessMesh:
    """This process's position in the mesh of all ranks.

    Attributes:
        devices: the (dp, sp) device mesh.
        scan_groups: the SP group twice, for forward and reverse scans. A communicator serialises its operations, so
            each direction has its own.
        timeout: of every communication.
        topology: nodes of the ranks of the SP group, by host names.
    """

    rank: int
    world_size: int
    device: torch.device
    devices: DeviceMesh
    scan_groups: tuple[dist.ProcessGroup, dist.ProcessGroup]
    timeout: timedelta
    topology: Topology

    @property
    def dp_size(self) -> int:
        """Number of SP groups; each reads its own sequences."""
        return self.devices.size(0)

    @property
    def sp_size(self) -> int:
        """Number of ranks that share a sequence."""
        return self.devices.size(1)

    @property
    def dp_rank(self) -> int:
        """This rank's SP group, from 0."""
        return self.rank // self.sp_size

    @property
    def sp_rank(self) -> int:
        """This rank's position in its SP group, and so its shard of each sequence."""
        return self.rank % self.sp_size

    @property
    def is_main(self) -> bool:
        """True on rank 0, which owns the run's folder and prints to the terminal."""
        return self.rank == 0

    def split(
        self,
        seq_len: int,
        micro_batch: int,
        *,
        documents: bool = False,
        segments: int = 1,
        labels_across_documents: bool = True,
    ) -> DataSplit:
        """The part of each sequence that this rank reads.

        Args:
            seq_len: length of the whole sequence in tokens.
            micro_batch: sequences per SP group in one forward and backward pass.
            documents: whether the state is reset at document boundaries.
            segments: M, parts of a sequence that are processed one after another.
            labels_across_documents: see `DataSplit`.

        Raises:
            ConfigError: see `DataSplit`.
        """
        place = self.dp_rank, self.dp_size, self.sp_rank, self.sp_size
        return DataSplit(seq_len, micro_batch, *place, documents, segments, labels_across_documents)


def resolve_sp_size(sp_size: int, world_size: int, backend: str) -> int:
    """Resolve `sp.size`: −1 means the world size, or 1 for a backend that does not shard sequences.

    Raises:
        ConfigError: a size that does not divide the world size, or that the backend does not support.
    """
    if sp_size == -1:
        return world_size if BACKENDS[backend].scans else 1
    legal = [n for n in range(1, world_size + 1) if world_size % n == 0]
    if sp_size not in legal:
        raise ConfigError(
            "sp.size",
            sp_size,
            f"must divide the world size {world_size}: {', '.join(map(str, legal))}, or -1 for the backend's default",
        )
    if (problem := BACKENDS[backend].size_problem(sp_size)) is not None:
        raise ConfigError("sp.size", sp_size, problem)
    return sp_size


def init_mesh(
    launch: Launch, sp_size: int, device: torch.device, timeout: timedelta, topology: Topology | None = None
) -> ProcessMesh:
    """Initialise the default process group, if it is not yet, and create the mesh.

    `topology`: nodes of the SP group's ranks; None finds them.
    """
    join(device, timeout)
    devices = device_mesh(device.type, (launch.world_size // sp_size, sp_size), ("dp", "sp"), timeout)
    groups = _scan_groups(devices, device, timeout, "scan")
    topology = topology or find_topology(devices.get_group("sp"))
    return ProcessMesh(launch.rank, launch.world_size, device, devices, groups, timeout, topology)


def halo_groups(mesh: ProcessMesh) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
    """Groups like `scan_groups`, for halos, if the model has some; None if no ranks share a sequence. Collective."""
    return None if mesh.sp_size == 1 else _scan_groups(mesh.devices, mesh.device, mesh.timeout, "halo")


def attention_group(mesh: ProcessMesh) -> dist.ProcessGroup:
    """The SP group once more, for softmax attention. Collective."""
    return _group(mesh.devices.mesh.tolist(), mesh.timeout, "softmax attention")


def _scan_groups(
    devices: DeviceMesh, device: torch.device, timeout: timedelta, name: str
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The SP group twice, for forward and reverse scans. Collective."""
    rows = devices.mesh.tolist()
    # Scans are small and latency-bound: high-priority streams run them before the compute that they overlap.
    # A fake process group (`plan … dry_run=true`) has no streams.
    urgent = device.type == "cuda" and dist.get_backend() != "fake"
    forward, reverse = (_group(rows, timeout, f"{name} {way}", urgent=urgent) for way in ("forward", "reverse"))
    return forward, reverse


def join(device: torch.device, timeout: timedelta) -> None:
    """Initialise the default process group, unless it exists."""
    if dist.is_initialized():
        return
    record_communication()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    launch = Launch.from_environment()
    if launch.world_size == 1:
        # Within the process: a single rank needs no port.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    prepare_for_peers(launch.world_size)
    if (store := launcher_store(launch)) is None:
        _await_rank_0(launch, timeout)
        dist.init_process_group(backend, timeout=timeout)
    else:
        store.set_timeout(timeout)
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout)


def prepare_for_peers(world_size: int) -> None:
    """Allow and ease the connections of many ranks; call before the first process group.

    gloo keeps a socket for each peer in each group. With 256 ranks these exceed the default limit of 1,024 open files
    per process, and gloo aborts. By default it also reads the addresses of a group's peers from the store one at a
    time, about 800,000 requests for 256 ranks; with `GLOO_ENABLE_STORE_V2_API` it reads them together.
    """
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    needed = FILES_OF_A_PROCESS + _GROUPS * world_size
    if 0 <= (most := allow_open_files(needed)) < needed:
        logger.warning("ulimit -n: %d open files may be too few for %d ranks; allow %d", most, world_size, needed)


def _await_rank_0(launch: Launch, timeout: timedelta) -> None:
    """Wait for rank 0's store; on a timeout, torch would print a page of C++ frames.

    Raises:
        CommunicationError: rank 0's store is not reachable within `timeout`.
    """
    if launch.rank == 0:
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if (problem := await_listener(host, port, timeout)) is not None:
        detail = f"{problem} within {timeout.total_seconds():g} s; start rank 0 there, with the same MASTER_PORT"
        raise CommunicationError(launch.rank, "joining the other ranks", detail)


def launcher_store(launch: Launch) -> dist.Store | None:
    """A separate connection to torchrun's store; None with one rank, and under launchers that have no store.

    torchrun keeps one store for all attempts (`--max-restarts`), which after a restart still has the keys of the one
    before, such as addresses of dead ranks. So the keys of each attempt have a prefix.

    Raises:
        CommunicationError: it cannot be reached.
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


def device_mesh(device: str, shape: tuple[int, int], names: tuple[str, str], timeout: timedelta) -> DeviceMesh:
    """A mesh of all ranks in order, whose groups have `timeout`; torch's `init_device_mesh` uses 10 or 30 minutes."""
    ranks = torch.arange(shape[0] * shape[1]).view(shape)
    groups = [_group(ranks.T.tolist(), timeout, names[0]), _group(ranks.tolist(), timeout, names[1])]
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=names)


def world_mesh(device: str, world_size: int, name: str, timeout: timedelta) -> DeviceMesh:
    """A one-dimensional mesh of all ranks, with `timeout` as in `device_mesh`."""
    return DeviceMesh.from_group(_group([list(range(world_size))], timeout, name), device, mesh_dim_names=(name,))


def _group(members: list[list[int]], timeout: timedelta, name: str, urgent: bool = False) -> dist.ProcessGroup:
    """Create the groups in `members`; returns this rank's. With `urgent`, NCCL uses high-priority streams. Collective.

    Args:
        members: ranks of each group; every rank of the world is in one.
        timeout: of the group's collectives.
        name: shown by flight recorders.
        urgent: only for NCCL.
    """
    options = None
    if urgent:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        # The group's own timeout counts, but torch warns if that of the options differs.
        options._timeout = timeout
    group, _ = dist.new_subgroups_by_enumeration(members, timeout=timeout, pg_options=options, group_desc=name)
    assert group is not None
    return group


def host_group(mesh: ProcessMesh) -> dist.ProcessGroup:
    """A gloo group of all ranks, for a thread that waits for storage during training. Collective.

    Its timeout is at least an hour: a rank that writes its part slowly is not lost, and a lost peer closes its
    connections.
    """
    return dist.new_group(backend="gloo", timeout=max(mesh.timeout, timedelta(hours=1)))


def gather(value: T, world_size: int) -> list[T]:
    """All-gather a picklable value; returns the values by rank. Collective over all ranks."""
    values = [value] * world_size
    dist.all_gather_object(values, value)
    return values


def agree(mesh: ProcessMesh, action: Callable[[], T]) -> T:
    """Run `action`; if it raises a `ZecoError` on any rank, raise the lowest rank's on every rank.

    A failure on one rank only (a file missing on one node) would otherwise leave the other ranks waiting for it.
    """
    error: ZecoError | None = None
    result: T | None = None
    try:
        result = action()
    except ZecoError as caught:
        error = caught
    first = next((e for e in gather(error, mesh.world_size) if e is not None), None)
    if first is not None:
        raise first
    return result  # type: ignore[return-value]


def main_first(mesh: ProcessMesh, action: Callable[[], T]) -> T:
    """Run `action` on rank 0, then on the others; a `ZecoError` of any rank is raised on all."""
    # Every rank takes part in both agreements; rank 0 acts in the first one, the others in the second.
    if mesh.is_main:
        result = agree(mesh, action)
        agree(mesh, lambda: None)
        return result
    agree(mesh, lambda: None)
    return agree(mesh, action)
