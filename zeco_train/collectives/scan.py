"""The handle of a scan in flight, shared by all algorithms."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from zeco_train.ops.seam import ScanRequest
from zeco_train.ops.transition import fold


class Promise:
    """A future tensor of a job, or the error that prevented it."""

    def __init__(self) -> None:
        self._settled = threading.Event()
        self._value: Tensor | None = None
        self._error: BaseException | None = None
        self._ready: torch.cuda.Event | None = None

    def deliver(self, value: Tensor, is_ready: bool = False) -> None:
        """Set the value; unless `is_ready`, it may still be computed by work queued on the current stream."""
        if value.is_cuda and not is_ready:
            self._ready = torch.cuda.Event()
            self._ready.record()
        self._value = value
        self._settled.set()

    def fail(self, error: BaseException) -> None:
        """Set the error, unless the value is already set."""
        if not self._settled.is_set():
            self._error = error
            self._settled.set()

    def get(self) -> Tensor:
        """Wait for the tensor; on CUDA returns at once and makes the current stream wait.

        Bounded, since every wait of a job is bounded.
        """
        self._settled.wait()
        if self._error is not None:
            raise self._error
        assert self._value is not None
        if self._ready is not None:
            stream = torch.cuda.current_stream(self._value.device)
            stream.wait_event(self._ready)
            # Allocated on the courier's stream: the allocator must not reuse it while the caller's stream reads it.
            self._value.record_stream(stream)
        return self._value


class PendingScan:
    """A scan in flight (`zeco_train.ops.seam.LaunchedScan`). Its job fills `incoming` and `carry`.

    Attributes:
        ended: for a scan captured into a CUDA graph, the event at the end of all its work.
    """

    def __init__(self, want_carry: bool) -> None:
        self.incoming = Promise()
        self.carry = Promise() if want_carry else None
        self.ended: torch.cuda.Event | None = None

    def wait(self) -> Tensor:
        """The incoming state, [B, H, K, V]; it may be `carry_in` itself, so do not write to it.

        Raises:
            CommunicationError: a peer did not answer in time or is gone, in this scan or an earlier one of the courier.
        """
        return self.incoming.get()

    def finish(self) -> None:
        """Join a captured scan to the current stream; else nothing is left to do, since the courier forwards."""
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
        """The promises that the job must deliver."""
        return [self.incoming] if self.carry is None else [self.incoming, self.carry]


def scan_alone(request: ScanRequest) -> PendingScan:
    """The scan over one rank, for which both directions are the same."""
    scan = PendingScan(request.want_carry)
    incoming = request.first_incoming()
    scan.incoming.deliver(incoming)
    if scan.carry is not None:
        scan.carry.deliver(fold(request.state, request.transition, incoming))
    return scan
