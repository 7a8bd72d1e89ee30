"""All-Scan in one kernel, on GPUs with peer access: correct at any relative pace of the ranks.

All cases of a world size share one spawn, since a rank's kernels take most of a minute to compile.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import CUDAGraph

from tests.collectives.test_collectives import Pairs
from tests.support.distributed import run_distributed
from zeco_train.collectives import PendingScan, ScanWorker
from zeco_train.collectives.scan_registry import SCANS
from zeco_train.collectives.symmetric import SymmetricScans, transport_problem
from zeco_train.errors import CommunicationError
from zeco_train.ops.seam import ScanRequest

pytestmark = [pytest.mark.campaign, pytest.mark.gpu]

TIMEOUT = timedelta(seconds=60)  # of a wait, which includes compilation on other ranks
ALGORITHMS = tuple(name for name, scan in SCANS.items() if scan.kernel)
ODD, EVEN, LARGE = (2, 3, 5, 7), (2, 4, 64, 128), (1, 512, 64, 128)
# Of matrices: two and four tiles of a head's rows; K 256 is too large for `two_shot`.
TILED = (
    ((1, 3, 128, 80), torch.float32, True, True),
    ((1, 3, 128, 80), torch.float64, False, False),
    ((1, 2, 256, 48), torch.float32, True, True),
)
# |R| < 4 terms below 6; fp32 rounds each of 4 steps by 2^-24, and the kernels' exp by a few of those.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


class Lane:
    """One direction over symmetric memory, with inputs and their expected results."""

    def __init__(self, rank: int, world_size: int, reverse: bool, timeout: timedelta = TIMEOUT) -> None:
        self.rank, self.world_size, self.reverse = rank, world_size, reverse
        self.worker = ScanWorker(dist.new_group(timeout=timeout), timeout)
        self.scans = SymmetricScans(self.worker)
        self._known: dict[tuple[object, ...], tuple[Pairs, Tensor, Tensor]] = {}
        self.errors: list[tuple[str, Tensor, torch.dtype]] = []

    def known(
        self,
        seed: int,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        with_carry: bool = False,
        matrices: bool = False,
    ) -> tuple[Pairs, Tensor, Tensor]:
        """All pairs on this rank's device, its expected incoming state, and the expected carry."""
        key = seed, shape, dtype, with_carry, matrices
        if key not in self._known:
            pairs = Pairs.make(seed, self.world_size, shape, dtype, with_carry, seed % 2 == 1, matrices)
            expected = pairs.incoming(self.rank, self.reverse), pairs.incoming(self.world_size, self.reverse)
            if matrices and self.reverse:  # as in memory where the backward pass has them
                pairs.transitions = pairs.transitions.mT.contiguous().mT
            on_device = Pairs(pairs.states.cuda(), pairs.transitions.cuda(), _cuda(pairs.carry_in))
            self._known[key] = on_device, expected[0].cuda(), expected[1].cuda()
        return self._known[key]

    def launch(self, algorithm: str, pairs: Pairs, want_carry: bool = False, blocks: int | None = None) -> PendingScan:
        state, log_decay = pairs.states[self.rank], pairs.transitions[self.rank]
        request = ScanRequest(state, log_decay, self.reverse, pairs.carry_in, want_carry)
        return self.scans.launch(request, SCANS[algorithm], blocks)

    def compare(self, name: str, actual: Tensor, expected: Tensor) -> None:
        """Record the error without synchronising."""
        self.errors.append((name, (actual.double() - expected).abs().max(), actual.dtype))

    def settle(self) -> None:
        """Wait for all errors and compare them with the tolerance."""
        self.worker.drain()
        found = torch.stack([error for _, error, _ in self.errors]).cpu().tolist()
        for (name, _, dtype), error in zip(self.errors, found, strict=True):
            assert error <= TOLERANCE[dtype], f"{name} is off by {error:.1e}, reverse={self.reverse}"  # NaN fails too
        self.errors.clear()


