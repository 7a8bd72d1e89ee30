"""A rank's device, and its place in the process mesh: `dp · sp = world`, ranks of one SP group adjacent.

All process groups are made here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeco_train.collectives.topology import Topology, find_topology
from zeco_train.errors import ConfigError, ZecoError
from zeco_train.lifecycle.join import Launch, check_same, gather, join, setup
from zeco_train.system.code_cache import use_private_caches

if TYPE_CHECKING:
    from data.loader.batches import DataSplit

T = TypeVar("T")


class Device(Enum):
    """Where to run. `auto` uses CUDA devices if there are any."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def find_device(wanted: Device, launch: Launch, key: str = "device") -> torch.device:
    """Select this rank's device and make it current; errors name the setting `key`.

    Raises ConfigError for more ranks on this machine than CUDA devices, or without a private folder for compiled code.
    """
    # Launchers other than torchrun may not set LOCAL_WORLD_SIZE.
    if not are_on_cuda(wanted, max(launch.local_world_size, launch.local_rank + 1), key):
        return torch.device("cpu")
    use_private_caches()  # Triton's kernels are compiled from here on
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    return device


def are_on_cuda(wanted: Device, ranks: int, key: str = "device") -> bool:
    """Whether this machine's ranks run on CUDA devices, of which none is initialised; ConfigError: there are fewer."""
    available = torch.cuda.device_count()
    if wanted is Device.cpu or (wanted is Device.auto and not available):
        return False
    if ranks > available:
        problem = f"{ranks} ranks on this machine, {available} CUDA devices; or {key}=cpu"
        raise ConfigError(key, wanted.value, problem)
    return True


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


@dataclass(frozen=True)
class ProcessMesh:
    """This process's position in the mesh of all ranks."""

    rank: int
    world_size: int
    device: torch.device
    devices: DeviceMesh  # (dp, sp)
    # the SP group twice, for forward and reverse scans: a communicator serialises its operations
    scan_groups: tuple[dist.ProcessGroup, dist.ProcessGroup]
    timeout: timedelta  # of every communication
    topology: Topology  # nodes of the SP group's ranks
    sp_size: int  # ranks that share a sequence

    @property
    def dp_size(self) -> int:
        """Number of SP groups; each reads its own sequences."""
        return self.world_size // self.sp_size

    @property
    def dp_rank(self) -> int:
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
        """The part of each sequence that this rank reads; arguments and errors as of `DataSplit`."""
        # Not above: functions over ranks serve projects whose packages have this name, too.
        from data.loader.batches import DataSplit

        place = self.dp_rank, self.dp_size, self.sp_rank, self.sp_size
        return DataSplit(seq_len, micro_batch, *place, documents, segments, labels_across_documents)


