"""Question: do scans over 1,024 ranks send the messages and bytes, and take the time, of their cost formulas?
Command: python -m lab.virtual_ranks [SCAN …] [--nodes 32]
Date: 2026-11-27, 2 CPU cores
Answer: yes, to 1e-9, over 32 nodes of 8 ranks, and but for two_shot, which was not run there, over 128 nodes.

All ranks are of one process, over a network with a virtual clock; the project's scans are unchanged.
A rank's scan runs on its worker's thread, as on CPUs, but one rank runs at a time; only its wire differs. A message
carries the time of its arrival, and a rank's clock is the latest arrival that it has waited for. So times are exact and
the same in every run, however fast this machine is. They depend on number, order, size and targets of the messages
alone: computing takes no time.

    message      occupies its sender for α + βn, then it has arrived
    exchange     occupies its sender for α'' + β'n a message, one after another; each arrives α' later
    all-gather   a ring; each step occupies its sender for α'' + β'n
"""

from __future__ import annotations

import argparse
import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.turns import Turns
from zeco_train.collectives import ScanWorker
from zeco_train.collectives.cost_model import Costs, Link, Load
from zeco_train.collectives.doubling import count_rounds
from zeco_train.collectives.scan_registry import SCANS
from zeco_train.collectives.topology import Topology
from zeco_train.collectives.wire import Message, Wire
from zeco_train.collectives.worker import ScanJob, ScanSpec
from zeco_train.ops.seam import LaunchedScan, ScanRequest, fold

TIMEOUT = timedelta(seconds=600)


