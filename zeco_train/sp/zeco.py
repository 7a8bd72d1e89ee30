"""ZeCO (Chou et al., 2025, arXiv 2507.01004): sequence parallelism at nearly the price of data parallelism.

What a rank's tokens need of all tokens before them is one state R_p, [B, H, K, V], whatever the sequence's length:

    R_{p+1} = A_p R_p + S_p        S_p, A_p: state and transition (decays, or a matrix) of rank p's tokens

So each rank (1) computes (S_p, A_p), (2) starts the All-Scan, an exclusive scan of these pairs over the ranks,
(3) computes its intra-chunk scores, which need no other rank, while the scan runs, (4) waits for R_p, adds its decayed
copy to its own chunk states, and computes its outputs. The backward pass is the same with gradients of states, from the
last rank to the first. Steps 1, 3 and 4 are `zeco_train/ops/mix.py`; step 2 is here.

On the wire, per rank and direction: one state of S bytes, received once and sent once (`chain`), or at most 2 S
(`two_shot`); an all-gather takes (P − 1) S. Both are in `zeco_train/collectives`, and differ in rounding only. Between
GPUs that map each other's memory each is one kernel, `zeco_train/kernels/all_scan/`, with no host in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

import torch
import torch.distributed as dist

from zeco_train.collectives import Courier, PendingScan, ScanRequest, launch_chain, launch_two_shot
from zeco_train.collectives.cost_model import Choice, Link, choose, eligible
from zeco_train.collectives.symmetric import SymmetricScans, hosts_of, request_problem, transport_problem
from zeco_train.errors import ConfigError
from zeco_train.sp.backend import ScanBackend

logger = logging.getLogger(__name__)


class AllScanAlgorithm(Enum):
    """`chain`: blocks flow from rank to rank (ZeCO, Algorithm 2). `two_shot`: two all-to-alls, slices have owners.
    `auto`: the faster one by the cost model."""

    auto = "auto"
    chain = "chain"
    two_shot = "two_shot"


class AllScanTransport(Enum):
    """`p2p`: messages of `torch.distributed`. `symmetric`: one kernel over memory that all ranks map. `auto`: what the
    ranks can."""

    auto = "auto"
    p2p = "p2p"
    symmetric = "symmetric"


class AllScan(ScanBackend):
    """ZeCO's scan over the ranks of a sequence.

    Args:
        couriers: see `ScanBackend`.
        algorithm, transport: see `AllScanConfig`.
        blocks: of `chain`; None is auto.
    """

    def __init__(
        self,
        couriers: tuple[Courier, ...],
        algorithm: AllScanAlgorithm,
        transport: AllScanTransport = AllScanTransport.auto,
        blocks: int | None = None,
    ) -> None:
        super().__init__(couriers)
        self._ranks = couriers[0].size
        self._transport, self._blocks = transport, blocks
        self._algorithm = None if algorithm is AllScanAlgorithm.auto else algorithm.value
        self._link: Link | None = None
        self._fell_back: set[str] = set()
        self._symmetric: dict[Courier, SymmetricScans] = {}
        self._choices: dict[tuple[object, ...], tuple[Link, Choice]] = {}

    def start(self, request: ScanRequest) -> PendingScan:
        """Start the All-Scan: it goes on while the caller computes its intra-chunk scores.

        Raises:
            ConfigError: `transport=symmetric`, and the ranks cannot. On all of them.
        """
        return self._start(request, self._algorithm)

    def kinds(self, device: torch.device) -> Sequence[Callable[[ScanRequest], PendingScan]]:
        """`start` for each algorithm that may be chosen; each takes tens of MB of symmetric memory a direction."""
        if self._algorithm is not None or self._ranks == 1:
            return [self.start]
        return [partial(self._start, algorithm=name) for name in eligible(self._find_link(device), self._ranks)]

    def _start(self, request: ScanRequest, algorithm: str | None) -> PendingScan:
        courier = self.courier(request)
        if self._ranks == 1:
            return launch_chain(request, courier, blocks=1)  # which has nothing to do
        key = (courier, algorithm, request.state.shape, request.state.dtype, request.transition.ndim)
        if key not in self._choices:
            self._choices[key] = self._choose(courier, request, algorithm)
        link, choice = self._choices[key]
        if link is Link.symmetric:
            return self._symmetric[courier].launch(request, choice.algorithm, choice.blocks)
        if choice.algorithm == "two_shot":
            return launch_two_shot(request, courier)
        return launch_chain(request, courier, blocks=choice.blocks or 1)

    def _choose(self, courier: Courier, request: ScanRequest, algorithm: str | None) -> tuple[Link, Choice]:
        """How scans of a shape go over the wire: decided once, by what all ranks know alike, and logged."""
        state, ranks = request.state, self._ranks
        link = self._find_link(state.device)
        problem = request_problem(request) if link is Link.symmetric else None
        if problem is not None:
            self._fall_back(problem)
            link = Link.nccl
        if link is Link.symmetric and courier not in self._symmetric:
            self._symmetric[courier] = SymmetricScans(courier)
        state_bytes = state.numel() * state.element_size()
        columns = state.shape[1] * state.shape[3]
        choice = choose(link, ranks, state_bytes, columns, algorithm, self._blocks)
        if _is_main():
            blocks = "" if choice.blocks is None or choice.algorithm != "chain" else f" of {choice.blocks} blocks"
            logger.info(
                "all-scan of %.3g MB over %d ranks: %s%s by %s",
                state_bytes / 1e6,
                ranks,
                choice.algorithm,
                blocks,
                link.value,
            )
        return link, choice

    def _find_link(self, device: torch.device) -> Link:
        """Which way the ranks have, the same in both directions. Collective on CUDA, the first time."""
        if self._link is None:
            self._link = self._try_links(self._couriers[0], device)
        return self._link

    def _try_links(self, courier: Courier, device: torch.device) -> Link:
        if device.type != "cuda":
            if self._transport is AllScanTransport.symmetric:
                self._fall_back(f"the states are on {device.type}")
            return Link.gloo
        if self._transport is not AllScanTransport.p2p:
            problem = transport_problem(courier, device)
            if problem is None:
                return Link.symmetric
            self._fall_back(problem)
        return Link.nccl if len(set(hosts_of(courier))) == 1 else Link.nccl_across_nodes

    def _fall_back(self, problem: str) -> None:
        """Say why symmetric memory is not used, or refuse what was asked for."""
        if self._transport is AllScanTransport.symmetric:
            allowed = f"needs GPUs of one NVLink domain ({problem}); or take auto or p2p"
            raise ConfigError("sp.all_scan.transport", self._transport.value, allowed)
        if problem not in self._fell_back and _is_main():
            logger.warning("sp.all_scan.transport=auto takes p2p, which is slower: no symmetric memory (%s)", problem)
        self._fell_back.add(problem)


def _is_main() -> bool:
    return dist.get_rank() == 0
