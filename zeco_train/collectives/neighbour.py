"""A scan in which a state reaches the next rank only: each rank's transition is 0, so that nothing is folded.

    rank p:  send S_p to p+1, at once;  receive R_p = S_{p−1} from p−1

It is for states such as the last inputs of a convolution, and not a general scan: `SCANS` does not list it. Transitions
are not read from the device: the request says that its own cuts (`ScanRequest.cuts`).

On the wire: each rank but the last sends one state of S bytes, in one message and one round, α + βS however many ranks
there are; `carry_out` adds a broadcast of S from the last rank.
"""

from __future__ import annotations

import torch

from zeco_train.collectives.cost_model import Costs, Load
from zeco_train.collectives.courier import Courier, PendingScan, ScanJob
from zeco_train.collectives.spec import ScanSpec
from zeco_train.collectives.wire import Transfer
from zeco_train.errors import ConfigError
from zeco_train.ops.seam import ScanRequest


def launch_neighbour(request: ScanRequest, courier: Courier) -> PendingScan:
    """Start the scan. The receive is posted before this returns; this rank's state is sent without its `wait`.

    Args:
        request: this rank's part. Over one rank its transition need not cut.
        courier: of the group and the request's direction.

    Raises:
        ConfigError: the transition is not known to cut: the shard has fewer tokens than the state has rows.
        ValueError: this process is not in the group.
        CommunicationError: an earlier scan of the courier failed, or a peer is gone.
    """
    if courier.size > 1 and not request.cuts:
        rows = request.state.shape[2]
        allowed = f"fewer than {rows} tokens a rank, and a state of {rows} must not reach past the neighbour"
        raise ConfigError("sp.size", courier.size, f"{allowed}: share the sequence between fewer ranks")
    return courier.launch(_Neighbour(request, courier.take_tags(1)[0]))


class _Neighbour(ScanJob):
    """One message to the next rank.

    Args:
        request: this rank's part.
        tag: of the message.
    """

    operation = "neighbour_scan"

    def __init__(self, request: ScanRequest, tag: int) -> None:
        super().__init__(request)
        self._tag = tag
        self._receive: Transfer | None = None

    def post(self) -> None:
        """Post the receive; the first rank knows its incoming state."""
        request, wire = self.request, self.wire
        if wire.is_first:
            self._incoming = request.first_incoming()
            self.scan.incoming.deliver(self._incoming)
        else:
            self._incoming = torch.empty_like(request.state, memory_format=torch.contiguous_format)
            self._receive = wire.receive(self._incoming, wire.position - 1, self._tag, "the state")

    def run(self) -> None:
        """Send, then wait for the other rank's message."""
        wire, scan, state = self.wire, self.scan, self.request.state.contiguous()
        send = None if wire.is_last else wire.send(state, wire.position + 1, self._tag, "the state")
        if self._receive is not None:
            self._receive.wait()
            scan.incoming.deliver(self._incoming)
        if send is not None:
            send.wait()
        if scan.carry is not None:
            # The last rank's transition cuts as well: its state is the carry.
            carry = state if wire.is_last else torch.empty_like(state)
            wire.broadcast(carry, wire.size - 1, "carry_out").wait()
            scan.carry.deliver(carry)


def _seconds(costs: Costs, load: Load, blocks: int | None) -> float:
    hop = costs.farthest(load.nodes)
    return hop.message + hop.byte * load.state_bytes


NEIGHBOUR = ScanSpec(
    name="neighbour",
    description="every rank sends its state to the next one, which needs no other",
    launch=launch_neighbour,
    # The last rank forwards no state but broadcasts the carry, so it sends as much as the others.
    bytes_sent=lambda load, want_carry: float(load.state_bytes),
    seconds=_seconds,
    automatic=False,
)
