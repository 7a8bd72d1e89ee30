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
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from zeco_train.collectives import Courier, scan_alone
from zeco_train.collectives.cost_model import MEASURED, Link
from zeco_train.collectives.registry import ALL_SCANS
from zeco_train.collectives.spec import ScanSpec, choose, eligible
from zeco_train.collectives.symmetric import SymmetricScans, request_problem, transport_problem
from zeco_train.errors import ConfigError
from zeco_train.ops.seam import ScanRequest
from zeco_train.sp.all_scan_config import AllScanConfig, AllScanTransport
from zeco_train.sp.backend import BackendSpec, Chosen, ScanBackend

logger = logging.getLogger(__name__)


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

    def choose(self, request: ScanRequest) -> Chosen:
        """See `ScanBackend.choose`.

        Raises:
            ConfigError: `transport=symmetric`, and the ranks do not support it. On all of them.
        """
        return self._chosen_of(request, self._scans)

    def possible(self, request: ScanRequest) -> Sequence[Chosen]:
        """See `ScanBackend.possible`; each takes tens of MB of symmetric memory per direction."""
        if len(self._scans) == 1 or self._ranks == 1:
            return [self.choose(request)]
        found = eligible(self._scans, MEASURED[self._find_link(request.state.device)], self._ranks)
        return [self._chosen_of(request, (scan,)) for scan in found]

    def _chosen_of(self, request: ScanRequest, scans: tuple[ScanSpec, ...]) -> Chosen:
        """Algorithm and transport: decided from data that all ranks share, and logged."""
        if self._ranks == 1:
            return Chosen(scan_alone)
        courier, link = self.courier(request), self._find_link(request.state.device)
        problem = request_problem(request) if link is Link.symmetric else None
        if problem is not None:
            self._fall_back(problem)
            # The ranks could use symmetric memory, so they are on one machine.
            link = Link.nccl
        load = self.load(request)
        choice = choose(scans, MEASURED[link], load, self._blocks)
        if _is_main():
            logger.info("all-scan of %.3g MB over %d ranks: %s", load.state_bytes / 1e6, self._ranks, choice)
        if link is not Link.symmetric:
            return Chosen(choice.scan.over(courier, choice.blocks), choice.scan, choice)
        if courier not in self._symmetric:
            self._symmetric[courier] = SymmetricScans(courier)
        start = partial(self._symmetric[courier].launch, algorithm=choice.scan, blocks=choice.blocks)
        return Chosen(start, choice.scan, choice)

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
