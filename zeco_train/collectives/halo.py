"""A scan in which a state as a rule reaches the next rank only, since most ranks' transitions are 0.

    rank p:  send S_p to p+1, at once;  receive R_p from p−1
             or, if its transition is not known to be 0:  receive R_p, then send A_p R_p + S_p

It is for states such as the last inputs of a convolution, and not a general scan: `SCANS` does not list it. A rank with
fewer tokens than the state has rows passes on some rows of the rank before. Each rank decides for itself, from
`ScanRequest.cuts`: the messages are the same either way, so ranks need not know each other's tokens.

On the wire: each rank but the last sends one state of S bytes, in one message. One round, α + βS however many ranks
there are, and one more for each such rank in a row; `carry_out` adds a broadcast of S from the last rank. In symmetric
memory `chain`'s kernel runs, in one round as well; with a `carry_out` in P − 1 hops, as `chain`.
"""

from __future__ import annotations

import torch

from zeco_train.collectives.cost_model import Costs, Load
from zeco_train.collectives.one_kernel import CHAIN_KERNEL
from zeco_train.collectives.wire import Transfer
from zeco_train.collectives.worker import ScanJob, ScanSpec
from zeco_train.ops.seam import ScanRequest, fold


class _Halo(ScanJob):
    operation = "halo_scan"

    def __init__(self, request: ScanRequest, tag: int) -> None:
        super().__init__(request)
        self._tag = tag
        self._receive: Transfer | None = None

    def post(self) -> None:
        request, wire = self.request, self.wire
        if wire.is_first:
            self._incoming = request.first_incoming()
            self.scan.incoming.set_result(self._incoming)
        else:
            self._incoming = torch.empty_like(request.state, memory_format=torch.contiguous_format)
            self._receive = wire.receive(self._incoming, wire.position - 1, self._tag, "the state")

    def run(self) -> None:
        request, wire, scan, state = self.request, self.wire, self.scan, self.request.state
        if not request.cuts:
            self._take()
            state = fold(state, request.transition, self._incoming)
        state = state.contiguous()
        send = None if wire.is_last else wire.send(state, wire.position + 1, self._tag, "the state")
        self._take()
        if send is not None:
            send.wait()
        if scan.carry is not None:
            carry = state if wire.is_last else torch.empty_like(state)
            wire.broadcast(carry, wire.size - 1, "carry_out").wait()
            scan.carry.set_result(carry)

    def _take(self) -> None:
        # Wait for the other rank's message, once.
        if self._receive is not None:
            self._receive.wait()
            self._receive = None
            self.scan.incoming.set_result(self._incoming)


def _seconds(costs: Costs, load: Load, blocks: int | None) -> float:
    hop = costs.farthest(load.nodes)
    return hop.start + hop.message + hop.byte * load.state_bytes


HALO = ScanSpec(
    name="halo",
    description="every rank sends its state to the next one, which needs no other",
    launch=lambda request, worker: worker.launch(_Halo(request, worker.take_tags(1)[0])),
    bytes_sent=lambda load, want_carry: float(load.state_bytes),
    seconds=_seconds,
    kernel=CHAIN_KERNEL,
    measured=False,
)
