"""Question: is the one-kernel All-Scan's protocol correct in every order of steps, and is each of its rules needed?
Command: python -m lab.all_scan_protocol [--orders 25] [--scans 10000]
Date: 2026-11-27, 2 CPU cores
Answer: yes, in 60 random orders (--orders 60) of chain, of two_shot and of both in turn, with log-decays and with
    matrices, also if not all CTAs of a rank run at a time; without any one rule an order fails. If a rank stops
    anywhere, all others end, and what they read before they notice is right.

A model of the protocol of `zeco_train/kernels/all_scan/__init__.py`. Ranks run kernels one after another, a kernel's
CTAs in any order, and each load, store and signal of a cell is a step. Cells record which rank wrote which data in
which scan, so that any wrong load is detected. The model covers the order between ranks and CTAs; the order of a CTA's
threads is ensured by barriers and not modelled.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

AFTER_FAILURE = "send after a failure"
# Result of a CTA's step: None, or the condition that it waits for; then it is sent whether the wait was too long.
Step = Callable[[], bool] | None
Steps = Generator[Step, bool | None, None]


class ProtocolError(AssertionError):
    """A load found data of another scan, or unwritten data; or a deadlock."""


@dataclass(frozen=True)
class Call:
    """A scan as all ranks launch it. Tiles are `tile` cells each; `chain` calls them blocks.

    With matrices, each head has `group` tiles of rows, all of which a fold of `chain` reads; 1: with log-decays.
    `cuts`: ranks whose transition is 0, as a halo's: in `chain` they send at once, unless a carry is wanted.
    """

    algorithm: str
    tiles: int
    tile: int
    ctas: int
    carry: bool
    group: int = 1
    cuts: frozenset[int] = frozenset()

    def together(self, tile: int) -> range:
        """The tiles of this one's head."""
        head = tile // self.group * self.group
        return range(head, min(head + self.group, self.tiles))


@dataclass
class Memory:
    """One rank's arena of one algorithm, with its kernels' private words."""

    flags: dict[object, int] = field(default_factory=lambda: defaultdict(int))
    cells: dict[object, object] = field(default_factory=dict)
    epoch: int = 0
    arrived: int = 0
    taken: int = 0
    failed: bool = False


