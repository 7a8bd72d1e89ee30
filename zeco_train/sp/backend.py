"""What the backends share: a scan is launched from one request, over the courier of its direction."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from zeco_train.collectives import Courier, ScanRequest
from zeco_train.sp.base import PendingScan


class ScanBackend(ABC):
    """A `StateScan` whose way over the wire is left to `start`.

    Args:
        couriers: of the SP group for forward scans and for reverse ones, each with a process group of its own, since
            one group runs its messages in series. None where nothing crosses ranks.
    """

    def __init__(self, couriers: tuple[Courier, ...] = ()) -> None:
        self._couriers = couriers

    def launch(
        self,
        state: Tensor,
        log_decay: Tensor,
        *,
        reverse: bool = False,
        carry_in: Tensor | None = None,
        want_carry: bool = False,
    ) -> PendingScan:
        """See `StateScan.launch`.

        Raises:
            ValueError: shapes, dtypes or devices that do not fit.
            CommunicationError: a peer is gone, or an earlier scan failed.
        """
        return self.start(ScanRequest(state, log_decay, reverse, carry_in, want_carry))

    @abstractmethod
    def start(self, request: ScanRequest) -> PendingScan:
        """Start the scan, by the backend's collective."""

    def courier(self, request: ScanRequest) -> Courier:
        """The courier of the request's direction."""
        return self._couriers[request.reverse]

    def drain(self) -> None:
        """Return when everything launched is received *and* sent; to be called before the groups are destroyed.

        Raises:
            CommunicationError: a scan failed.
        """
        for courier in self._couriers:
            courier.drain()