def init_mesh(
    launch: Launch, sp_size: int, device: torch.device, timeout: timedelta, topology: Topology | None = None
) -> ProcessMesh:
    """Initialise the default process group, if it is not yet, and create the mesh. Finds the nodes unless given."""
    join(device, timeout)
    devices = device_mesh(device.type, (launch.world_size // sp_size, sp_size), ("dp", "sp"), timeout)
    groups = _scan_groups(devices, timeout, "scan")
    topology = topology or find_topology(devices.get_group("sp"))
    return ProcessMesh(launch.rank, launch.world_size, device, devices, groups, timeout, topology, sp_size)


def lone_mesh(device: torch.device) -> ProcessMesh:
    """Of this process alone, which communicates with no other; there need not be a process group."""
    nothing: Any = None
    return ProcessMesh(0, 1, device, nothing, nothing, timedelta(), Topology.one_node(1), sp_size=1)


def halo_groups(mesh: ProcessMesh) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
    """Groups like `scan_groups`, for halos; None if no ranks share a sequence. Collective."""
    return None if mesh.sp_size == 1 else _scan_groups(mesh.devices, mesh.timeout, "halo")


def attention_group(mesh: ProcessMesh) -> dist.ProcessGroup:
    """The SP group once more, for softmax attention. Collective."""
    # A message would otherwise wait until the attention that it overlaps has no blocks left to start.
    return _group(mesh.devices.mesh.tolist(), mesh.timeout, "softmax attention", urgent=True)


def _scan_groups(devices: DeviceMesh, timeout: timedelta, name: str) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    # The SP group twice, for forward and reverse scans. Collective.
    rows = devices.mesh.tolist()
    # Scans are small and latency-bound: high-priority streams run them before the compute that they overlap.
    forward, reverse = (_group(rows, timeout, f"{name} {way}", urgent=True) for way in ("forward", "reverse"))
    return forward, reverse


def join_alike(
    settings: Mapping[str, Any],
    launch: Launch,
    sp_size: int,
    device: torch.device,
    timeout: timedelta,
    more: Mapping[str, Any] | None = None,
) -> ProcessMesh:
    """Initialise the process groups, and check that all ranks have the same setup. Collective.

    `settings` are plain values of the configuration, `more` JSON values. Raises ConfigError for ranks that differ.
    """
    join(device, timeout)
    # Before the first operation in which ranks of different settings would deadlock, such as the creation of groups.
    remedy = "start all ranks with the same command line, code and environment"
    check_same(setup(settings, device) | dict(more or {}), launch.world_size, remedy)
    return init_mesh(launch, sp_size, device, timeout)


def device_mesh(device: str, shape: tuple[int, int], names: tuple[str, str], timeout: timedelta) -> DeviceMesh:
    """A mesh of all ranks in order, whose groups have `timeout`; torch's `init_device_mesh` uses 10 or 30 minutes."""
    ranks = torch.arange(shape[0] * shape[1]).view(shape)
    groups = [_group(ranks.T.tolist(), timeout, names[0]), _group(ranks.tolist(), timeout, names[1])]
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=names)


def world_mesh(device: str, world_size: int, name: str, timeout: timedelta) -> DeviceMesh:
    """A one-dimensional mesh of all ranks, with `timeout` as in `device_mesh`."""
    return DeviceMesh.from_group(_group([list(range(world_size))], timeout, name), device, mesh_dim_names=(name,))


def _group(members: list[list[int]], timeout: timedelta, name: str, urgent: bool = False) -> dist.ProcessGroup:
    # Create the groups of these ranks, of which every rank of the world is in one; returns this rank's. Collective.
    # Flight recorders show `name`; with `urgent`, NCCL uses high-priority streams, others have none.
    options = _urgent(timeout) if urgent and "nccl" in str(dist.get_backend_config()) else None
    group, _ = dist.new_subgroups_by_enumeration(members, timeout=timeout, pg_options=options, group_desc=name)
    assert group is not None
    return group


def _urgent(timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # The group's own timeout counts, but torch warns if that of the options differs.
    options._timeout = timeout
    return options


def twin_groups(
    group: dist.ProcessGroup, timeout: timedelta, names: Sequence[str], *, urgent: bool = False
) -> list[dist.ProcessGroup]:
    """More groups of the ranks of `group`, by its backend, one for each name. Collective over these ranks only."""
    settings: dict[str, Any] = {"timeout": timeout, "use_local_synchronization": True}
    settings["backend"] = str(dist.get_backend_config(group))
    options, members = _urgent(timeout) if urgent else None, dist.get_process_group_ranks(group)
    return [dist.new_group(members, pg_options=options, group_desc=name, **settings) for name in names]


def host_group(mesh: ProcessMesh) -> dist.ProcessGroup:
    """A gloo group of all ranks, for a thread that waits for storage during training. Collective.

    Its timeout is at least an hour: a rank that writes its part slowly is not lost, and a lost peer closes its
    connections.
    """
    return dist.new_group(backend="gloo", timeout=max(mesh.timeout, timedelta(hours=1)))


def agree(mesh: ProcessMesh, action: Callable[[], T]) -> T:
    """Run `action`; if it raises a `ZecoError` on any rank, raise the lowest rank's on all, so that none waits."""
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


def from_main(mesh: ProcessMesh, action: Callable[[], T]) -> T:
    """Run `action` on rank 0; its picklable result on all ranks, or its `ZecoError` raised on all."""
    found = [agree(mesh, lambda: action() if mesh.is_main else None)]
    dist.broadcast_object_list(found, src=0)
    return cast(T, found[0])


def main_first(mesh: ProcessMesh, action: Callable[[], T]) -> T:
    """Run `action` on rank 0, then on the others; a `ZecoError` of any rank is raised on all."""
    # Every rank takes part in both agreements; rank 0 acts in the first one, the others in the second.
    if mesh.is_main:
        result = agree(mesh, action)
        agree(mesh, lambda: None)
        return result
    agree(mesh, lambda: None)
    return agree(mesh, action)
