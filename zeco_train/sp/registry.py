"""The backends by name, and their settings. To add a backend, add its file and a line here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from zeco_train.collectives import Courier
from zeco_train.collectives.spec import ScanSpec
from zeco_train.collectives.topology import Topology
from zeco_train.errors import ConfigError
from zeco_train.sp.attention.registry import AttentionChoice
from zeco_train.sp.backend import BackendSpec, ScanBackend
from zeco_train.sp.dp import DP
from zeco_train.sp.halo import HaloScan
from zeco_train.sp.lasp1 import LASP1
from zeco_train.sp.lasp2 import LASP2
from zeco_train.sp.zeco import IN_BLOCKS, ZECO, AllScanConfig

# In table and legend order.
_SPECS = (
    DP,
    LASP1,
    LASP2,
    ZECO,
)
BACKENDS: dict[str, BackendSpec] = {spec.name: spec for spec in _SPECS}
# Backends that spread a sequence over ranks.
SHARING = tuple(name for name, spec in BACKENDS.items() if spec.scans)


class Backend(Enum):
    """The names of `BACKENDS`, as a settings type."""

    # Otherwise the loop variable would become a member.
    _ignore_ = "name"
    for name in BACKENDS:
        vars()[name] = name


@dataclass
class SPConfig:
    """Settings of sequence parallelism.

    Attributes:
        backend: how the shards of a sequence exchange states.
        size: ranks that share a sequence; −1 is 1 for `dp`, else the whole world.
        all_scan: for `zeco`.
        attention: how softmax layers read the other shards.
    """

    backend: Backend = Backend["zeco"]
    size: int = -1
    all_scan: AllScanConfig = field(default_factory=AllScanConfig)
    attention: AttentionChoice = AttentionChoice["auto"]

    def validate(self) -> None:
        """Raise `ConfigError` for a value out of range."""
        if self.size != -1 and self.size < 1:
            raise ConfigError("sp.size", self.size, "must be ≥ 1, or -1 for the backend's default")
        self.all_scan.validate()

    def needs(self) -> Iterator[tuple[str, str, bool]]:
        """Keys that need another setting to take effect, that setting, and whether it is active.

        A key stands for all keys below it.
        """
        for spec in BACKENDS.values():
            if spec.section:
                yield spec.section, f"sp={spec.name}", self.spec is spec
        yield "attention", " or ".join(f"sp={name}" for name in SHARING), bool(self.spec.scans)
        yield "all_scan.blocks", f"sp.all_scan.algorithm={IN_BLOCKS}", self.all_scan.takes_blocks

    @property
    def spec(self) -> BackendSpec:
        """The backend."""
        return BACKENDS[self.backend.value]

    @property
    def scans(self) -> tuple[ScanSpec, ...]:
        """The algorithms that the settings allow."""
        return getattr(self.settings, "scans", self.spec.scans)

    def scans_over(self, topology: Topology) -> tuple[ScanSpec, ...]:
        """The algorithms that the settings allow over these nodes.

        Raises:
            ConfigError: the configured one cannot run over them.
        """
        choose = getattr(self.settings, "scans_over", None)
        return self.scans if choose is None else choose(topology)

    def topology(self, found: Topology) -> Topology:
        """The nodes of the ranks that share a sequence: as the backend's section gives them, else as found.

        Raises:
            ConfigError: the ranks do not fill the given nodes.
        """
        given = getattr(self.settings, "topology", None)
        return found if given is None else given(found)

    @property
    def settings(self) -> Any:
        """The backend's section; None if it has none."""
        return getattr(self, self.spec.section) if self.spec.section else None


def describe_backends() -> str:
    """For `--help`: the backends, each with its selectable algorithms, one per line."""
    lines = []
    for spec in BACKENDS.values():
        lines.append(f"  sp={spec.name:<14}{spec.description}")
        if spec.section:
            algorithms = [f"    {scan.name:<15}{scan.description}" for scan in spec.scans]
            lines += [
                f"    sp.{spec.section}.algorithm=auto, the fastest of those measured, between nodes of all, or one of",
                *algorithms,
            ]
    return "\n".join(lines)


def build_scan(
    config: SPConfig,
    groups: tuple[ProcessGroup, ProcessGroup],
    timeout: timedelta,
    device: torch.device | None = None,
    halo: tuple[ProcessGroup, ProcessGroup] | None = None,
    topology: Topology | None = None,
) -> ScanBackend:
    """The scan of `config.backend` over an SP group, given as one group per direction (forward, reverse).

    Each wait for a peer is bounded by `timeout`. With a `device` the groups are warmed up for its tensors, which is
    collective; otherwise the first scans initialise them. `halo`: two more such groups, for a model with states that
    cross one border only; None: such states take the backend's own scan, as over one rank. `topology`: the nodes of the
    ranks, unless the settings give them; None: all are on this machine.

    Raises:
        ConfigError: the ranks do not support the configuration.
    """
    topology = config.topology(topology or Topology.one_node(dist.get_world_size(groups[0])))
    scan = config.spec.build(tuple(Courier(group, timeout, topology) for group in groups), config.settings)
    if halo is not None:
        scan.add_neighbour(HaloScan(tuple(Courier(group, timeout) for group in halo)))
    if device is not None:
        scan.prepare(device)
    return scan