class Network:
    """Links, clocks (virtual seconds), messages and bytes of all ranks on even nodes."""

    def __init__(self, topology: Topology, costs: Costs) -> None:
        self.topology, self.costs, self.turns = topology, costs, Turns()
        self.clocks = [0.0] * topology.ranks
        self.messages, self.bytes = Counter[int](), Counter[int]()
        self._ports = [0.0] * topology.ranks
        self._boxes: defaultdict[Any, _Box] = defaultdict(_Box)
        self._meetings: dict[Any, _Meeting] = {}

    def hop(self, source: int, target: int) -> Costs:
        """The costs of a message between two ranks."""
        per_node = self.topology.ranks_per_node
        return self.costs.farthest(1 if source // per_node == target // per_node else 2)

    def post(self, tensor: Tensor, source: int, target: int, tag: Any, occupied: float, latency: float = 0.0) -> None:
        """Send a message."""
        assert tensor.is_contiguous()
        self._ports[source] = max(self.clocks[source], self._ports[source]) + occupied
        self.messages[source] += 1
        self.bytes[source] += tensor.nbytes
        box = self._boxes[source, target, tag]
        box.messages.append((self._ports[source] + latency, tensor.clone()))
        if box.reader is not None:
            self.turns.wake(box.reader)
            box.reader = None

    def take(self, into: Tensor, source: int, target: int, tag: Any) -> None:
        """Wait for a message; its length must be that of the buffer."""
        box = self._boxes[source, target, tag]
        if not box.messages:
            self.turns.wait(lambda turn: setattr(box, "reader", turn))
        assert box.messages, f"nobody sends rank {target} the message {tag} from rank {source}"
        arrival, tensor = box.messages.popleft()
        into.view(-1).copy_(tensor.view(-1))
        self.clocks[target] = max(self.clocks[target], arrival)

    def meet(self, key: Any, rank: int, tensor: Tensor, finish: Callable[[list[float], Tensor], Any]) -> _Meeting:
        """Join a collective: `finish` gets clocks and tensors of all ranks once the last one has come."""
        if key not in self._meetings:
            self._meetings[key] = _Meeting(self.topology.ranks, self.turns)
        meeting = self._meetings[key]
        meeting.join(rank, self.clocks[rank], tensor, finish)
        return meeting

    def undelivered(self) -> int:
        """Messages that nobody received."""
        return sum(len(box.messages) for box in self._boxes.values())


@dataclass
class _Box:
    """Messages of one tag between two ranks, and the turn of the receiver that waits for one."""

    messages: deque[tuple[float, Tensor]] = field(default_factory=deque)
    reader: threading.Lock | None = None


class _Meeting:
    """A collective of all ranks."""

    def __init__(self, ranks: int, turns: Turns) -> None:
        self._clocks, self._tensors = [0.0] * ranks, [torch.empty(0)] * ranks
        self._missing, self._turns = ranks, turns
        self._readers: list[threading.Lock] = []
        self._result: Any = None

    def join(self, rank: int, clock: float, tensor: Tensor, finish: Callable[[list[float], Tensor], Any]) -> None:
        self._clocks[rank], self._tensors[rank] = clock, tensor
        self._missing -= 1
        if self._missing == 0:
            self._result = finish(self._clocks, torch.stack(self._tensors))
            for reader in self._readers:
                self._turns.wake(reader)

    def get(self) -> Any:
        if self._missing:
            self._turns.wait(self._readers.append)
        assert not self._missing, "a rank did not come"
        return self._result


class _Transfer:
    """A transfer that completes in `wait`."""

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self.wait = wait


class VirtualWire(Wire):
    """A rank's wire over a `Network`."""

    def __init__(self, network: Network, rank: int, operation: str, reverse: bool) -> None:
        self.timeout, self.size, self.rank, self.reverse = TIMEOUT, network.topology.ranks, rank, reverse
        self.operation, self._network, self._calls = operation, network, 0
        self.position = self.group_rank(rank)

    def send(self, tensor: Tensor, position: int, tag: int, what: str) -> Any:
        peer = self.group_rank(position)
        hop = self._network.hop(self.rank, peer)
        self._network.post(tensor, self.rank, peer, tag, hop.message + hop.byte * tensor.nbytes)
        return _Transfer()

    def receive(self, into: Tensor, position: int, tag: int, what: str) -> Any:
        assert into.is_contiguous()
        peer = self.group_rank(position)
        return _Transfer(lambda: self._network.take(into, peer, self.rank, tag))

    def post_receives(self, received: Sequence[Message], tag: int) -> Any:
        return _VirtualExchange(self, self._network, received, tag)

    def broadcast(self, tensor: Tensor, position: int, what: str) -> Any:
        """Takes no time: scans with a carry are checked for their results only."""
        source = self.group_rank(position)
        meeting = self._network.meet(self._call("broadcast"), self.rank, tensor, lambda _, all_of: all_of[source])
        return _Transfer(lambda: tensor.copy_(meeting.get()))

    def all_to_all(self, into: Tensor, parts: Tensor, what: str, received: Any = None, sent: Any = None) -> Any:
        assert received is sent is None
        network, size, part = self._network, self.size, parts[0].nbytes
        self._count(parts, part)

        def finish(clocks: list[float], tensors: Tensor) -> tuple[Any, Tensor]:
            peers = (np.arange(size)[:, None] + np.arange(1, size)) % size
            hops = [[network.hop(rank, int(peer)) for peer in row] for rank, row in enumerate(peers)]
            occupied = np.array([[hop.exchange_peer + hop.exchange_byte * part for hop in row] for row in hops])
            latency = network.costs.farthest(network.topology.nodes).exchange
            arrivals = np.array(clocks)[:, None] + occupied.cumsum(1) + latency
            complete = np.zeros(size)
            np.maximum.at(complete, peers, arrivals)
            return complete, tensors

        meeting = network.meet(self._call("all to all"), self.rank, parts, finish)

        def wait() -> None:
            complete, tensors = meeting.get()
            into.copy_(tensors[:, self.rank])
            network.clocks[self.rank] = max(network.clocks[self.rank], complete[self.rank])

        return _Transfer(wait)

    def all_gather(self, into: Tensor, part: Tensor, what: str) -> Any:
        network, size = self._network, self.size
        self._count(into, part.nbytes)

        def finish(clocks: list[float], tensors: Tensor) -> tuple[Any, Tensor]:
            hops = [network.hop(rank, (rank + 1) % size) for rank in range(size)]
            occupied = np.array([hop.exchange_peer + hop.exchange_byte * part.nbytes for hop in hops])
            latest = np.array(clocks) + network.costs.farthest(network.topology.nodes).exchange
            port = latest.copy()
            for _ in range(size - 1):
                port = np.maximum(latest, port) + occupied
                latest = np.roll(port, 1)
            return latest, tensors

        meeting = network.meet(self._call("all gather"), self.rank, part, finish)

        def wait() -> None:
            complete, tensors = meeting.get()
            into.copy_(tensors)
            network.clocks[self.rank] = max(network.clocks[self.rank], complete[self.rank])

        return _Transfer(wait)

    def _count(self, parts: Tensor, part: int) -> None:
        self._network.messages[self.rank] += self.size - 1
        self._network.bytes[self.rank] += (self.size - 1) * part

    def _call(self, name: str) -> tuple[Any, ...]:
        self._calls += 1
        return self.operation, self.reverse, name, self._calls


class _VirtualExchange:
    def __init__(self, wire: VirtualWire, network: Network, received: Sequence[Message], tag: int) -> None:
        self._wire, self._network, self._tag = wire, network, tag
        self._arriving = [wire.receive(*message[:2], tag, message.what) for message in received]

    def start(self, sent: Sequence[Message]) -> tuple[list[Any], list[Any]]:
        for tensor, position, _ in sent:
            peer = self._wire.group_rank(position)
            hop = self._network.hop(self._wire.rank, peer)
            occupied = hop.exchange_peer + hop.exchange_byte * tensor.nbytes
            self._network.post(tensor, self._wire.rank, peer, self._tag, occupied, hop.exchange)
        return self._arriving, []


class VirtualCourier(ScanWorker):
    """A rank's worker over a `Network`; the group is never used."""

    def __init__(self, network: Network, rank: int) -> None:
        super().__init__(None, TIMEOUT, network.topology)  # type: ignore[arg-type]
        self._network, self._rank = network, rank

    @property
    def size(self) -> int:
        return self._network.topology.ranks

    @property
    def ends(self) -> tuple[bool, bool]:
        return self._rank == 0, self._rank == self.size - 1

    def wire(self, operation: str, reverse: bool) -> Wire:
        key = operation, reverse
        if key not in self._wires:
            self._wires[key] = VirtualWire(self._network, self._rank, operation, reverse)
        return self._wires[key]

    def launch(self, job: ScanJob) -> LaunchedScan:
        # A job of one rank never runs: there is nothing to communicate.
        if self.size > 1:
            job.run = self._network.turns.task(job.run)  # type: ignore[method-assign]
        return super().launch(job)


@dataclass(frozen=True)
class Outcome:
    """What all ranks of a scan have, by rank; and the network after it."""

    incoming: list[Tensor]
    carries: list[Tensor]
    network: Network

    @property
    def seconds(self) -> float:
        """Virtual time until the last rank has its state."""
        return max(self.network.clocks)


def run_virtual(
    scan: ScanSpec, requests: Sequence[ScanRequest], topology: Topology, costs: Costs, blocks: int | None = None
) -> Outcome:
    """Run a scan of the requests of all ranks, by rank."""
    network = Network(topology, costs)
    workers = [VirtualCourier(network, rank) for rank in range(topology.ranks)]
    launched: list[LaunchedScan] = [
        scan.over(worker, blocks)(request) for request, worker in zip(requests, workers, strict=True)
    ]
    reverse = requests[0].reverse
    network.turns.rest()
    incoming: dict[int, Tensor] = {}
    # In scan order, as a serial scan needs.
    for rank in reversed(range(topology.ranks)) if reverse else range(topology.ranks):
        incoming[rank] = launched[rank].wait()
        launched[rank].finish()
    carries = [one.carry_out() for one in launched] if requests[0].want_carry else []
    for worker in workers:
        worker.drain()
    assert not network.undelivered(), "messages that nobody received"
    return Outcome([incoming[rank] for rank in range(topology.ranks)], carries, network)


# [B, H, K, V]: S is 512 bytes in fp64, so that β of about 10⁻⁸ makes a message's latency and its length alike.
SHAPE = (1, 4, 2, 8)
COSTS = Costs(
    Link.nccl_across_nodes,
    *(5.8e-6, 3e-9, 6e-6, 5e-7, 3e-9),
    between=Costs(Link.nccl_across_nodes, 1.2e-5, 2e-8, 2e-5, 2e-6, 2e-8),
)
BLOCKS = 4


def run_checked(
    name: str, topology: Topology, *, reverse: bool = False, matrices: bool = False
) -> tuple[Outcome, Load]:
    """Run a scan of random pairs; AssertionError: a rank's result is not that of the recurrence in fp64."""
    generator = torch.Generator().manual_seed(topology.ranks)
    states = torch.randn(topology.ranks, *SHAPE, generator=generator, dtype=torch.float64)
    transitions = -torch.rand(topology.ranks, *SHAPE[:3], generator=generator, dtype=torch.float64)
    if matrices:
        transitions = torch.randn(*transitions.shape, SHAPE[2], generator=generator, dtype=torch.float64) / 3
    requests = [ScanRequest(*pair, reverse) for pair in zip(states, transitions, strict=True)]
    found = run_virtual(SCANS[name], requests, topology, COSTS, BLOCKS if SCANS[name].best_blocks else None)
    expected: Tensor = torch.zeros(SHAPE, dtype=torch.float64)
    for rank in reversed(range(topology.ranks)) if reverse else range(topology.ranks):
        # A state's sum of decaying terms stays below 20, of which 1,024 folds keep 12 digits.
        torch.testing.assert_close(found.incoming[rank], expected, rtol=0, atol=1e-11, msg=f"{name}, rank {rank}")
        expected = fold(states[rank], transitions[rank], expected)
    return found, Load(topology.ranks, SHAPE, 8, matrices, topology.nodes)


def most_messages(name: str, load: Load) -> int:
    """Messages of the rank that sends most."""
    mates = load.per_node - 1
    return {
        "serial": 1,
        "all_gather": load.ranks - 1,
        "chain": BLOCKS,
        "two_shot": 2 * (load.ranks - 1),
        "doubling": count_rounds(load.ranks),
        "lane": 2 * mates + count_rounds(load.nodes),
    }[name]


def compare(name: str, topology: Topology, *, reverse: bool = False) -> None:
    """Results, messages, bytes and time of a scan beside its formulas; AssertionError: they differ."""
    found, load = run_checked(name, topology, reverse=reverse)
    seconds = SCANS[name].seconds(COSTS, load, BLOCKS if SCANS[name].best_blocks else None)
    case = f"{name} over {topology}"
    assert math.isclose(found.seconds, seconds, rel_tol=1e-9), f"{case}: {found.seconds} s, by the formula {seconds}"
    assert max(found.network.messages.values()) == most_messages(name, load), case
    assert max(found.network.bytes.values()) == SCANS[name].bytes_sent(load, False), case


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scans", nargs="*", default=[], choices=[*SCANS, []], metavar="SCAN")
    parser.add_argument("--nodes", type=int, nargs="+", default=[32])
    options = parser.parse_args()
    for name in options.scans or SCANS:
        for nodes in options.nodes:
            compare(name, Topology((8,) * nodes))
            print(f"{name}: as modelled over {nodes} nodes of 8 ranks", flush=True)


if __name__ == "__main__":
    main()
