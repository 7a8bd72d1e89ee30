"""ZeCO (Chou et al., 2025, arXiv 2507.01004): sequence parallelism at nearly the price of data parallelism.

A rank's tokens depend on all tokens before them only through one state R_p, [B, H, K, V], of fixed size:

    R_{p+1} = A_p R_p + S_p        S_p, A_p: state and transition (decays, or a matrix) of rank p's tokens

So each rank (1) computes (S_p, A_p), (2) starts the All-Scan, an exclusive scan of these pairs over the ranks,
(3) computes its intra-chunk scores, which need no other rank, while the scan runs, (4) waits for R_p, adds its decayed
copy to its own chunk states, and computes its outputs. The backward pass is the same with gradients of states, from the
last rank to the first. Steps 1, 3 and 4 are `zeco_train/ops/mix.py`; step 2 is here.

The algorithms are in `zeco_train/collectives` (`ALL_SCANS`), with their communication volume, and differ only in
rounding; an all-gather would take (P − 1) S. Between GPUs with peer access those with a kernel run as a single launch,
`zeco_train/kernels/all_scan/`, without the host in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
import torch.distributed as dist

from zeco_train.collectives import Courier, scan_alone
from zeco_train.collectives.cost_model import MEASURED, Link
from zeco_train.collectives.registry import ALL_SCANS
from zeco_train.collectives.spec import Choice, ScanSpec, choose, eligible
from zeco_train.collectives.symmetric import SymmetricScans, request_problem, transport_problem
from zeco_train.collectives.topology import Topology
from zeco_train.errors import ConfigError
from zeco_train.ops.seam import LaunchedScan, ScanRequest
from zeco_train.sp.backend import BackendSpec, ScanBackend

logger = logging.getLogger(__name__)

_BY_NAME = {scan.name: scan for scan in ALL_SCANS}
# Those whose states are sent in blocks.
IN_BLOCKS = " or ".join(scan.name for scan in ALL_SCANS if scan.best_blocks)
_MAX_BLOCKS = 1 << 20


class AllScanAlgorithm(Enum):
    """The names of `ALL_SCANS`; `auto` is the fastest by the cost model."""

    # Otherwise the loop variable would become a member.
    _ignore_ = "name"
    auto = "auto"
    for name in _BY_NAME:
        vars()[name] = name


class AllScanTransport(Enum):
    """How states travel.

    `p2p`: messages of `torch.distributed`. `symmetric`: one kernel over memory that all ranks map. `auto`: `symmetric`
    if the ranks support it.
    """

    auto = "auto"
    p2p = "p2p"
    symmetric = "symmetric"


@dataclass
class AllScanConfig:
    """Settings of the All-Scan.

    Attributes:
        algorithm: algorithm of the scan; `auto` is the fastest by the cost model.
        transport: `symmetric` is one kernel over memory that all ranks map, within an NVLink domain; `p2p` is
            `torch.distributed`. `auto` is `symmetric` if the ranks support it, else `p2p`.
        blocks: number of pieces in which a state flows through `chain`: an integer, which needs algorithm=chain (under
            `auto` the cost model picks both), or `auto`, which over `p2p` is the best number by the cost model and in
            one kernel means blocks of 16,384 elements.
        ranks_per_node: ranks of the sequence on each machine, which is the unit of `lane` and of the cost model; null
            finds them by host names.
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
        """The algorithms to choose from.

        Raises:
            ConfigError: the configured one cannot run over these nodes.
        """
        if self.algorithm is AllScanAlgorithm.auto:
            measured_only = topology.nodes == 1
            able = (scan for scan in ALL_SCANS if scan.problem(topology) is None)
            return tuple(scan for scan in able if scan.automatic or not measured_only)
        scan = _BY_NAME[self.algorithm.value]
        if (problem := scan.problem(topology)) is not None:
            raise ConfigError("sp.all_scan.algorithm", scan.name, problem)
        return (scan,)

    def topology(self, found: Topology) -> Topology:
        """The nodes of the ranks: as configured, else as found.

        Raises:
            ConfigError: the ranks do not fill the configured nodes.
        """
        return found if self.ranks_per_node is None else found.with_ranks_per_node(self.ranks_per_node)

    @property
    def takes_blocks(self) -> bool:
        """Whether `blocks` applies: the algorithm is fixed, and its states are sent in blocks."""
        return self.algorithm is not AllScanAlgorithm.auto and self.scans[0].best_blocks is not None

    @property
    def num_blocks(self) -> int | None:
        """`blocks` as a number; None is `auto`.

        Raises:
            ConfigError: it is neither.
        """
        text = str(self.blocks)
        if text == "auto":
            return None
        if not text.isdecimal() or not 1 <= int(text) <= _MAX_BLOCKS:
            raise ConfigError("sp.all_scan.blocks", text, f"must be ≥ 1 and ≤ {_MAX_BLOCKS}, or auto")
        return int(text)


