"""What all scans share: the request that starts one, and the handle that gives its results."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from zeco_train.ops.transition import fold


@dataclass(frozen=True, eq=False)
class ScanRequest:
    """One rank's part in a scan.

    Attributes:
        state: [B, H, K, V], fp32 or fp64, this rank's contribution from a zero start.
        transition: same dtype: log-decays [B, H, K], ≤ 0, may be −inf; or matrices [B, H, K, K]. All ranks' are of one
            kind. A reverse scan takes the `adjoint` of what the forward one took.
        reverse: scan from the last rank to the first.
        carry_in: [B, H, K, V], read by the first rank in scan direction only; None is zero.
        want_carry: `carry_out` will be asked for. All ranks must agree.

    Raises:
        ValueError: a shape, dtype or device that does not fit.
    """

    state: Tensor
    transition: Tensor
    reverse: bool = False
    carry_in: Tensor | None = None
    want_carry: bool = False

    def __post_init__(self) -> None:
        state, transition, carry_in = self.state, self.transition, self.carry_in
        if state.ndim != 4 or state.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"state must be [B, H, K, V] in float32 or float64, not {_describe(state)}")
        wanted = (state.dtype, state.device)
        shapes = state.shape[:3], (*state.shape[:3], state.shape[2])
        if transition.shape not in shapes or (transition.dtype, transition.device) != wanted:
            problem = f"like the state, {_describe(state)}, not {_describe(transition)}"
            raise ValueError(f"transition must be [B, H, K] or [B, H, K, K] {problem}")
        if carry_in is not None and (carry_in.shape != state.shape or (carry_in.dtype, carry_in.device) != wanted):
            raise ValueError(f"carry_in must be like the state, {_describe(state)}, not {_describe(carry_in)}")

    def first_incoming(self) -> Tensor:
        """The incoming state of the first rank in scan direction, R_0: `carry_in` itself, or zeros."""
        return torch.zeros_like(self.state) if self.carry_in is None else self.carry_in


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


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
