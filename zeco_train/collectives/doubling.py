"""All-Scan `doubling`: round r doubles the span to 2^r ranks (Hillis & Steele, 1986, as an exclusive scan).

With d = 2^r, before round r a rank knows the combined pair of the d − 1 ranks right before it; it composes its own pair
with that, and sends the result d ranks on:

    round r, rank p:  send (S_p, A_p) ∘ before_p to p + d;  before_p ← before_p ∘ (what came from p − d)

After the last round `before_p` reaches back to the first rank, and its state is R_p, for any P, without inverse or
subtraction. A pair that reaches back to the first rank is sent without its transition, which is no longer needed. The
first rank folds `carry_in` into its state, so no other rank's is read; `carry_out` is a broadcast of S from the last
one.

On the wire, per rank: at most ⌈log₂ P⌉ messages of a state and a transition. All receives are posted at launch: a
receive posted in its round would have to wait for the sender to match it. Rounds: ⌈log₂ P⌉. With A bytes of a
transition,

    T = ⌈log₂ P⌉ (α + β(S + A))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeco_train.collectives.cost_model import Costs, Load
from zeco_train.collectives.courier import ScanJob
from zeco_train.collectives.spec import ScanSpec
from zeco_train.collectives.wire import Transfer
from zeco_train.ops.seam import ScanRequest
from zeco_train.ops.transition import as_columns, compose, fold, from_columns

# A state and its transition; None once the pair reaches back to the first rank.
Pair = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class _Round:
    """One round on this rank: the distance of its messages in ranks, and its receive, if there is one."""

    name: str
    tag: int
    distance: int
    receive: Transfer | None
    received: Tensor


def _rounds(ranks: int) -> int:
    """⌈log₂ P⌉."""
    return (ranks - 1).bit_length()


class _Doubling(ScanJob):
    """A scan by rounds. All receives are posted at launch; the rounds progress without this rank's `wait`.

    Args:
        request: this rank's part.
        tags: message tags, one per round.
    """

    operation = "all_scan_doubling"

    def __init__(self, request: ScanRequest, tags: range) -> None:
        super().__init__(request)
        self._tags = tags

    def post(self) -> None:
        """Post the receives of all rounds."""
        wire, state = self.wire, self.request.state
        if wire.is_first:
            self.scan.incoming.deliver(self.request.first_incoming())
        width, columns = state.shape[-1], as_columns(self.request.transition).shape[-1]
        self._rounds: list[_Round] = []
        for number, tag in enumerate(self._tags):
            name, distance = f"round {number}", 1 << number
            source, received, receive = wire.position - distance, state.new_empty(0), None
            if source >= 0:
                # The sender's pair covers `distance` ranks up to itself; if the first is one, it has no transition.
                received = state.new_empty((*state.shape[:-1], width if distance > source else width + columns))
                receive = wire.receive(received, source, tag, name)
            self._rounds.append(_Round(name, tag, distance, receive, received))

    def run(self) -> None:
        """Compose and send, round by round."""
        request, wire, scan = self.request, self.wire, self.scan
        own = request.state, request.transition
        if wire.is_first and request.carry_in is not None:
            own = fold(*own, request.carry_in), request.transition
        before: Pair | None = None
        sends: list[Transfer] = []
        for step in self._rounds:
            if (target := wire.position + step.distance) < wire.size:
                state, transition = own if before is None else _join(own, before)
                # The first rank's own pair already reaches back to the first rank: no receiver reads its transition.
                if transition is None or wire.is_first:
                    message = state.contiguous()
                else:
                    message = torch.cat((state, as_columns(transition)), dim=-1)
                sends.append(wire.send(message, target, step.tag, step.name))
            if step.receive is not None:
                step.receive.wait()
                heard = _unpack(step.received, request)
                before = heard if before is None else _join(before, heard)
                if before[1] is None:
                    scan.incoming.deliver(before[0])
        # The rest is for this rank's successors: its own `wait` is already satisfied.
        for send in sends:
            send.wait()
        if scan.carry is not None:
            # Only the last rank has the carry; the others provide the broadcast's buffer.
            last = wire.is_last and before is not None
            carry = _join(own, before)[0].contiguous() if last and before else torch.empty_like(request.state)
            wire.broadcast(carry, wire.size - 1, "carry_out").wait()
            scan.carry.deliver(carry)


def _unpack(message: Tensor, request: ScanRequest) -> Pair:
    """Unpack a received message into a pair."""
    width = request.state.shape[-1]
    if message.shape[-1] == width:
        return message, None
    state, columns = message.split((width, message.shape[-1] - width), dim=-1)
    return state, from_columns(columns, request.transition)


def _join(later: Pair, earlier: Pair) -> Pair:
    """Compose the pairs of neighbouring ranks; `later` does not reach back to the first rank."""
    (state, transition), (earlier_state, earlier_transition) = later, earlier
    assert transition is not None
    if earlier_transition is None:
        return fold(state, transition, earlier_state), None
    return compose((state, transition), (earlier_state, earlier_transition))


def _bytes_sent(load: Load, want_carry: bool) -> float:
    """Bytes sent by the busiest rank.

    The last rank sends only the carry, which is no larger than the first rank's first message.
    """
    distances = [1 << number for number in range(_rounds(load.ranks))]

    def sent(position: int) -> int:
        return sum(
            load.state_bytes + (load.transition_bytes if distance <= position else 0)
            for distance in distances
            if position + distance < load.ranks
        )

    return float(max(sent(position) for position in range(load.ranks)))


def _seconds(costs: Costs, load: Load, blocks: int | None) -> float:
    return _rounds(load.ranks) * (costs.message + costs.byte * (load.state_bytes + load.transition_bytes))


DOUBLING = ScanSpec(
    name="doubling",
    description="in round r every rank sends what it knows 2^r ranks on: ⌈log₂ P⌉ rounds of states and transitions",
    launch=lambda request, courier: courier.launch(_Doubling(request, courier.take_tags(_rounds(courier.size)))),
    bytes_sent=_bytes_sent,
    seconds=_seconds,
    held_states=_rounds,
    # Its cost is modelled, not measured.
    automatic=False,
    line="--",
)
