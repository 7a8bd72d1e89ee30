"""All-Scan `doubling`: in round r every rank sends what it knows 2^r ranks on (Hillis & Steele, 1986).

With d = 2^r, before round r a place knows the combined pair of the d − 1 places right before it; it composes its own
pair with that, and sends the result d places on:

    round r, place p:  send (S_p, A_p) ∘ before_p to p + d;  before_p ← before_p ∘ (what came from p − d)

After the last round `before_p` reaches back to the first place, and its state is R_p, for any number of places, without
inverse or subtraction. A pair that reaches back to the first place is sent without its transition, which is no longer
needed. All receives are posted at launch: one posted in its round would have to wait for the sender to match it. `lane`
takes the same `Rounds`, with nodes as places.

The first rank folds `carry_in` into its state, so no other rank's is read; `carry_out` is a broadcast of S from the
last one. On the wire, per rank: at most ⌈log₂ P⌉ messages of a state and a transition. Rounds: ⌈log₂ P⌉. With A bytes
of a transition, which the last round's messages do not have,

    T = ⌈log₂ P⌉ (α + β(S + A)) − βA        for a P that is a power of two, and at most that for any other

Over nodes the last rank of a node sends beyond it in every round, so α and β are those between nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zeco_train.collectives.cost_model import Costs, Load
from zeco_train.collectives.wire import Transfer, Wire
from zeco_train.collectives.worker import ScanJob, ScanSpec
from zeco_train.ops.seam import ScanRequest, as_columns, compose, fold, from_columns

# A state and its transition; None once the pair reaches back to the first place.
Pair = tuple[Tensor, Tensor | None]


def count_rounds(places: int) -> int:
    """⌈log₂ places⌉."""
    return (places - 1).bit_length()


@dataclass(frozen=True)
class Format:
    """Messages of a pair."""

    pack: Callable[[Tensor, Tensor | None], Tensor]  # (state, transition or None) → contiguous message
    unpack: Callable[[Tensor], Pair]  # inverse of `pack`
    empty: Callable[[bool], Tensor]  # a buffer for a message, given whether it has a transition


@dataclass(frozen=True)
class _Round:
    # One round at this place: the distance of its messages, and its receive, if there is one.
    name: str
    tag: int
    distance: int
    receive: Transfer | None
    received: Tensor | None


class Rounds:
    """The rounds of this rank over the places p, p ± stride, …: all ranks, or equal local ranks of nodes."""

    def __init__(self, wire: Wire, stride: int, format: Format) -> None:
        self._wire, self._stride, self._format = wire, stride, format
        self._place, self._places = wire.position // stride, wire.size // stride

    def post(self, tags: range) -> None:
        """Post the receives of all rounds, with one tag each."""
        self._rounds: list[_Round] = []
        for number, tag in enumerate(tags):
            name, distance = f"round {number}", 1 << number
            source, receive, received = self._place - distance, None, None
            if source >= 0:
                # The sender's pair covers `distance` places up to itself; if the first is one, it has no transition.
                received = self._format.empty(distance <= source)
                receive = self._wire.receive(received, self._wire.position - distance * self._stride, tag, name)
            self._rounds.append(_Round(name, tag, distance, receive, received))

    def run(self, own: tuple[Tensor, Tensor], set_result: Callable[[Tensor], None]) -> list[Transfer]:
        """Compose and send, round by round; returns sends under way, for places after this one.

        `own` is this place's pair, of the first place with `carry_in`. `set_result` gets the state before this place as
        soon as it is known; not at the first place.
        """
        before: Pair | None = None
        sends: list[Transfer] = []
        for step in self._rounds:
            if self._place + step.distance < self._places:
                state, transition = own if before is None else _join(own, before)
                # The first place's own pair already reaches back to the first place.
                message = self._format.pack(state, None if self._place == 0 else transition)
                target = self._wire.position + step.distance * self._stride
                sends.append(self._wire.send(message, target, step.tag, step.name))
            if step.receive is not None:
                step.receive.wait()
                assert step.received is not None
                arrived = self._format.unpack(step.received)
                before = arrived if before is None else _join(before, arrived)
                if before[1] is None:
                    set_result(before[0])
        return sends


def _join(later: Pair, earlier: Pair) -> Pair:
    (state, transition), (earlier_state, earlier_transition) = later, earlier
    assert transition is not None
    if earlier_transition is None:
        return fold(state, transition, earlier_state), None
    return compose((state, transition), (earlier_state, earlier_transition))


def sent_in_rounds(place: int, places: int, state: float, transition: float) -> float:
    """Bytes that a place sends, for a state and a transition of these sizes."""
    distances = [1 << number for number in range(count_rounds(places)) if place + (1 << number) < places]
    return sum(state + (transition if distance <= place else 0) for distance in distances)


def seconds_of_rounds(hop: Costs, places: int, state: float, transition: float) -> float:
    """Time of all rounds, for a state and a transition of these sizes in bytes: about ⌈log₂ places⌉ (α + β state).

    The last place that sends in round r is places − 1 − 2^r, after its messages of the rounds before; as in
    `sent_in_rounds`, those of distances up to its own number have a transition.
    """
    ends = [0.0]
    for number in range(count_rounds(places)):
        with_transition = min(number + 1, (places - 1 - (1 << number)).bit_length())
        ends.append((number + 1) * (hop.message + hop.byte * state) + with_transition * hop.byte * transition)
    return max(ends)


class _Doubling(ScanJob):
    operation = "all_scan_doubling"

    def __init__(self, request: ScanRequest, tags: range) -> None:
        super().__init__(request)
        self._tags = tags

    def post(self) -> None:
        self._own = self.own_state(), self.request.transition
        self._rounds = Rounds(self.wire, 1, _format(self.request))
        self._rounds.post(self._tags)

    def run(self) -> None:
        sends = self._rounds.run(self._own, self.scan.incoming.set_result)
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
    measured=False,
    line="--",
)
