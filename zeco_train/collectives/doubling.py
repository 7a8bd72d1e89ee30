"""All-Scan `doubling`: the rounds of `rounds.py` over all ranks.

The first rank folds `carry_in` into its state, so no other rank's is read; `carry_out` is a broadcast of S from the
last one. On the wire, per rank: at most ⌈log₂ P⌉ messages of a state and a transition. Rounds: ⌈log₂ P⌉. With A bytes
of a transition, which the last round's messages do not have,

    T = ⌈log₂ P⌉ (α + β(S + A)) − βA        for a P that is a power of two, and at most that for any other

Over nodes the last rank of a node sends beyond it in every round, so α and β are those between nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.collectives.cost_model import Costs, Load
from zeco_train.collectives.rounds import Format, Pair, Rounds, count_rounds, seconds_of_rounds, sent_in_rounds
from zeco_train.collectives.spec import ScanSpec
from zeco_train.collectives.worker import ScanJob
from zeco_train.ops.seam import ScanRequest, as_columns, fold, from_columns


class _Doubling(ScanJob):
    operation = "all_scan_doubling"

    def __init__(self, request: ScanRequest, tags: range) -> None:
        super().__init__(request)
        self._tags = tags

    def post(self) -> None:
        if self.wire.is_first:
            self.scan.incoming.set_result(self.request.first_incoming())
        self._rounds = Rounds(self.wire, 1, _format(self.request), "round")
        self._rounds.post(self._tags)

    def run(self) -> None:
        request, wire, scan = self.request, self.wire, self.scan
        own = request.state, request.transition
        if wire.is_first and request.carry_in is not None:
            own = fold(*own, request.carry_in), request.transition
        sends = self._rounds.run(own, scan.incoming.set_result)
        # The rest is for this rank's successors: its own `wait` is already satisfied.
        for send in sends:
            send.wait()
        self.broadcast_carry()


def _format(request: ScanRequest) -> Format:
    # Messages [B, H, K, V], or with a transition [B, H, K, V + 1], with matrices [B, H, K, V + K].
    state, width = request.state, request.state.shape[-1]
    columns = as_columns(request.transition).shape[-1]

    def pack(state: Tensor, transition: Tensor | None) -> Tensor:
        return state.contiguous() if transition is None else torch.cat((state, as_columns(transition)), dim=-1)

    def unpack(message: Tensor) -> Pair:
        if message.shape[-1] == width:
            return message, None
        state, rest = message.split((width, columns), dim=-1)
        return state, from_columns(rest, request.transition)

    return Format(pack, unpack, lambda both: state.new_empty((*state.shape[:-1], width + columns * both)))


def _bytes_sent(load: Load, want_carry: bool) -> float:
    # The last rank sends only the carry, which is no larger than the first rank's first message.
    return float(
        max(sent_in_rounds(place, load.ranks, load.state_bytes, load.transition_bytes) for place in range(load.ranks))
    )


def _seconds(costs: Costs, load: Load, blocks: int | None) -> float:
    return seconds_of_rounds(costs.farthest(load.nodes), load.ranks, load.state_bytes, load.transition_bytes)


DOUBLING = ScanSpec(
    name="doubling",
    description="in round r every rank sends what it knows 2^r ranks on: ⌈log₂ P⌉ rounds of states and transitions",
    launch=lambda request, worker: worker.launch(_Doubling(request, worker.take_tags(count_rounds(worker.size)))),
    bytes_sent=_bytes_sent,
    seconds=_seconds,
    held_states=count_rounds,
    # Its cost is modelled, not measured.
    automatic=False,
    line="--",
)
