"""Serial point-to-point: one rank after another receives, computes, folds and sends (LASP, Algorithms 2 and 3).

Receiving and sending are two calls, with the caller's outputs between them, so the ranks' compute is serialised:

    rank p:  receive R_p from p−1  →  (outputs that use R_p)  →  R_{p+1} = A_p R_p + S_p  →  send to p+1

On the wire: S bytes from each rank but the last, in one message; `carry_out` adds a broadcast of S from the last rank.
Rounds: P − 1. Time = Σ (α + βS) over the hops, and P times the compute between receive and send. No worker is
involved: each step runs in its caller.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.collectives.cost_model import Costs, Load
from zeco_train.collectives.wire import Wire
from zeco_train.collectives.worker import ScanSpec
from zeco_train.ops.seam import ScanRequest, fold

# Both sides wait for each message before the next one, so all can share one tag.
_TAG = 0


def recv_incoming(request: ScanRequest, wire: Wire) -> Tensor:
    """Receive R_p, [B, H, K, V], from the previous rank; the first rank takes `carry_in` itself, or zeros."""
    if wire.is_first:
        return request.first_incoming()
    incoming = torch.empty_like(request.state, memory_format=torch.contiguous_format)
    wire.receive(incoming, wire.position - 1, _TAG, "the state").wait()
    return incoming


def send_folded(request: ScanRequest, incoming: Tensor, wire: Wire) -> Tensor | None:
    """Fold this rank's pair into its incoming state and send the result to the next rank; return once it is received.

    Returns the state after the last rank, [B, H, K, V], the same on every rank, if `want_carry`.
    """
    if wire.is_last and not request.want_carry:
        return None
    folded = fold(request.state, request.transition, incoming).contiguous()
    if not wire.is_last:
        wire.send(folded, wire.position + 1, _TAG, "the state").wait()
    if not request.want_carry:
        return None
    if wire.size > 1:
        # Overwrites `folded` on all ranks but the last; it has been sent.
        wire.broadcast(folded, wire.size - 1, "carry_out").wait()
    return folded


class PendingSerialScan:
    """A serial scan (`zeco_train.ops.seam.LaunchedScan`): `wait` receives, `finish` folds and sends.

    Two scans of one group must not overlap: call `finish` of the first before `wait` of the second.
    """

    def __init__(self, request: ScanRequest, wire: Wire) -> None:
        self._request: ScanRequest | None = request
        self._wire, self._want_carry = wire, request.want_carry
        self._incoming: Tensor | None = None
        self._carry: Tensor | None = None

    def wait(self) -> Tensor:
        if self._incoming is None:
            assert self._request is not None
            self._incoming = recv_incoming(self._request, self._wire)
        return self._incoming

    def finish(self) -> None:
        """Call once, after `wait`."""
        if self._incoming is None or self._request is None:
            raise RuntimeError("finish of a serial scan comes once, after wait")
        request, self._request = self._request, None
        self._carry = send_folded(request, self._incoming, self._wire)

    def carry_out(self) -> Tensor:
        """The state after the last rank in scan direction, the same on every rank; call after `finish`."""
        if not self._want_carry:
            raise RuntimeError("carry_out needs a scan launched with want_carry=True")
        if self._carry is None:
            raise RuntimeError("carry_out of a serial scan comes after finish")
        return self._carry


def _seconds(costs: Costs, load: Load, blocks: int | None) -> float:
    # Messages only; the caller adds the ranks' compute between them.
    return sum(hop.message + hop.byte * load.state_bytes for hop in costs.along(load))


SERIAL = ScanSpec(
    name="serial",
    description="one rank after another receives, computes, folds and sends (LASP, Algorithms 2 and 3)",
    # The worker only provides its group: nothing is sent or received here.
    launch=lambda request, worker: PendingSerialScan(request, worker.wire("serial_scan", request.reverse)),
    # The last rank forwards no state but broadcasts the carry, so it sends as much as the others.
    bytes_sent=lambda load, want_carry: float(load.state_bytes),
    seconds=_seconds,
    in_series=True,
    one_way=True,
)
