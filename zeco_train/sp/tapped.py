"""A scan that sees, and may change, what goes through another one."""

from __future__ import annotations

from torch import Tensor

from zeco_train.ops.seam import LaunchedScan, ScanRequest, StateScan


class TappedScan:
    """A `StateScan` by another one, for subclasses to override what sees requests and results."""

    def __init__(self, scan: StateScan) -> None:
        self._scan = scan

    def launch(self, request: ScanRequest) -> LaunchedScan:
        """See `StateScan`."""
        self.launched(request)
        return _Tapped(self._scan.launch(request), request, self)

    def drain(self) -> None:
        """See `StateScan`."""
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
    """A launched scan (`zeco_train.ops.seam.LaunchedScan`)."""

    def __init__(self, scan: LaunchedScan, request: ScanRequest, tap: TappedScan) -> None:
        self._scan, self._request, self._tap = scan, request, tap

    def wait(self) -> Tensor:
        return self._tap.received(self._request, self._scan.wait())

    def finish(self) -> None:
        self._scan.finish()

    def carry_out(self) -> Tensor:
        return self._tap.carried(self._request, self._scan.carry_out())
