"""Which scan ZeCO runs: the link that the ranks share, what happens without it, and the fastest algorithm over it.

Decided in this order, from what all ranks know alike, so all decide alike:

1. the candidates: `AllScanConfig.scans_over` the nodes, once;
2. the link, once: messages on CPUs, over several nodes, with `transport=p2p`, and where the GPUs have no symmetric
   memory; else symmetric memory;
3. for each shape and direction of states the fastest candidate over that link by the cost model; a scan that the
   kernels cannot run goes by messages.

`transport=symmetric` refuses where `auto` falls back, with the same reason; a fallback is logged once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zeco_train.collectives import ScanWorker
from zeco_train.collectives.cost_model import MEASURED, Costs, Link, Load
from zeco_train.collectives.symmetric import request_problem, transport_problem
from zeco_train.collectives.worker import ScanSpec
from zeco_train.errors import ConfigError
from zeco_train.ops.seam import ScanRequest
from zeco_train.sp.all_scan_config import AllScanConfig, AllScanTransport

logger = logging.getLogger(__name__)

_NEEDS = "needs GPUs of one NVLink domain"


@dataclass(frozen=True)
class ScanChoice:
    """An algorithm over a link."""

    scan: ScanSpec
    link: Link
    blocks: int | None  # if states are sent in blocks over messages; else None
    seconds: float  # predicted

    def __str__(self) -> str:
        return f"{self.scan.name}{'' if self.blocks is None else f' of {self.blocks} blocks'} by {self.link.value}"


def fastest_scan(scans: Sequence[ScanSpec], costs: Costs, load: Load, blocks: int | None = None) -> ScanChoice:
    """The fastest scan that runs on the link of `costs`, for P ≥ 2 ranks; the first of equals. ValueError if none does.

    `blocks` applies if states are sent in blocks; None is the best number over messages, and 16,384 elements each in
    one kernel.
    """
    choices = []
    able = [scan for scan in scans if scan.runs_on(costs.link, load)]
    if costs.link is Link.symmetric and load.matrices:
        able = [scan for scan in able if scan.kernel and scan.kernel.measured] or able
    for scan in able:
        count = blocks if scan.best_blocks else None
        if count is None and scan.best_blocks and costs.link is not Link.symmetric:
            count = scan.best_blocks(costs, load)
        choices.append(ScanChoice(scan, costs.link, count, scan.seconds(costs, load, count)))
    return min(choices, key=lambda choice: choice.seconds)


def ever_fastest(scans: Sequence[ScanSpec], costs: Costs, ranks: int) -> list[ScanSpec]:
    """The scans that `fastest_scan` may return for some state size."""
    if costs.link is not Link.symmetric:
        return list(scans)
    # All times are linear in the size: a scan that is faster at both extreme sizes is faster in between.
    ends = [fastest_scan(scans, costs, Load(ranks, (1, 1, 1, 1), itemsize)).scan for itemsize in (0, 1 << 62)]
    return [scan for scan in scans if scan in ends]


class ScanChooser:
    """Chooses link and algorithm for the scans of one group of ranks, and logs what it chose.

    `scans`: the candidates, if not those of the settings. Raises ConfigError if the configured algorithm cannot run
    over the nodes.
    """

    def __init__(self, worker: ScanWorker, settings: AllScanConfig, scans: Sequence[ScanSpec] = ()) -> None:
        self._worker, self._topology = worker, worker.topology
        if self._topology.nodes > 1:
            given = "" if settings.ranks_per_node is None else " (sp.all_scan.ranks_per_node)"
            _log_once(logger.info, f"ranks of a sequence: {self._topology}{given}")
        self.scans = scans or settings.scans_over(self._topology)
        self._transport, self._blocks = settings.transport, settings.num_blocks
        self._link: Link | None = None

    def choose_scan(self, request: ScanRequest, load: Load, scans: Sequence[ScanSpec]) -> ScanChoice:
        """The fastest of `scans` for requests of this size. Collective on CUDA, the first time.

        Raises ConfigError, on all ranks, if `transport=symmetric`, and the ranks or the scan do not support it.
        """
        link = self.link(request.state.device)
        problem = request_problem(request) if link is Link.symmetric else None
        if problem is None and not any(scan.runs_on(link, load) for scan in scans):
            problem = f"matrices of K={load.shape[2]}"
        if problem is not None:
            self._fall_back(f"has no kernel for {problem}")
            # The ranks could use symmetric memory, so they are on one machine.
            link = Link.nccl
        choice = fastest_scan(scans, MEASURED[link], load, self._blocks)
        if dist.get_rank() == 0:
            logger.info("all-scan of %.3g MB over %d ranks: %s", load.state_bytes / 1e6, load.ranks, choice)
        return choice

    def ever_chosen(self, device: torch.device) -> Sequence[ScanSpec]:
        """The algorithms that `choose_scan` may find for states on a device. Collective on CUDA, the first time."""
        if len(self.scans) == 1:
            return self.scans
        return ever_fastest(self.scans, MEASURED[self.link(device)], self._worker.size)

    def link(self, device: torch.device) -> Link:
        """The link that the ranks support, in both directions. Collective on CUDA, once; raises as `choose_scan`."""
        if self._link is None:
            self._link = self._find_link(device)
        return self._link

    def _find_link(self, device: torch.device) -> Link:
        if device.type != "cuda":
            if self._transport is AllScanTransport.symmetric:
                self._fall_back(f"{_NEEDS} (the states are on {device.type})")
            return Link.gloo
        if self._transport is not AllScanTransport.p2p:
            problem = self._symmetric_problem(device)
            if problem is None:
                return Link.symmetric
            self._fall_back(problem)
        return Link.nccl if self._topology.nodes == 1 else Link.nccl_across_nodes

    def _symmetric_problem(self, device: torch.device) -> str | None:
        if not any(scan.kernel for scan in self.scans):
            return f"has no kernel for {self.scans[0].name} yet"
        if self._topology.nodes > 1:
            return f"{_NEEDS} (the ranks are on {self._topology})"
        problem = transport_problem(self._worker, device)
        return None if problem is None else f"{_NEEDS} ({problem})"

    def _fall_back(self, problem: str) -> None:
        if self._transport is AllScanTransport.symmetric:
            raise ConfigError("sp.all_scan.transport", self._transport.value, f"{problem}; or take auto or p2p")
        line = "sp.all_scan.transport=auto takes p2p, which is slower: symmetric memory"
        _log_once(logger.warning, f"{line} {problem}")


# In a process: the scans of states and of halos find the same.
@functools.cache
def _log_once(log: Callable[[str], None], line: str) -> None:
    if dist.get_rank() == 0:
        log(line)
