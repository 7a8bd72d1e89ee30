"""What the backends share: a scan is launched from one request, over the courier of its direction; and a descriptor,
which is all that the rest of the project knows of a backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeco_train.collectives import Courier
from zeco_train.collectives.spec import ScanSpec
from zeco_train.ops.seam import LaunchedScan, ScanRequest
from zeco_train.sp.exposed import ExposedMeter


class ScanBackend(ABC):
    """A `StateScan` whose way over the wire is left to `start`.

    Args:
        couriers: of the SP group for forward scans and for reverse ones, each with a process group of its own, since
            one group runs its messages in series. None where nothing crosses ranks.

    Attributes:
        finish_waits: `finish` of its scans communicates, and does not leave that to a courier.
        exposed: measures the communication of scans that no compute hides. Where nothing crosses ranks, there is
            nothing to measure.
    """

    finish_waits = False

    def __init__(self, couriers: tuple[Courier, ...] = ()) -> None:
        self._couriers = couriers
        self._crosses_ranks = any(courier.size > 1 for courier in couriers)
        self.exposed = ExposedMeter()

    def launch(self, request: ScanRequest) -> LaunchedScan:
        """See `StateScan.launch`.

        Raises:
            CommunicationError: a peer is gone, or an earlier scan failed.
        """
        scan = self.start(request)
        return self.exposed.metered(scan, request.state.device, self.finish_waits) if self._crosses_ranks else scan

    @abstractmethod
    def start(self, request: ScanRequest) -> LaunchedScan:
        """Start the scan, by the backend's collective."""

    def courier(self, request: ScanRequest) -> Courier:
        """The courier of the request's direction."""
        return self._couriers[request.reverse]

    def prepare(self, device: torch.device) -> None:
        """Run a tiny scan of each direction, so that what is set up at first use (NCCL's communicators, memory that
        ranks share) is set up here and not in a first step. Collective; returns when the scans are over.

        Groups have to be set up like this on CUDA: one that is set up as it is made runs its messages in series.

        Raises:
            ConfigError: the ranks cannot do what was configured.
            CommunicationError: a peer is gone.
        """
        state = torch.zeros(1, 1, 8, 8, device=device)
        for start in self.kinds(device):
            for reverse in (False, True)[: len(self._couriers)]:
                scan = start(ScanRequest(state, state[..., 0].contiguous(), reverse, want_carry=True))
                scan.wait()
                scan.finish()
                scan.carry_out()
        self.drain()

    def kinds(self, device: torch.device) -> Sequence[Callable[[ScanRequest], LaunchedScan]]:
        """`start` for each collective that it may take with states on a device. Collective."""
        del device
        return [self.start]

    def drain(self) -> None:
        """Return when everything launched is received *and* sent; to be called before the groups are destroyed.

        Raises:
            CommunicationError: a scan failed.
        """
        for courier in self._couriers:
            courier.drain()


class SpecScan(ScanBackend):
    """A backend whose scans all are one algorithm's."""

    def __init__(self, couriers: tuple[Courier, ...], scan: ScanSpec) -> None:
        super().__init__(couriers)
        self._scan, self.finish_waits = scan, scan.in_series

    def start(self, request: ScanRequest) -> LaunchedScan:
        return self._scan.start(request, self.courier(request))


@dataclass(frozen=True, eq=False)
class BackendSpec:
    """A backend, as settings, tables, plans and pictures know it.

    Attributes:
        name: as `sp=` has it.
        description: for `--help`, a line.
        color, dark_color: in pictures, on light and on dark paper.
        build: (couriers, settings) → its scan; `settings` is the section of `sp` that it reads, or None.
        scans: the algorithms that it may run, in the order of tables; none where nothing crosses ranks, and then it
            refuses ranks that share a sequence.
        section: name of that section; None if there is none.
    """

    name: str
    description: str
    color: str
    dark_color: str
    build: Callable[[tuple[Courier, ...], Any], ScanBackend]
    scans: tuple[ScanSpec, ...] = ()
    section: str | None = None

    def size_problem(self, size: int) -> str | None:
        """Why so many ranks cannot share a sequence; None if they can."""
        if self.scans or size == 1:
            return None
        return f"sp={self.name} keeps whole sequences on a rank and needs 1; or take sp=zeco"