class AllScan(ScanBackend):
    """ZeCO's scan over the ranks of a sequence.

    Args:
        couriers: see `ScanBackend`.
        settings: allowed algorithms and transport.

    Raises:
        ConfigError: the algorithm cannot run over the couriers' nodes.
    """

    def __init__(self, couriers: tuple[Courier, ...], settings: AllScanConfig) -> None:
        super().__init__(couriers)
        self._ranks, self._topology = couriers[0].size, couriers[0].topology
        if self._topology.nodes > 1 and _is_main():
            given = "" if settings.ranks_per_node is None else " (sp.all_scan.ranks_per_node)"
            logger.info("ranks of a sequence: %s%s", self._topology, given)
        self._scans = settings.scans_over(self._topology)
        self._transport, self._blocks = settings.transport, settings.num_blocks
        self._link: Link | None = None
        self._fell_back: set[str] = set()
        self._symmetric: dict[Courier, SymmetricScans] = {}
        self._choices: dict[tuple[object, ...], Choice] = {}

    def start(self, request: ScanRequest) -> LaunchedScan:
        """Start the All-Scan: it runs while the caller computes its intra-chunk scores.

        Raises:
            ConfigError: `transport=symmetric`, and the ranks do not support it. On all of them.
        """
        return self._start(request, self._scans)

    def kinds(self, device: torch.device) -> Sequence[Callable[[ScanRequest], LaunchedScan]]:
        """`start` for each algorithm that may be chosen; each takes tens of MB of symmetric memory per direction."""
        if len(self._scans) == 1 or self._ranks == 1:
            return [self.start]
        found = eligible(self._scans, MEASURED[self._find_link(device)], self._ranks)
        return [partial(self._start, scans=(scan,)) for scan in found]

    def _start(self, request: ScanRequest, scans: tuple[ScanSpec, ...]) -> LaunchedScan:
        courier = self.courier(request)
        if self._ranks == 1:
            return scan_alone(request)
        key = self._key(request, scans)
        if key not in self._choices:
            self._choices[key] = self._choose(courier, request, scans)
        self.choice = choice = self._choices[key]
        if choice.link is Link.symmetric:
            return self._symmetric[courier].launch(request, choice.scan, choice.blocks)
        return choice.scan.start(request, courier, choice.blocks)

    def algorithm(self, request: ScanRequest) -> ScanSpec:
        """See `ScanBackend.algorithm`."""
        return self._choices[self._key(request, self._scans)].scan

    def _key(self, request: ScanRequest, scans: tuple[ScanSpec, ...]) -> tuple[object, ...]:
        # With the candidates: `prepare` starts each algorithm by itself, all with states of one shape.
        return self.courier(request), scans, request.state.shape, request.state.dtype, request.transition.ndim

    def _choose(self, courier: Courier, request: ScanRequest, scans: tuple[ScanSpec, ...]) -> Choice:
        """Algorithm and transport for scans of a shape: decided once, from data that all ranks share, and logged."""
        link = self._find_link(request.state.device)
        problem = request_problem(request) if link is Link.symmetric else None
        if problem is not None:
            self._fall_back(problem)
            # The ranks could use symmetric memory, so they are on one machine.
            link = Link.nccl
        if link is Link.symmetric and courier not in self._symmetric:
            self._symmetric[courier] = SymmetricScans(courier)
        load = self.load(request)
        choice = choose(scans, MEASURED[link], load, self._blocks)
        if _is_main():
            logger.info("all-scan of %.3g MB over %d ranks: %s", load.state_bytes / 1e6, self._ranks, choice)
        return choice

    def _find_link(self, device: torch.device) -> Link:
        """The transport that the ranks support, the same in both directions. Collective on CUDA, the first time."""
        if self._link is None:
            self._link = self._try_links(self._couriers[0], device)
        return self._link

    def _try_links(self, courier: Courier, device: torch.device) -> Link:
        if device.type != "cuda":
            if self._transport is AllScanTransport.symmetric:
                self._fall_back(f"the states are on {device.type}")
            return Link.gloo
        if self._transport is not AllScanTransport.p2p:
            able = any(scan.kernel for scan in self._scans)
            problem: str | None = f"{self._scans[0].name} has no kernel yet"
            if able and self._topology.nodes > 1:
                problem = f"the ranks are on {self._topology}"
            elif able:
                problem = transport_problem(courier, device)
            if problem is None:
                return Link.symmetric
            self._fall_back(problem)
        return Link.nccl if self._topology.nodes == 1 else Link.nccl_across_nodes

    def _fall_back(self, problem: str) -> None:
        """Log why symmetric memory is not used, or raise if it was requested."""
        if self._transport is AllScanTransport.symmetric:
            allowed = f"needs GPUs of one NVLink domain ({problem}); or take auto or p2p"
            raise ConfigError("sp.all_scan.transport", self._transport.value, allowed)
        if problem not in self._fell_back and _is_main():
            logger.warning("sp.all_scan.transport=auto takes p2p, which is slower: no symmetric memory (%s)", problem)
        self._fell_back.add(problem)


def _is_main() -> bool:
    return dist.get_rank() == 0


ZECO = BackendSpec(
    name="zeco",
    description="All-Scan: one state received and one sent, beside the work inside chunks (ZeCO)",
    color="#2a6fbb",
    dark_color="#6cb6ff",
    build=AllScan,
    scans=ALL_SCANS,
    section="all_scan",
    scans_over=AllScanConfig.scans_over,
    topology=AllScanConfig.topology,
)
