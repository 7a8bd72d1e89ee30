"""All-Scan `lane`, over nodes: each rank scans one slice over the nodes, on its own network card.

With N nodes of L ranks, local rank j of every node owns slice j of all states (`slices.py`):

    1. inside a node, all to all:   rank p → local rank j:  slice j of S_p, and the transitions of its heads
       local rank j composes the node's pairs of its slice, in scan order
    2. between nodes, ⌈log₂ N⌉ rounds (`doubling.py`) between equal local ranks:  R of slice j before the node
    3. inside a node, all to all:   local rank j → rank p:  slice j of R_p

It works for any N and L; a single node has no step 2, one rank a node no steps 1 and 3. All nodes have as many ranks.
All receives are posted at launch. The first rank in scan order folds `carry_in` into its state and keeps it as its own
incoming state, so no other rank's `carry_in` is read; `carry_out` is a broadcast of S from the last rank.

On the wire, per rank: (L − 1)/L of 2 S and the slices' transitions inside the node, and at most ⌈log₂ N⌉ S/L and the
slice's transitions beyond it. With α', α'' and β' of the exchange inside, α and β of messages between nodes, and A
bytes of transitions with a slice,

    T = 2α' + (L − 1)(2α'' + β'(2S/L + A)) + ⌈log₂ N⌉ (α + β(S/L + A)) − βA
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.collectives.cost_model import Costs, Load
from zeco_train.collectives.doubling import Format, Pair, Rounds, count_rounds, seconds_of_rounds, sent_in_rounds
from zeco_train.collectives.slices import Slices, slice_bytes
from zeco_train.collectives.topology import Topology
from zeco_train.collectives.wire import Message
from zeco_train.collectives.worker import ScanJob, ScanSpec, ScanWorker
from zeco_train.errors import ConfigError
from zeco_train.ops.seam import LaunchedScan, ScanRequest, compose, fold

# Tags of the two exchanges, before those of the rounds.
_EXCHANGES = 2


def launch_lane(request: ScanRequest, worker: ScanWorker) -> LaunchedScan:
    """Start the scan. All receives are posted before this returns; it progresses without this rank's `wait`."""
    topology = worker.topology
    if (problem := _problem(topology)) is not None:
        raise ConfigError("sp.all_scan.algorithm", "lane", problem)
    tags = worker.take_tags(_EXCHANGES + count_rounds(topology.nodes))
    return worker.launch(_LaneScan(request, topology.ranks_per_node, tags))


