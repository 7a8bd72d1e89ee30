"""What the backends share: a scan is launched from one request, over the courier of its direction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zeco_train.collectives import Courier, ScanRequest
from zeco_train.ops.seam import LaunchedScan
from zeco_train.sp.exposed import ExposedMeter


class ScanBackend(ABC):
    """A `StateScan` whose way over the wire is left to `start`.

    Args:
        couriers: of the SP group for forward scans and for reverse ones, each with a process group of its own, since
            one group runs its messages in series. None where nothing crosses ranks.

    Attributes:
        finish_waits: of the class: `finish` of its scans communicates, and does not leave that to a courier.
        exposed: measures the communication of scans that no compute hides. Where nothing crosses ranks, there is
            nothing to measure.
    """

    finish_waits = False

    def __init__(self, couriers: tuple[Courier, ...] = ()) -> None:
        self._couriers = couriers
        self._crosses_ranks = any(courier.size > 1 for courier in couriers)
        self.exposed = ExposedMeter()

    def launch(
        self,
        state: Tensor,
        transition: Tensor,
        *,
        reverse: bool = False,
        carry_in: Tensor | None = None,
        want_carry: bool = False,
    ) -> LaunchedScan:
        """See `StateScan.launch`.

        Raises:
            ValueError: shapes, dtypes or devices that do not fit.
            CommunicationError: a peer is gone, or an earlier scan failed.
        """
        scan = self.start(ScanRequest(state, transition, reverse, carry_in, want_carry))
        return self.exposed.metered(scan, state.device, self.finish_waits) if self._crosses_ranks else scan

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