def _cuda(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cuda()


def cases() -> Iterator[tuple[tuple[int, ...], torch.dtype, bool, bool]]:
    for flags in ((False, False), (True, True), (True, False), (False, True)):
        yield ODD, torch.float32, *flags
    yield ODD, torch.float64, True, True
    yield EVEN, torch.float32, False, False
    yield EVEN, torch.float32, True, True


def every_case(lanes: list[Lane]) -> None:
    kinds = [*itertools.product((False, True), enumerate(cases())), *((True, each) for each in enumerate(TILED))]
    for lane in lanes:
        for algorithm in ALGORITHMS:
            for matrices, (seed, (shape, dtype, with_carry, want_carry)) in kinds:
                kernel = SCANS[algorithm].kernel
                if matrices and kernel is not None and shape[2] > kernel.most_keys:
                    continue
                case = f"{algorithm} {matrices=} {shape} {dtype} {with_carry=} {want_carry=}"
                pairs, incoming, carry = lane.known(seed, shape, dtype, with_carry, matrices)
                first = None
                for _ in range(3):
                    scan = lane.launch(algorithm, pairs, want_carry)
                    result = scan.wait()
                    lane.compare(f"incoming state of rank {lane.rank} in {case}", result, incoming)
                    if want_carry:
                        lane.compare(f"carry_out on rank {lane.rank} in {case}", scan.carry_out(), carry)
                    assert first is None or torch.equal(first, result), f"two runs differ in {case}"
                    first = result
        for blocks in (1, 3, 100):
            pairs, incoming, _ = lane.known(0, ODD)
            lane.compare(f"{blocks} blocks", lane.launch("chain", pairs, blocks=blocks).wait(), incoming)
        lane.settle()


def uneven_pace(lanes: list[Lane], count: int, seconds: float) -> None:
    """Consecutive scans of changing shapes and algorithms, two in flight, with random delays on the ranks."""
    rank = lanes[0].rank
    common, own = random.Random(0), random.Random(rank)
    # Compile all kernels first, so that the time limit excludes compilation.
    kinds = itertools.product(lanes, ALGORITHMS, (ODD, EVEN), (None, 2, 5), (False, True), (False, True))
    for lane, algorithm, shape, blocks, want_carry, matrices in kinds:
        if matrices and blocks is not None:
            continue  # each takes seconds to compile
        lane.launch(algorithm, lane.known(0, shape, matrices=matrices)[0], want_carry, blocks).wait()
    for lane in lanes:
        lane.worker.drain()
    dist.barrier()
    start = time.monotonic()
    pending: list[tuple[Lane, str, PendingScan, Tensor, Tensor | None]] = []
    for number in range(count):
        lane, algorithm = common.choice(lanes), common.choice(ALGORITHMS)
        shape = ODD if common.random() < 0.7 else EVEN
        blocks, want_carry = common.choice((None, 2, 5)), common.random() < 0.3
        matrices = common.random() < 0.5
        blocks = None if matrices else blocks
        pairs, incoming, carry = lane.known(common.randrange(4), shape, matrices=matrices)
        if own.random() < 0.02:
            torch.cuda._sleep(own.randrange(1 << 20))  # up to 0.5 ms
        name = f"scan {number}, {algorithm} {shape} {matrices=} {blocks=} {want_carry=}"
        scan = lane.launch(algorithm, pairs, want_carry, blocks)
        pending.append((lane, name, scan, incoming, carry if want_carry else None))
        if len(pending) > 2:
            compare_results(*pending.pop(0))
        if number % 1000 == 999:
            for lane in lanes:
                lane.worker.drain()
    for results in pending:
        compare_results(*results)
    for lane in lanes:
        lane.settle()
    took = time.monotonic() - start
    assert took <= seconds, f"{count} scans took {took:.1f} s"


def compare_results(lane: Lane, name: str, scan: PendingScan, incoming: Tensor, carry: Tensor | None) -> None:
    lane.compare(name, scan.wait(), incoming)
    if carry is not None:
        lane.compare(f"carry_out of {name}", scan.carry_out(), carry)


def far_ahead(lane: Lane) -> None:
    """One rank is repeatedly 50 ms late; the first rank waits for none and runs ahead."""
    for late in range(lane.world_size):
        for number in range(20):
            if number % 5 == 0 and lane.rank == late:
                torch.cuda._sleep(100_000_000)
            for algorithm in ALGORITHMS:
                pairs, incoming, _ = lane.known(number % 4, ODD if number % 3 else EVEN)
                lane.compare(
                    f"{algorithm} {number} with rank {late} late", lane.launch(algorithm, pairs).wait(), incoming
                )
    lane.settle()


def beyond_capacity(lane: Lane) -> None:
    """States larger than the current arena, between smaller ones."""
    for algorithm in ALGORITHMS:
        for number, shape in enumerate((EVEN, LARGE, EVEN, LARGE, ODD)):
            pairs, incoming, _ = lane.known(2 * (number // 2), shape)
            lane.compare(f"{algorithm} {shape}", lane.launch(algorithm, pairs).wait(), incoming)
    lane.settle()


def in_graphs(lanes: list[Lane], replays: int, *, matrices: bool) -> None:
    """Capture both directions and algorithms; inputs change between replays, and eager scans run in between."""
    known = [[lane.known(seed, EVEN, matrices=matrices) for seed in range(4)] for lane in lanes]
    static = [[x.clone() for x in (of_lane[0][0].states, of_lane[0][0].transitions)] for of_lane in known]

    def body() -> list[Tensor]:
        results = []
        for lane, (states, log_decays) in zip(lanes, static, strict=True):
            scans = [lane.launch(algorithm, Pairs(states, log_decays, None)) for algorithm in ALGORITHMS]
            for scan in scans:
                results.append(scan.wait())
                scan.finish()
        return results

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream().wait_stream(side)
    if not matrices:
        refused_capture(lanes[0])
    graph = CUDAGraph()
    with torch.cuda.graph(graph):
        results = body()
    for number in range(replays):
        for of_lane, tensors in zip(known, static, strict=True):
            pairs = of_lane[number % 4][0]
            tensors[0].copy_(pairs.states)
            tensors[1].copy_(pairs.transitions)
        graph.replay()
        for index, result in enumerate(results):
            of_lane = known[index // len(ALGORITHMS)]
            lanes[index // len(ALGORITHMS)].compare(f"replay {number}, result {index}", result, of_lane[number % 4][1])
        if number % 50 == 0:
            pairs, incoming, _ = lanes[0].known(1, ODD)
            lanes[0].compare(f"eager scan after replay {number}", lanes[0].launch("chain", pairs).wait(), incoming)
            # The first rank's wait returns at once, and a replay does not synchronise with the worker's stream.
            lanes[0].worker.drain()
    for lane in lanes:
        lane.settle()


def refused_capture(lane: Lane) -> None:
    """A scan that has not run before, here with other blocks, cannot be captured; the lane stays usable."""
    pairs, incoming, _ = lane.known(0, EVEN)
    with pytest.raises(RuntimeError, match="has to run once before it is captured"), torch.cuda.graph(CUDAGraph()):
        lane.launch("chain", pairs, blocks=11)
    for blocks in (None, 11):
        lane.compare("scan after a refused capture", lane.launch("chain", pairs, blocks=blocks).wait(), incoming)
    lane.settle()


def missing_peer(rank: int, world_size: int, algorithm: str, matrices: bool) -> None:
    """Rank 0 skips a scan: rank 1 reports it, returns NaN, and refuses further scans."""
    lane = Lane(rank, world_size, reverse=False, timeout=timedelta(seconds=2))
    pairs, incoming, _ = lane.known(0, EVEN, matrices=matrices)
    torch.cuda.synchronize()
    dist.barrier()
    lane.compare("before", lane.launch(algorithm, pairs).wait(), incoming)
    lane.settle()
    dist.barrier()
    start = time.monotonic()
    if rank != 0:
        result = lane.launch(algorithm, pairs).wait()
        assert result.isnan().any(), f"{algorithm}: nothing shows in the result"
    if rank == 1:
        seconds = time.monotonic() - start
        assert 1.5 < seconds < 8, f"{algorithm}: {seconds:.1f} s"
        errors = []
        for action in (lambda: lane.launch(algorithm, pairs), lane.worker.drain):
            with pytest.raises(CommunicationError, match=r"no answer within 2 s") as caught:
                action()
            errors.append(caught.value)
        assert errors[0] is errors[1]
        assert (errors[0].rank, errors[0].peer) == (1, 0), str(errors[0])
        assert f"symmetric_{algorithm} forward" in str(errors[0])
        assert "in scan 2" in str(errors[0])
    dist.barrier()


def suite(rank: int, world_size: int) -> str:
    lanes = [Lane(rank, world_size, reverse) for reverse in (False, True)]
    problem = transport_problem(lanes[0].worker, torch.device("cuda", rank))
    if problem is not None:
        return problem
    parts: list[tuple[str, Callable[[], None]]] = [
        ("every case", lambda: every_case(lanes)),
        ("far ahead", lambda: far_ahead(lanes[0])),
        ("beyond the capacity", lambda: beyond_capacity(lanes[1])),
        ("10,000 scans", lambda: uneven_pace(lanes, 10_000, 30.0)),
        ("graphs", lambda: in_graphs(lanes, 300, matrices=False)),
        ("graphs, matrices", lambda: in_graphs(lanes, 100, matrices=True)),
        *(
            (f"missing peer, {name}, {matrices=}", partial(missing_peer, rank, world_size, name, matrices))
            for name, matrices in itertools.product(ALGORITHMS, (False, True))
        ),
    ]
    for name, part in parts:
        start = time.monotonic()
        part()
        dist.barrier()
        if rank == 0:
            print(f"{world_size} GPUs, {name}: {time.monotonic() - start:.1f} s", flush=True)
    return ""


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 4, 3])
def test_one_kernel_scans_on_gpus(world_size: int) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    problem = run_distributed(suite, world_size, backend="cpu:gloo,cuda:nccl")[0]
    if problem:
        pairs = itertools.permutations(range(world_size), 2)
        if all(torch.cuda.can_device_access_peer(*pair) for pair in pairs):
            pytest.fail(f"GPUs that reach each other's memory have no symmetric memory: {problem}")
        pytest.skip(f"no symmetric memory: {problem}")