class Model:
    """The ranks and their kernels, with the same `calls` on every rank, faults (`mutations`), a seed of the order.

    `lost`: a rank, and after how many of its steps it stops. Waits are too long where nobody can go on.
    """

    CAPACITY = 64  # cells of a buffer

    def __init__(
        self,
        ranks: int,
        calls: Sequence[Call],
        mutations: tuple[str, ...],
        seed: int,
        lost: tuple[int, int] | None = None,
    ) -> None:
        self.ranks, self.calls, self.mutations, self.lost = ranks, calls, mutations, lost
        self.random = random.Random(seed)
        self.resident = self.random.choice((1, 2, 3))  # CTAs of a rank that run at a time
        self.memory = {(rank, name): Memory() for rank in range(ranks) for name in ("chain", "two_shot")}

    def run(self) -> None:
        """Step all ranks in a random order until they finish."""
        # Make some ranks much slower than others.
        speeds = [self.random.choice((1.0, 0.1, 0.01)) for _ in range(self.ranks)]
        queues, steps_left = [deque(self.calls) for _ in range(self.ranks)], [math.inf] * self.ranks
        if self.lost is not None:
            steps_left[self.lost[0]] = self.lost[1]
        # The unfinished CTAs of each rank's kernel, each with the condition that it waits for.
        running: list[list[tuple[Steps, Step]]] = [[] for _ in range(self.ranks)]
        while True:
            for rank, queue in enumerate(queues):
                if queue and not running[rank]:
                    running[rank] = [(steps, None) for steps in self.kernel(rank, queue.popleft())]
            if not any(ctas for ctas, left in zip(running, steps_left, strict=True) if left):
                return
            # The others start when one of these ends.
            resident = [
                (rank, cta)
                for rank, ctas in enumerate(running)
                for cta in range(min(self.resident, len(ctas)) if steps_left[rank] else 0)
            ]
            able = [(rank, cta) for rank, cta in resident if self._goes_on(running[rank][cta][1])]
            too_long = not able
            if too_long and self.lost is None:
                raise ProtocolError("nobody can go on")
            able = able or resident
            rank, cta = self.random.choices(able, [speeds[rank] for rank, _ in able])[0]
            steps, awaited = running[rank][cta]
            steps_left[rank] -= 1
            try:
                running[rank][cta] = steps, steps.send(None if awaited is None else too_long)
            except StopIteration:
                del running[rank][cta]

    @staticmethod
    def _goes_on(awaited: Step) -> bool:
        return awaited is None or awaited()

    def kernel(self, rank: int, call: Call) -> list[Steps]:
        body = self.chain if call.algorithm == "chain" else self.two_shot
        return [body(rank, call, cta) for cta in range(call.ctas)]

    # Operations of kernels.

    def epoch_of(self, memory: Memory) -> int:
        return memory.epoch + 1

    def advance(self, memory: Memory, epoch: int, call: Call) -> None:
        memory.arrived += 1
        if memory.arrived == call.ctas or "the first CTA advances the epoch" in self.mutations:
            memory.epoch = epoch
        if memory.arrived == call.ctas:
            memory.arrived = memory.taken = 0

    def turns(self, memory: Memory, epoch: int, count: int) -> Iterator[int]:
        """Numbers that this CTA takes, once all have started; none if some have not."""
        if memory.epoch == epoch or "wait before all have started" in self.mutations:
            while (turn := memory.taken) < count:
                memory.taken += 1
                yield turn

    def reached(self, memory: Memory, flag: object, epoch: int) -> Callable[[], bool]:
        if "wait for equality" in self.mutations:
            return lambda: memory.flags[flag] == epoch
        return lambda: memory.flags[flag] >= epoch

    def wait(self, own: Memory, failed: bool, condition: Callable[[], bool]) -> Generator[Step, bool | None, bool]:
        """Wait, unless this CTA has failed; returns whether it has now, which later kernels of the arena find, too."""
        if not failed and (yield condition):
            failed = own.failed = True
        return failed

    def sends(self, failed: bool) -> bool:
        return not failed or AFTER_FAILURE in self.mutations

    def store(self, memory: Memory, first: int, call: Call, part: str, value: object) -> Steps:
        for cell in range(call.tile):
            memory.cells[part, first + cell] = value
            yield None

    def load(self, memory: Memory, first: int, call: Call, part: str, value: object) -> Steps:
        for cell in range(call.tile):
            found = memory.cells.get((part, first + cell))
            if found != value:
                raise ProtocolError(f"{part} holds {found}, not {value}")
            yield None

    def start_of(self, epoch: int, call: Call, buffers: int = 1, buffer: int = 0) -> int:
        """The first cell of one of `buffers` buffers, double-buffered by the parity of the epoch."""
        size = call.tiles * call.tile if "layout from the shape" in self.mutations else self.CAPACITY
        half = 0 if "one buffer" in self.mutations else epoch % 2
        return (half * buffers + buffer) * size

    # The kernels, in statement order.

    def two_shot(self, rank: int, call: Call, cta: int) -> Steps:
        peers = [self.memory[p, "two_shot"] for p in range(self.ranks)]
        own = peers[rank]
        epoch, failed = self.epoch_of(own), own.failed
        yield None
        width = -(-call.tiles // self.ranks)
        mine = range(cta, width, call.ctas)
        last = self.ranks if call.carry else self.ranks - 1
        for i in mine if self.sends(failed) else ():
            for owner in range(self.ranks):
                if owner * width + i < call.tiles and rank < last:
                    first = self.start_of(epoch, call, self.ranks, rank) + i * call.tile
                    yield from self.store(peers[owner], first, call, "inbox", (epoch, rank, i))
            for owner in range(self.ranks):
                if owner * width + i < call.tiles:
                    peers[owner].flags["input", rank, i] = epoch
                    yield None
        self.advance(own, epoch, call)
        yield None
        for i in mine:
            tile = rank * width + i
            if tile >= call.tiles:
                continue
            awaited = range(last) if "wait for needed inputs only" in self.mutations else range(self.ranks)
            for p in awaited:
                failed = yield from self.wait(own, failed, self.reached(own, ("input", p, i), epoch))
            if not self.sends(failed):
                continue
            found = "NaN" if failed else (epoch, tile)
            for p in range(self.ranks):
                first = self.start_of(epoch, call) + tile * call.tile
                if p > 0:
                    yield from self.store(peers[p], first, call, "results", found)
                if "results before the loads" in self.mutations:
                    peers[p].flags["result", tile] = epoch
                    yield None
                if p < last and not failed:
                    first = self.start_of(epoch, call, self.ranks, p) + i * call.tile
                    yield from self.load(own, first, call, "inbox", (epoch, p, i))
            for p in range(self.ranks):
                if call.carry:
                    first = self.start_of(epoch, call) + tile * call.tile
                    yield from self.store(peers[p], first, call, "carries", found)
            for p in range(self.ranks):
                peers[p].flags["result", tile] = epoch
                yield None
        for i in mine:
            for owner in range(self.ranks):
                tile = owner * width + i
                if tile < call.tiles and not (rank == 0 and "the first rank waits for nobody" in self.mutations):
                    failed = yield from self.wait(own, failed, self.reached(own, ("result", tile), epoch))
                    first = self.start_of(epoch, call) + tile * call.tile
                    if rank > 0 and not failed:
                        yield from self.load(own, first, call, "results", (epoch, tile))
                    if call.carry and not failed:
                        yield from self.load(own, first, call, "carries", (epoch, tile))

    def chain(self, rank: int, call: Call, cta: int) -> Steps:
        peers = [self.memory[p, "chain"] for p in range(self.ranks)]
        own = peers[rank]
        epoch, failed = self.epoch_of(own), own.failed
        yield None
        if rank > 0 and cta == 0 and not failed:
            peers[rank - 1].flags["credit"] = epoch - 1
            yield None
        if rank > 0 or call.carry:
            self.advance(own, epoch, call)
        end = self.ranks - 1
        one = Call("chain", 1, 1, 1, call.carry)
        cuts = rank in call.cuts and (not call.carry or "cut though a carry is wanted" in self.mutations)
        for block in range(cta, call.tiles, call.ctas):
            # A fold by a matrix reads all rows.
            together = call.together(block)
            if rank > 0 and not cuts:
                for other in [block] if "wait for the own tile only" in self.mutations else together:
                    failed = yield from self.wait(own, failed, self.reached(own, ("block", other), epoch))
            if rank < end and "no credit" not in self.mutations:
                failed = yield from self.wait(own, failed, lambda: own.flags["credit"] >= epoch - 2)
            if rank > 0 and not cuts and not failed:
                for other in together:
                    for cell in range(other * call.tile, (other + 1) * call.tile):
                        yield from self.load(own, self.start_of(epoch, call) + cell, one, "inbox", (epoch, cell))
            if not self.sends(failed):
                continue
            for number in range(block * call.tile, (block + 1) * call.tile):
                cell, value = self.start_of(epoch, call) + number, "NaN" if failed else (epoch, number)
                if rank < end:
                    yield from self.store(peers[rank + 1], cell, one, "inbox", value)
                elif call.carry:
                    for p in range(end):
                        yield from self.store(peers[p], cell, one, "carries", value)
            if rank < end:
                peers[rank + 1].flags["block", block] = epoch
                yield None
            elif call.carry:
                for p in range(end):
                    peers[p].flags["carry", block] = epoch
                    yield None
        if rank == 0 and not call.carry:
            self.advance(own, epoch, call)
        late = [("block", "inbox")] * (cuts and rank > 0) + [("carry", "carries")] * (call.carry and rank < end)
        for flag, part in late:
            for block in self.turns(own, epoch, call.tiles):
                failed = yield from self.wait(own, failed, self.reached(own, (flag, block), epoch))
                for number in () if failed else range(block * call.tile, (block + 1) * call.tile):
                    cell = self.start_of(epoch, call) + number
                    yield from self.load(own, cell, one, part, (epoch, number))


# By algorithm, the rules without which it is wrong: each alone, but the last two with one buffer in place of two.
RULES = {
    "chain": (
        ("no credit",),
        ("one buffer",),
        ("wait for equality",),
        ("layout from the shape",),
        ("the first CTA advances the epoch",),
        ("wait for the own tile only",),
        ("wait before all have started",),
        ("cut though a carry is wanted",),
    ),
    "two_shot": (
        ("wait for needed inputs only",),
        ("the first CTA advances the epoch",),
        # With two buffers, chosen by parity, neither of these alone is an error.
        ("one buffer", "results before the loads"),
        ("one buffer", "the first rank waits for nobody"),
    ),
}


def run(seed: int, algorithms: Sequence[str], *mutations: str, scans: int = 6, is_lost: bool = False) -> Model:
    """Scans of random shapes, CTAs and algorithms by 2 to 4 ranks, of which one stops if `is_lost`.

    Raises ProtocolError if one goes wrong.
    """
    numbers = random.Random(seed)
    ranks = numbers.choice((2, 3, 4))
    calls = [
        Call(
            numbers.choice(algorithms),
            tiles=numbers.choice((1, 2, 5, 8)),
            tile=numbers.choice((1, 2, 3)),
            ctas=numbers.choice((1, 2, 3)),
            carry=numbers.random() < 0.3,
            group=numbers.choice((1, 1, 2, 3)),
            cuts=frozenset(rank for rank in range(ranks) if numbers.random() < numbers.choice((0, 0, 0.8, 1))),
        )
        for _ in range(scans)
    ]
    lost = (numbers.randrange(ranks), numbers.randrange(20 * scans)) if is_lost else None
    model = Model(ranks, calls, mutations, seed, lost)
    model.run()
    return model


def fails_without(algorithm: str, rule: Sequence[str], most: int = 200, *, is_lost: bool = False) -> bool:
    """Whether one of the first orders fails."""
    for seed in range(most):
        try:
            run(seed, (algorithm,), *rule, is_lost=is_lost)
        except ProtocolError:
            return True
    return False


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--orders", type=int, default=25)
    parser.add_argument("--scans", type=int, default=0, help="of each algorithm, one after another by the same ranks")
    options = parser.parse_args()
    orders = options.orders
    for algorithms in (*((name,) for name in RULES), tuple(RULES)):
        for seed in range(orders):
            run(seed, algorithms)
            run(seed, algorithms, is_lost=True)
        print(f"{' and '.join(algorithms)}: correct in {orders} orders, and in as many of which a rank stops")
    for algorithm, rules in RULES.items():
        for rule in rules:
            assert fails_without(algorithm, rule), f"{algorithm} does not need a rule: {rule}"
            print(f"{algorithm}, {', '.join(rule)}: fails")
        assert fails_without(algorithm, (AFTER_FAILURE,), is_lost=True), f"{algorithm}: {AFTER_FAILURE}"
        print(f"{algorithm}, a rank stops, {AFTER_FAILURE}: fails")
        if options.scans:
            for is_lost in (False, True):
                failed = [
                    each.failed for each in run(0, (algorithm,), scans=options.scans, is_lost=is_lost).memory.values()
                ]
                print(f"{algorithm}, {options.scans} scans: {sum(failed)} ranks failed", flush=True)


if __name__ == "__main__":
    main()
