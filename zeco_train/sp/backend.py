"""Base class of the backends, and the backend descriptor, the interface to the rest of the project.

A backend launches each scan over the courier of its direction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeco_train.collectives import Courier
from zeco_train.collectives.cost_model import Load
from zeco_train.collectives.spec import Choice, ScanSpec
from zeco_train.collectives.topology import Topology
from zeco_train.ops.seam import LaunchedScan, ScanRequest
from zeco_train.ops.transition import is_matrix
from zeco_train.sp.exposed import active_meter


class ScanBackend(ABC):
    """A `StateScan` whose collective is implemented by `start`.

    Args:
        couriers: of the SP group, one for forward scans and one for reverse scans, each with its own process group,
            since one group serialises its messages. None if nothing is communicated.

    Attributes:
        choice: what the last scan was started by; None where there is nothing to choose, or to communicate.
        finish_waits: `finish` of its scans communicates in the caller instead of in a courier.
    """

    finish_waits = False
    choice: Choice | None = None

    def __init__(self, couriers: tuple[Courier, ...] = ()) -> None:
        self._couriers = couriers
        self._crosses_ranks = any(courier.size > 1 for courier in couriers)

    def launch(self, request: ScanRequest) -> LaunchedScan:
        """See `StateScan.launch`.

        Raises:
            CommunicationError: a peer is gone, or an earlier scan failed.
        """
        scan, meter = self.start(request), active_meter()
        if meter is None or not self._crosses_ranks:
            return scan
        return meter.metered(scan, request.state.device, self.finish_waits)

    @abstractmethod
    def start(self, request: ScanRequest) -> LaunchedScan:
        """Start the scan by the backend's collective."""

    def courier(self, request: ScanRequest) -> Courier:
        """The courier of the request's direction."""
        return self._couriers[request.reverse]

    def load(self, request: ScanRequest) -> Load:
        """The size of the request's scan, over the ranks of its courier."""
        courier, state = self.courier(request), request.state
        matrices, nodes = is_matrix(request.transition), courier.topology.nodes
        return Load(courier.size, tuple(state.shape), state.element_size(), matrices, nodes)

    def algorithm(self, request: ScanRequest) -> ScanSpec | None:
        """The algorithm of a request that was started; None if nothing is communicated."""
        del request
        return None

    def bytes_sent(self, request: ScanRequest) -> float:
        """Bytes that the busiest rank sends for a request that was started, by its algorithm's descriptor."""
        scan = self.algorithm(request) if self._crosses_ranks else None
        return 0.0 if scan is None else scan.bytes_sent(self.load(request), request.want_carry)

    def prepare(self, device: torch.device) -> None:
        """Warm up with a tiny scan in each direction. Collective; returns when the scans have completed.

        Lazy initialisation (NCCL's communicators, symmetric memory) then happens here and not in a first step.

        Required on CUDA: a group that is initialised eagerly at creation serialises its messages.

        Raises:
            ConfigError: the ranks do not support the configuration.
            CommunicationError: a peer is gone.
        """
        # Of a transition that cuts, which a scan between neighbours needs.
        state, transition = torch.zeros(1, 1, 8, 8, device=device), torch.full((1, 1, 8), -torch.inf, device=device)
        for start in self.kinds(device):
            for reverse in (False, True)[: len(self._couriers)]:
                scan = start(ScanRequest(state, transition, reverse, want_carry=True, cuts=True))
                scan.wait()
                scan.finish()
                scan.carry_out()
        self.drain()

    def kinds(self, device: torch.device) -> Sequence[Callable[[ScanRequest], LaunchedScan]]:
        """`start` for each collective that it may choose for states on a device. Collective."""
        del device
        return [self.start]

    def drain(self) -> None:
        """See `StateScan.drain`."""
        for courier in self._couriers:
            courier.drain()


class SpecScan(ScanBackend):
    """A backend with a single algorithm."""

    def __init__(self, couriers: tuple[Courier, ...], scan: ScanSpec) -> None:
        super().__init__(couriers)
        self._scan, self.finish_waits = scan, scan.in_series

    def start(self, request: ScanRequest) -> LaunchedScan:
        """Start the scan by the descriptor's algorithm."""
        return self._scan.start(request, self.courier(request))

    def algorithm(self, request: ScanRequest) -> ScanSpec:
        """See `ScanBackend.algorithm`."""
        del request
        return self._scan


@dataclass(frozen=True, eq=False)
class BackendSpec:
    """Descriptor of a backend, for settings, tables, plans and figures.

    Attributes:
        name: as in `sp=`.
        description: one line for `--help`.
        color, dark_color: in figures, on a light and a dark background.
        build: (couriers, settings) → its scan; `settings` is its section of `sp`, or None.
        scans: the algorithms that it may run, in table order; none for a backend without communication, which then
            rejects ranks that share a sequence.
        section: name of that section; None if there is none.
        scans_over: (settings, topology) → the algorithms that they allow over these nodes; raises ConfigError if the
            configured one cannot run over them. None: `scans`.
        topology: (settings, nodes as found) → the nodes of the ranks that share a sequence; raises ConfigError if the
            ranks do not fill the configured ones. None: as found.
    """

    name: str
    description: str
    color: str
    dark_color: str
    build: Callable[[tuple[Courier, ...], Any], ScanBackend]
    scans: tuple[ScanSpec, ...] = ()
    section: str | None = None
    scans_over: Callable[[Any, Topology], tuple[ScanSpec, ...]] | None = None
    topology: Callable[[Any, Topology], Topology] | None = None

    def size_problem(self, size: int) -> str | None:
        """Why this many ranks cannot share a sequence; None if they can."""
        if self.scans or size == 1:
            return None
        return f"sp={self.name} keeps whole sequences on a rank and needs 1; or take sp=zeco"
