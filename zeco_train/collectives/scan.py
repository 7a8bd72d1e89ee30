"""What all scans share: the handle that gives their results."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from zeco_train.ops.seam import ScanRequest
from zeco_train.ops.transition import fold


class Promise:
    """A tensor that a job will deliver, or the error that kept it from doing so."""

    def __init__(self) -> None:
        self._settled = threading.Event()
        self._value: Tensor | None = None
        self._error: BaseException | None = None
        self._ready: torch.cuda.Event | None = None

    def deliver(self, value: Tensor, is_ready: bool = False) -> None:
        """Keep the promise; unless it `is_ready`, `value` may still be in the making on the current stream."""
        if value.is_cuda and not is_ready:
            self._ready = torch.cuda.Event()
            self._ready.record()
        self._value = value
        self._settled.set()

    def fail(self, error: BaseException) -> None:
        """Break the promise, unless it was kept."""
        if not self._settled.is_set():
            self._error = error
            self._settled.set()

    def get(self) -> Tensor:
        """The tensor, once it is there; on CUDA at once, with the current stream made to wait for it.

        Ends in bounded time, because every wait of a job is bounded.
        """
        self._settled.wait()
        if self._error is not None:
            raise self._error
        assert self._value is not None
        if self._ready is not None:
            stream = torch.cuda.current_stream(self._value.device)
            stream.wait_event(self._ready)
            self._value.record_stream(stream)
        return self._value


class PendingScan:
    """A scan under way (`zeco_train.ops.seam.LaunchedScan`). `incoming` and `carry` are for the job that runs it.

    Attributes:
        ended: of a scan that is captured into a CUDA graph, the end of all that it does.
    """

    def __init__(self, want_carry: bool) -> None:
        self.incoming = Promise()
        self.carry = Promise() if want_carry else None
        self.ended: torch.cuda.Event | None = None

    def wait(self) -> Tensor:
        """The incoming state, [B, H, K, V]; it may be `carry_in` itself, so it is not to be written to.

        Raises:
            CommunicationError: a peer did not answer in time or is gone, in this scan or an earlier one of the courier.
        """
        return self.incoming.get()

    def finish(self) -> None:
        """Nothing: the courier has long sent this rank's part on. A captured scan is joined to the current stream."""
        if self.ended is not None:
            torch.cuda.current_stream().wait_event(self.ended)

    def carry_out(self) -> Tensor:
        """The state after the last rank in scan direction, [B, H, K, V], the same on every rank.

        Raises:
            RuntimeError: the scan was launched without `want_carry=True`.
            CommunicationError: as in `wait`.
        """
        if self.carry is None:
            raise RuntimeError("carry_out needs a scan launched with want_carry=True")
        return self.carry.get()

    @property
    def promises(self) -> list[Promise]:
        """All that the job has to deliver."""
        return [self.incoming] if self.carry is None else [self.incoming, self.carry]


def scan_alone(request: ScanRequest) -> PendingScan:
    """The scan over one rank; both directions are the same here."""
    scan = PendingScan(request.want_carry)
    incoming = request.first_incoming()
    scan.incoming.deliver(incoming)
    if scan.carry is not None:
        scan.carry.deliver(fold(request.state, request.transition, incoming))
    return scan
