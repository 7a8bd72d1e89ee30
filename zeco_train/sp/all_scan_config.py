"""Settings of ZeCO's scan, section `sp.all_scan`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from zeco_train.collectives.scan_registry import ALL_SCANS
from zeco_train.collectives.topology import Topology
from zeco_train.collectives.worker import ScanSpec
from zeco_train.errors import ConfigError

_BY_NAME = {scan.name: scan for scan in ALL_SCANS}
# Those whose states are sent in blocks.
IN_BLOCKS = " or ".join(scan.name for scan in ALL_SCANS if scan.best_blocks)
MOST_BLOCKS = 1 << 20


class AllScanAlgorithm(Enum):
    """The names of `ALL_SCANS`; `auto` is the fastest by the cost model."""

    # Otherwise the loop variable would become a member.
    _ignore_ = "name"
    auto = "auto"
    for name in _BY_NAME:
        vars()[name] = name


class AllScanTransport(Enum):
    """`p2p`: messages of `torch.distributed`; `symmetric`: one kernel over memory that all ranks map."""

    auto = "auto"
    p2p = "p2p"
    symmetric = "symmetric"


@dataclass
class AllScanConfig:
    """Settings of the All-Scan.

    Attributes:
        algorithm: algorithm of the scan; `auto` is the fastest by the cost model.
        transport: also of halos. `symmetric` is one kernel over memory that all ranks map, within an NVLink domain;
            `p2p` is `torch.distributed`. `auto` is `symmetric` if the ranks support it, else `p2p`.
        blocks: number of pieces in which a state flows through `chain`; an integer, which needs algorithm=chain (under
            `auto` the cost model picks both), or `auto`, which over `p2p` is the best number by the cost model and in
            one kernel means blocks of 16,384 elements (with matrices: of a tile, at most 64 × 64).
        ranks_per_node: ranks of the sequence on each machine; the unit of `lane` and of the cost model. null finds them
            by host names.
    """

    algorithm: AllScanAlgorithm = AllScanAlgorithm.auto
    transport: AllScanTransport = AllScanTransport.auto
    blocks: str = "auto"
    ranks_per_node: int | None = None

    def validate(self) -> None:
        """Raise `ConfigError` for a value that is out of range or has no effect."""
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ConfigError("sp.all_scan.ranks_per_node", self.ranks_per_node, "must be ≥ 1, or null")
        # Read first, since `num_blocks` also checks the value.
        if self.num_blocks is not None and self.algorithm is not AllScanAlgorithm.auto and not self.takes_blocks:
            allowed = f"would be ignored; it needs sp.all_scan.algorithm={IN_BLOCKS}"
            raise ConfigError("sp.all_scan.blocks", self.blocks, allowed)
        if self.transport is AllScanTransport.symmetric and not any(scan.kernel for scan in self.scans):
            allowed = f"{self.algorithm.value} has no kernel yet and goes by messages: take auto or p2p"
            raise ConfigError("sp.all_scan.transport", self.transport.value, allowed)

    @property
    def scans(self) -> tuple[ScanSpec, ...]:
        """The algorithms to choose from on one node."""
        return self.scans_over(Topology((1,)))

    def scans_over(self, topology: Topology) -> tuple[ScanSpec, ...]:
        """The algorithms to choose from. Raises ConfigError if the configured one cannot run over these nodes."""
        if self.algorithm is AllScanAlgorithm.auto:
            measured_only = topology.nodes == 1
            able = (scan for scan in ALL_SCANS if scan.problem(topology) is None)
            return tuple(scan for scan in able if scan.measured or not measured_only)
        scan = _BY_NAME[self.algorithm.value]
        if (problem := scan.problem(topology)) is not None:
            raise ConfigError("sp.all_scan.algorithm", scan.name, problem)
        return (scan,)

    def topology(self, found: Topology) -> Topology:
        """The nodes of the ranks: as configured, else as found. Raises ConfigError if the ranks do not fill them."""
        return found if self.ranks_per_node is None else found.with_ranks_per_node(self.ranks_per_node)

    @property
    def takes_blocks(self) -> bool:
        """Whether `blocks` applies: the algorithm is fixed, and its states are sent in blocks."""
        return self.algorithm is not AllScanAlgorithm.auto and self.scans[0].best_blocks is not None

    @property
    def num_blocks(self) -> int | None:
        """`blocks` as a number, None for `auto`. Raises ConfigError if it is neither."""
        text = str(self.blocks)
        if text == "auto":
            return None
        if not text.isdecimal() or not 1 <= int(text) <= MOST_BLOCKS:
            raise ConfigError("sp.all_scan.blocks", text, f"must be ≥ 1 and ≤ {MOST_BLOCKS}, or auto")
        return int(text)
