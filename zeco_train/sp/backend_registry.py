"""The backends by name, and their settings; those that ZeCO is compared with, data parallelism, LASP-1 and LASP-2.

To add a backend, add its file and a line here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from zeco_train.collectives.all_gather import ALL_GATHER
from zeco_train.collectives.serial import SERIAL
from zeco_train.collectives.topology import Topology
from zeco_train.collectives.worker import ScanSpec
from zeco_train.errors import ConfigError
from zeco_train.sp.all_scan_config import IN_BLOCKS, AllScanConfig
from zeco_train.sp.attention.method_registry import AttentionChoice
from zeco_train.sp.backend import BackendSettings, BackendSpec, LocalScan, SpecScan
from zeco_train.sp.zeco import ZECO

# Every rank holds whole sequences, and the scan is over one rank.
_DP = BackendSpec(
    name="dp",
    description="data parallelism: every rank has sequences of its own, nothing crosses ranks",
    color="#1f8a53",
    build=lambda workers, _: LocalScan(),
)

# Sun et al., 2024, arXiv 2404.02882, Algorithms 2 and 3; the backward pass likewise, from the last rank to the first.
_LASP1 = BackendSpec(
    name="lasp1",
    description="one rank after the other, in series with the compute (LASP-1)",
    color="#8a6d1d",
    build=lambda workers, _: SpecScan(workers, SERIAL),
    scans=(SERIAL,),
)

# Sun et al., 2025, arXiv 2502.07563, extended to decays. As with ZeCO the all-gather is launched before the intra-chunk
# work and waited for after it.
_LASP2 = BackendSpec(
    name="lasp2",
    description="all-gather of all states and decays, beside the work inside chunks (LASP-2)",
    color="#7a3fa8",
    build=lambda workers, _: SpecScan(workers, ALL_GATHER),
    scans=(ALL_GATHER,),
)

# In table and legend order.
_SPECS = (
    _DP,
    _LASP1,
    _LASP2,
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
        """Keys that need another setting (with all keys below them), that setting, and whether it is active."""
        for spec in BACKENDS.values():
            if spec.section:
                yield spec.section, f"sp={spec.name}", self.spec is spec
        yield "attention", " or ".join(f"sp={name}" for name in SHARING), bool(self.spec.scans)
        yield "all_scan.blocks", f"sp.all_scan.algorithm={IN_BLOCKS}", self.all_scan.takes_blocks

    @property
    def spec(self) -> BackendSpec:
        return BACKENDS[self.backend.value]

    def scans_over(self, topology: Topology) -> tuple[ScanSpec, ...]:
        """The algorithms that the settings allow. Raises ConfigError if the chosen one cannot run over these nodes."""
        return self.spec.scans if self.settings is None else self.settings.scans_over(topology)

    def topology(self, found: Topology) -> Topology:
        """The nodes of a sequence's ranks: as its section gives them, else as found. Raises as `BackendSettings`."""
        return found if self.settings is None else self.settings.topology(found)

    @property
    def settings(self) -> BackendSettings | None:
        """The backend's section; None if it has none."""
        return None if self.spec.section is None else vars(self)[self.spec.section]


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