class _LaneScan(ScanJob):
    operation = "all_scan_lane"

    def __init__(self, request: ScanRequest, per_node: int, tags: range) -> None:
        super().__init__(request)
        self._per_node, self._tags = per_node, tags
        _, heads, _, value_dim = request.state.shape
        self._slices = Slices(heads, value_dim, per_node)

    def post(self) -> None:
        request, wire = self.request, self.wire
        # The owner of a slice: the rank at that place of the node, in scan order.
        self._own, first = wire.position % self._per_node, wire.position // self._per_node * self._per_node
        # Each rank starts with the next one, so that no rank is the first target of all.
        others = [(self._own + distance) % self._per_node for distance in range(1, self._per_node)]
        mates = [(place, first + place) for place in others]
        message = self._slices.pack(self.own_state(), request.transition)
        self._pairs = torch.empty_like(message)
        # Not by `message`, whose own slice is read only: a received one is written here.
        self._pairs[self._own] = message[self._own]
        self._returned = message.new_empty((*message.shape[:2], self._slices.width, message.shape[3]))
        gathering, self._returning = (
            wire.post_receives([Message(into[place], position, what) for place, position in mates], tag)
            for into, what, tag in zip(
                (self._pairs, self._returned), ("slices", "results"), self._tags[:_EXCHANGES], strict=True
            )
        )
        self._mates = mates
        self._rounds = Rounds(wire, self._per_node, self._format(message))
        self._rounds.post(self._tags[_EXCHANGES:])
        self._arriving, self._sends = gathering.start(
            [Message(message[place], position, "slices") for place, position in mates]
        )

    def run(self) -> None:
        for transfer in self._arriving:
            transfer.wait()
        before: list[Tensor] = []
        self._sends += self._rounds.run(self._compose(), before.append)
        # Not before the rounds' last sends, for which other nodes wait, while `_return` waits for this one.
        self._return(before[0] if before else None)
        # The rest is for other ranks: this rank's own `wait` is already satisfied.
        for send in self._sends:
            send.wait()
        self.broadcast_carry()

    def _compose(self) -> tuple[Tensor, Tensor]:
        # The node's pair of this rank's slice; keeps the pairs before each of its ranks, None before the first.
        running: tuple[Tensor, Tensor] | None = None
        self._prefixes: list[tuple[Tensor, Tensor] | None] = []
        for message in self._pairs:
            self._prefixes.append(running)
            pair = self._slices.unpack(message, self._own, self.request.transition)
            running = pair if running is None else compose(pair, running)
        assert running is not None
        return running

    def _return(self, before: Tensor | None) -> None:
        # Send the results to the ranks of this node and set this rank's. `before`: its slice of the state before the
        # node, [B, rows, K, C]; None: zeros.
        results = [self._result(prefix, before) for prefix in self._prefixes]
        arriving, sends = self._returning.start(
            [Message(results[place], position, "results") for place, position in self._mates]
        )
        self._sends.extend(sends)
        for transfer in arriving:
            transfer.wait()
        if not self.wire.is_first:
            # Not written into the buffer, which may have been allocated in inference mode.
            parts = [*self._returned]
            parts[self._own] = results[self._own]
            self.scan.incoming.set_result(self._slices.whole(torch.stack(parts)))

    def _result(self, prefix: tuple[Tensor, Tensor] | None, before: Tensor | None) -> Tensor:
        # The state of this rank's slice before a rank of the node, [B, w, K], contiguous.
        if prefix is None and before is None:
            return torch.zeros_like(self._returned[self._own])
        state = before if prefix is None else prefix[0] if before is None else fold(*prefix, before)
        assert state is not None
        return self._slices.as_columns(state, self._own).contiguous()

    def _format(self, message: Tensor) -> Format:
        # Messages of a slice's columns [B, w, K], or with the transitions of its heads, as in `Slices.pack`.
        slices, own, like = self._slices, self._own, self.request.transition

        def pack(state: Tensor, transition: Tensor | None) -> Tensor:
            columns = slices.as_columns(state, own) if transition is None else slices.repack(state, transition, own)
            return columns.contiguous()

        def unpack(received: Tensor) -> Pair:
            if received.shape[1] == slices.width:
                return slices.as_heads(received, own), None
            return slices.unpack(received, own, like)

        _, batch, with_transition, key_dim = message.shape
        return Format(
            pack, unpack, lambda both: message.new_empty((batch, with_transition if both else slices.width, key_dim))
        )


def _problem(topology: Topology) -> str | None:
    if topology.is_even:
        return None
    return f"needs as many ranks on every node, not {topology}; or take auto, or sp.all_scan.ranks_per_node"


def _bytes_sent(load: Load, want_carry: bool) -> float:
    # The busiest rank is one of the first nodes, or the last rank, which broadcasts the carry.
    columns, transitions = slice_bytes(load, load.per_node)
    inside = (load.per_node - 1) * (2 * columns + transitions)
    beyond = max(sent_in_rounds(node, load.nodes, columns, transitions) for node in range(load.nodes))
    return float(inside + max(beyond, load.state_bytes if want_carry else 0))


def _seconds(costs: Costs, load: Load, blocks: int | None) -> float:
    columns, transitions = slice_bytes(load, load.per_node)
    mates = load.per_node - 1
    inside = 0.0
    if mates:
        inside = 2 * (costs.exchange + mates * costs.exchange_peer)
        inside += mates * costs.exchange_byte * (2 * columns + transitions)
    return inside + seconds_of_rounds(costs.farthest(load.nodes), load.nodes, columns, transitions)


LANE = ScanSpec(
    name="lane",
    description="every rank scans a slice over nodes, in ⌈log₂ nodes⌉ rounds, between two exchanges inside its node",
    launch=launch_lane,
    bytes_sent=_bytes_sent,
    seconds=_seconds,
    # Slices sent and received, their prefixes, and results sent and received.
    held_states=lambda ranks: 5,
    problem=_problem,
    measured=False,
    line=(0, (5, 1, 1, 1, 1, 1)),
)
