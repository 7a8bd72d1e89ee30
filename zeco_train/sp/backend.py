"""Base class and descriptor of the backends: each launches scans over the worker of their direction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zeco_train.collectives import ScanWorker, scan_alone
from zeco_train.collectives.cost_model import Load
from zeco_train.collectives.topology import Topology
from zeco_train.collectives.worker import ScanSpec
from zeco_train.ops.seam import LaunchedScan, ScanRequest, StateScan, is_matrix
from zeco_train.sp.exposed import MEASURING, MeteredScan
from zeco_train.sp.scan_choice import ScanChoice


class Launcher(NamedTuple):
    """How scans of a shape and direction are started."""

    start: Callable[[ScanRequest], LaunchedScan]
    scan: ScanSpec | None = None  # None: nothing is communicated
    choice: ScanChoice | None = None  # None: there was nothing to choose


class ScanBackend(ABC):
    """A `StateScan` by the algorithm that `launcher_for` finds, once for each shape and direction of states.

    `workers` are one for forward and one for reverse scans, each with its own process group, since one group serialises
    its messages; none if nothing is communicated.
    """

    choice: ScanChoice | None = None  # of the last scan

    def __init__(self, workers: tuple[ScanWorker, ...] = ()) -> None:
        self._workers = workers
        self._crosses_ranks = any(worker.size > 1 for worker in workers)
        self._launchers: dict[tuple[object, ...], Launcher] = {}

    def launch(self, request: ScanRequest) -> LaunchedScan:
        """Raises ConfigError if the ranks do not support it; CommunicationError if an earlier scan failed."""
        launcher = self._kept_launcher(request)
        self.choice, scan = launcher.choice, launcher.start(request)
        if not MEASURING or not self._crosses_ranks:
            return scan
        in_series = launcher.scan is not None and launcher.scan.in_series
        return MeteredScan(scan, request.state.device, MEASURING[-1], finish_waits=in_series)

    @abstractmethod
    def launcher_for(self, request: ScanRequest) -> Launcher:
        """How requests like this one are started; the same on all ranks."""

    def warm_up_launchers(self, request: ScanRequest) -> Sequence[Launcher]:
        """All that `launcher_for` may find for states on the device of this one. Collective."""
        return [self.launcher_for(request)]

    def worker(self, request: ScanRequest) -> ScanWorker:
        return self._workers[request.reverse]

    def load(self, request: ScanRequest) -> Load:
        worker, state = self.worker(request), request.state
        matrices, nodes = is_matrix(request.transition), worker.topology.nodes
        return Load(worker.size, tuple(state.shape), state.element_size(), matrices, nodes)

    def bytes_sent(self, request: ScanRequest) -> float:
        """Bytes that the busiest rank sends for a request."""
        scan = self._kept_launcher(request).scan if self._crosses_ranks else None
        return 0.0 if scan is None else scan.bytes_sent(self.load(request), request.want_carry)

    def prepare(self, device: torch.device) -> None:
        """Warm up with a tiny scan in each direction. Collective; returns when the scans have completed.

        Lazy initialisation (NCCL's communicators, symmetric memory) then happens here and not in a first step. Required
        on CUDA: a group that is initialised eagerly at creation serialises its messages. Raises as `launch`.
        """
        # Of a transition that cuts, as a halo's does.
        state, transition = torch.zeros(1, 1, 8, 8, device=device), torch.full((1, 1, 8), -torch.inf, device=device)
        for reverse in (False, True)[: len(self._workers)]:
            request = ScanRequest(state, transition, reverse, want_carry=True, cuts=True)
            for launcher in self.warm_up_launchers(request):
                scan = launcher.start(request)
                scan.wait()
                scan.finish()
                scan.carry_out()
        self.drain()

    def drain(self) -> None:
        for worker in self._workers:
            worker.drain()

    def _kept_launcher(self, request: ScanRequest) -> Launcher:
        key = request.reverse, request.state.shape, request.state.dtype, request.transition.ndim
        if key not in self._launchers:
            self._launchers[key] = self.launcher_for(request)
        return self._launchers[key]


class SpecScan(ScanBackend):
    """A backend with a single algorithm; `blocks` as of `ScanSpec.over`."""

    def __init__(self, workers: tuple[ScanWorker, ...], scan: ScanSpec, blocks: int | None = None) -> None:
        super().__init__(workers)
        self._scan, self._blocks = scan, blocks

    def launcher_for(self, request: ScanRequest) -> Launcher:
        return Launcher(self._scan.over(self.worker(request), self._blocks), self._scan)


class LocalScan(ScanBackend):
    """The exclusive scan over a single rank: `wait` returns `carry_in`, or zeros. Needs no workers."""

    def launch(self, request: ScanRequest) -> LaunchedScan:
        return scan_alone(request)

    def launcher_for(self, request: ScanRequest) -> Launcher:
        return Launcher(scan_alone)


class BackendSettings(Protocol):
    """A backend's section of `sp`."""

    def scans_over(self, topology: Topology) -> tuple[ScanSpec, ...]:
        """The algorithms that it allows over these nodes. Raises ConfigError if the chosen one cannot run there."""

    def topology(self, found: Topology) -> Topology:
        """The nodes of the ranks of a sequence, given those found. Raises ConfigError if the ranks do not fill them."""


@dataclass(frozen=True, eq=False)
class BackendSpec:
    """Descriptor of a backend, for settings, tables, plans and figures."""

    name: str  # as in `sp=`
    description: str  # one line for `--help`
    color: str  # in figures
    build: Callable[[tuple[ScanWorker, ...], Any], ScanBackend]  # (workers, its section of `sp` or None) → its scan
    # that it may run, in table order; none: it communicates nothing, and rejects ranks that share a sequence
    scans: tuple[ScanSpec, ...] = ()
    section: str | None = None  # name of its section of `sp`, a `BackendSettings`

    def size_problem(self, size: int) -> str | None:
        """Why this many ranks cannot share a sequence; None if they can."""
        if self.scans or size == 1:
            return None
        return f"sp={self.name} keeps whole sequences on a rank and needs 1; or take sp=zeco"


class TappedScan:
    """A `StateScan` by another one, for subclasses to override what sees requests and results."""

    def __init__(self, scan: StateScan) -> None:
        self._scan = scan

    def launch(self, request: ScanRequest) -> LaunchedScan:
        self.launched(request)
        return _Tapped(self._scan.launch(request), request, self)

    def drain(self) -> None:
        self._scan.drain()

    def launched(self, request: ScanRequest) -> None:
        """Called before each launch."""

    def received(self, request: ScanRequest, state: Tensor) -> Tensor:
        """The result of `wait`, given the other scan's."""
        return state

    def carried(self, request: ScanRequest, state: Tensor) -> Tensor:
        """The result of `carry_out`, given the other scan's."""
        return state


class _Tapped:
    def __init__(self, scan: LaunchedScan, request: ScanRequest, tap: TappedScan) -> None:
        self._scan, self._request, self._tap = scan, request, tap

    def wait(self) -> Tensor:
        return self._tap.received(self._request, self._scan.wait())

    def finish(self) -> None:
        self._scan.finish()

    def carry_out(self) -> Tensor:
        return self._tap.carried(self._request, self._scan.carry_out())
