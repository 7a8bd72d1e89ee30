"""Scans over ranks against an explicit sum of products, and errors when a peer is missing."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.distributed import on_ranks, run_distributed
from zeco_train.collectives import ScanWorker
from zeco_train.collectives.all_gather import ALL_GATHER
from zeco_train.collectives.scan_registry import SCANS
from zeco_train.errors import CommunicationError
from zeco_train.ops.seam import LaunchedScan, ScanRequest

pytestmark = pytest.mark.numeric

TIMEOUT = timedelta(seconds=60)
BLOCKS = (1, 2, 3, 7, 100)
# All registered scans; those that send states in blocks, or gather them in parts, with several numbers of them.
VARIANTS = *(
    variant
    for name, scan in SCANS.items()
    for variant in ([f"{name}/{blocks}" for blocks in BLOCKS] if scan.best_blocks else [name])
), f"{ALL_GATHER.name}/3", f"{ALL_GATHER.name}/100"  # fmt: skip
FAMILIES = tuple(f"{name}/2" if scan.best_blocks else name for name, scan in SCANS.items())
# Asynchronous ones, of which several can be in flight.
LAUNCHED = tuple(variant for variant in FAMILIES if not SCANS[variant.partition("/")[0]].in_series)
# H·V = 6, 12 and 1: not a multiple of 4 ranks, a multiple, and fewer columns than ranks. [B, H, K, V]
SHAPES = ((1, 2, 5, 3), (2, 3, 8, 4), (1, 1, 16, 1), (2, 3, 64, 5))
# The sum of at most 4 terms of |x| < 20; fp32: exp, product and sum round 2^-24 each, 4 times, with room for 2.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 20 * 4 * 3 * 2 * 2.0**-24}


class Lane:
    """One direction's group with its worker, as a backend holds them."""

    def __init__(self, group: dist.ProcessGroup, reverse: bool = False, timeout: timedelta = TIMEOUT) -> None:
        self.reverse, self.worker = reverse, ScanWorker(group, timeout)

    def launch(self, variant: str, state: Tensor, log_decay: Tensor, **options: Any) -> LaunchedScan:
        request = ScanRequest(state, log_decay, self.reverse, **options)
        name, _, blocks = variant.partition("/")
        if SCANS[name].in_series:
            # It runs in the caller's thread: on every rank, pending work of the worker's thread must finish first.
            self.worker.drain()
        return SCANS[name].launch(request, self.worker, **({"blocks": int(blocks)} if blocks else {}))


@dataclass
class Pairs:
    """Inputs of all ranks of a group, by rank; every rank can generate all of them."""

    states: Tensor  # [P, B, H, K, V]
    transitions: Tensor  # [P, B, H, K], or [P, B, H, K, K]
    carry_in: Tensor | None  # [B, H, K, V]

    @classmethod
    def make(
        cls,
        seed: int,
        size: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        with_carry: bool,
        restarts: bool,
        matrices: bool = False,
    ) -> Pairs:
        generator = torch.Generator().manual_seed(seed)
        states = torch.randn(size, *shape, generator=generator, dtype=dtype)
        transitions = -3 * torch.rand(size, *shape[:-1], generator=generator, dtype=dtype)
        cut_off = -torch.inf
        if matrices:
            # Contractions, as products of the delta rule's are.
            transitions = torch.randn(*transitions.shape, shape[2], generator=generator, dtype=torch.float64)
            transitions /= 1.1 * torch.linalg.matrix_norm(transitions, ord=2, keepdim=True)
            transitions, cut_off = transitions.to(dtype), 0.0
        if restarts:
            rows = transitions if not matrices else transitions[..., 0, 0]
            transitions[torch.rand(rows.shape, generator=generator) < 0.2] = cut_off
            transitions[seed % size] = cut_off
        carry_in = torch.randn(shape, generator=generator, dtype=dtype) if with_carry else None
        return cls(states, transitions, carry_in)

    def incoming(self, rank: int, reverse: bool) -> Tensor:
        """R of a rank, or the carry for the rank past the last, as a sum of explicit products in fp64."""
        order = list(range(len(self.states)))[:: -1 if reverse else 1]
        before = order[: order.index(rank)] if rank in order else order
        states, transitions = self.states.double(), self.transitions.double()
        result = torch.zeros_like(states[0])
        for i, term in enumerate([self.carry_in, *(states[j] for j in before)]):
            if term is None:
                continue
            if transitions.ndim == 4:
                result += transitions[before[i:]].sum(0).exp()[..., None] * term.double()
            else:
                weight = torch.eye(transitions.shape[-1], dtype=torch.float64).expand(transitions.shape[1:])
                for j in before[i:]:
                    weight = transitions[j] @ weight
                result += weight @ term.double()
        return result

    def requests(self, reverse: bool, want_carry: bool, device: str = "cpu") -> list[ScanRequest]:
        """Of all ranks, of which only the first in scan order may read the carry."""
        carries = [None if self.carry_in is None else self.carry_in.to(device) * torch.nan for _ in self.states]
        carries[-1 if reverse else 0] = None if self.carry_in is None else self.carry_in.to(device)
        fields = zip(self.states.to(device), self.transitions.to(device), carries, strict=True)
        return [ScanRequest(state, transition, reverse, carry, want_carry) for state, transition, carry in fields]

    def launch(self, lane: Lane, variant: str, rank: int, device: str, want_carry: bool = False) -> LaunchedScan:
        request = self.requests(lane.reverse, want_carry, device)[rank]
        given = {"carry_in": request.carry_in, "want_carry": want_carry}
        return lane.launch(variant, request.state, request.transition, **given)


def check(name: str, actual: Tensor, expected: Tensor, case: object) -> None:
    error = (actual.cpu().double() - expected).abs().max().item()
    assert error <= TOLERANCE[actual.dtype], f"{name} is off by {error:.1e} in {case}"  # NaN fails too


def finish(pairs: Pairs, scan: LaunchedScan, lane: Lane, rank: int, want_carry: bool, case: object) -> list[Tensor]:
    results = [scan.wait()]
    check(f"incoming state of rank {rank}", results[0], pairs.incoming(rank, lane.reverse), case)
    scan.finish()
    if want_carry:
        results.append(scan.carry_out())
        check(f"carry_out on rank {rank}", results[1], pairs.incoming(len(pairs.states), lane.reverse), case)
    return results


def cases() -> Iterator[tuple[str, tuple[int, ...], torch.dtype, bool, bool, bool, bool]]:
    flags = (False, True)
    kinds = ((torch.float64, False), (torch.float32, False), (torch.float64, True))
    for variant, shape, (dtype, matrices), *rest in itertools.product(VARIANTS, SHAPES, kinds, flags, flags, flags):
        yield variant, shape, dtype, matrices, *rest


def reference_suite(rank: int, world_size: int, device_type: str, quick: bool = False) -> None:
    device = f"{device_type}:{rank}" if device_type == "cuda" else device_type
    lanes = Lane(dist.new_group()), Lane(dist.new_group(), reverse=True)
    for seed, (variant, shape, dtype, matrices, with_carry, restarts, want_carry) in enumerate(cases()):
        # One of the eight combinations of the last three for each of the others, and each of them with every variant.
        if quick and (seed % 8 != seed // 8 % 8 or shape == SHAPES[-1]):
            continue
        # For both directions: the norms of matrices take a third of the time.
        pairs = Pairs.make(seed, world_size, shape, dtype, with_carry, restarts, matrices)
        for lane in lanes:
            case = (
                f"{variant} reverse={lane.reverse} {shape} {dtype} {matrices=} {with_carry=} {restarts=} {want_carry=}"
            )
            scan = pairs.launch(lane, variant, rank, device, want_carry)
            results = finish(pairs, scan, lane, rank, want_carry, case)
            if seed % 7 == 0:
                scan = pairs.launch(lane, variant, rank, device, want_carry)
                again = finish(pairs, scan, lane, rank, want_carry, case)
                assert all(map(torch.equal, results, again)), f"two runs differ in {case}"
    for variant in FAMILIES:
        scans_in_flight(rank, world_size, lanes, variant, device)
        misuse(rank, world_size, lanes[0], variant, device)
    for lane in lanes:
        lane.worker.drain()


def scans_in_flight(rank: int, world_size: int, lanes: tuple[Lane, Lane], variant: str, device: str) -> None:
    """Two scans of each direction are launched before the first wait, also on tensors of inference mode."""
    forward, reverse = lanes
    for inference in (False, True):
        with torch.inference_mode(inference):
            pairs = [Pairs.make(i, world_size, SHAPES[1], torch.float64, True, False) for i in range(4)]
            order = [forward, reverse, reverse, forward]
            if variant not in LAUNCHED:  # allows one scan in flight in a group
                del order[2:]
            scans = [p.launch(lane, variant, rank, device, True) for p, lane in zip(pairs, order, strict=False)]
            for i, (scan, lane) in enumerate(zip(scans, order, strict=True)):
                finish(pairs[i], scan, lane, rank, True, f"scan {i} in flight, {variant} {inference=}")


def misuse(rank: int, world_size: int, lane: Lane, variant: str, device: str) -> None:
    state, log_decay = torch.ones(1, 2, 5, 3, device=device), torch.zeros(1, 2, 5, device=device)
    scan = lane.launch(variant, state, log_decay)
    scan.wait()
    scan.finish()
    with pytest.raises(RuntimeError, match="want_carry=True"):
        scan.carry_out()
    wrong: tuple[tuple[str, tuple[Tensor, Tensor, Tensor | None]], ...] = (
        ("state", (state[0], log_decay, None)),
        ("state", (state.half(), log_decay.half(), None)),
        ("transition", (state, log_decay[..., 1:], None)),
        ("transition", (state, log_decay.double(), None)),
        ("transition", (state, log_decay[..., None].expand(1, 2, 5, 3), None)),
        ("carry_in", (state, log_decay, state[..., 1:])),
    )
    for name, (s, g, c) in wrong:
        with pytest.raises(ValueError, match=f"^{name} must be"):
            lane.launch(variant, s, g, carry_in=c)
    if variant.startswith("chain"):
        with pytest.raises(ValueError, match="blocks must be ≥ 1, not 0"):
            lane.launch("chain/0", state, log_decay)
    if variant == "serial":
        with pytest.raises(RuntimeError, match="after wait"):
            lane.launch(variant, state, log_decay).finish()


@pytest.mark.processes
@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_scan_equals_the_reference_on_gpus(world_size: int) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices")
    run_distributed(reference_suite, world_size, "cuda", backend="cpu:gloo,cuda:nccl")


UNEVEN_SCANS = 60


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world_size", "quick"), [(3, True), *(pytest.param(n, False, marks=pytest.mark.campaign) for n in range(1, 6))]
)
def test_every_scan_equals_the_reference(world_size: int, quick: bool) -> None:
    """Also two scans in flight, and invalid calls."""
    run_distributed(reference_suite, world_size, "cpu", quick)


@pytest.mark.processes
@on_ranks(3)
def test_scans_with_ranks_at_uneven_pace(rank: int, world_size: int) -> None:
    lanes = [Lane(dist.new_group(list(range(world_size)))) for _ in LAUNCHED]
    pairs = Pairs.make(0, world_size, SHAPES[1], torch.float64, False, False)
    store = dist.distributed_c10d._get_default_store()
    # Rank 0 launches after the others have: a launch that waits for it would prevent overlap.
    if rank == 0:
        store.wait([f"launched by {other}" for other in range(1, world_size)], TIMEOUT)
    scans = [pairs.launch(lane, variant, rank, "cpu") for lane, variant in zip(lanes, LAUNCHED, strict=True)]
    store.set(f"launched by {rank}", "")
    # Rank 1 waits for its results after the others have theirs: it must forward states without being waited for.
    if rank == 1:
        store.wait([f"finished by {other}" for other in range(world_size) if other != 1], TIMEOUT)
    for lane, variant, scan in zip(lanes, LAUNCHED, scans, strict=True):
        finish(pairs, scan, lane, rank, False, variant)
    store.set(f"finished by {rank}", "")
    lane = lanes[0]
    sleeps = random.Random(rank)
    for seed in range(UNEVEN_SCANS):
        variant = FAMILIES[seed % len(FAMILIES)]
        want_carry = seed % 5 == 0
        pairs = Pairs.make(seed, world_size, SHAPES[seed % 2], torch.float64, seed % 3 == 0, seed % 4 == 0)
        scan = pairs.launch(lane, variant, rank, "cpu", want_carry)
        if sleeps.random() < 0.2:
            time.sleep(0.02 * sleeps.random())
        finish(pairs, scan, lane, rank, want_carry, f"scan {seed}, {variant}")
    # A rank that has its results may still have sends pending.
    for lane in lanes:
        lane.worker.drain()


@pytest.mark.processes
@on_ranks(4)
def test_scans_in_subgroups(rank: int, world_size: int) -> None:
    for layout in (((0, 2), (1, 3)), ((0,), (1, 2, 3))):
        groups = [dist.new_group(list(ranks)) for ranks in layout]
        mine = next(i for i, ranks in enumerate(layout) if rank in ranks)
        member = layout[mine].index(rank)
        # Each group has different data, so that misdirected messages are detected.
        pairs = Pairs.make(mine, len(layout[mine]), SHAPES[0], torch.float64, True, False)
        for reverse, variant in itertools.product((False, True), FAMILIES):
            lane = Lane(groups[mine], reverse)
            scan = pairs.launch(lane, variant, member, "cpu", want_carry=True)
            finish(pairs, scan, lane, member, True, f"{variant} {reverse=} {layout}")
            if variant in LAUNCHED:
                lane.worker.drain()
        with pytest.raises(ValueError, match="not a member"):
            Lane(groups[1 - mine]).launch("chain/1", pairs.states[0], pairs.transitions[0])


# Peer and operation that rank 2 of 3 reports when rank 1 is missing. Other scans may report any.
EXPECTED = {
    "chain/2": (1, "all_scan_chain forward: receive of block 0"),
    "two_shot": (None, "all_scan_two_shot forward: all-to-all of slices"),
    "doubling": (1, "all_scan_doubling forward: receive of round 0"),
    "all_gather": (None, "all_gather_scan forward: all-gather of states and transitions"),
    "serial": (1, "serial_scan forward: receive of the state"),
}


def failure(lane: Lane, variant: str) -> tuple[CommunicationError, float]:
    state, log_decay = torch.ones(1, 2, 5, 3), torch.zeros(1, 2, 5)
    start = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        lane.launch(variant, state, log_decay, want_carry=True).wait()
    seconds = time.monotonic() - start
    if variant in LAUNCHED:  # a group with half-delivered messages accepts no further scans
        with pytest.raises(CommunicationError) as later:
            lane.launch(variant, state, log_decay)
        assert later.value is caught.value, f"{variant}: {later.value}"
    found = caught.value.peer, caught.value.operation
    assert (caught.value.rank, *found) == (2, *EXPECTED.get(variant, found)), variant
    return caught.value, seconds


@pytest.mark.processes
@on_ranks(3, may_die=(1,))
def test_missing_peer_is_named_within_timeout(rank: int, world_size: int) -> None:
    """Rank 1 joins no scan, and later dies. Each kind of scan has its own group, since a failure makes it unusable."""
    timeout = timedelta(seconds=2)
    ranks = list(range(world_size))
    absent = {variant: Lane(dist.new_group(ranks, timeout=timeout), timeout=timeout) for variant in FAMILIES}
    dying = {variant: Lane(dist.new_group(ranks)) for variant in FAMILIES}
    dist.barrier()
    if rank == 0:  # has its incoming state at once; its failed send is reported later
        chain = absent["chain/2"]
        chain.launch("chain/2", torch.ones(1, 2, 5, 3), torch.zeros(1, 2, 5)).wait()
        with pytest.raises(CommunicationError, match="send of block 0 with rank 1: no answer within 2 s"):
            chain.worker.drain()
    if rank == 2:
        for variant, lane in absent.items():
            error, seconds = failure(lane, variant)
            assert "no answer within 2 s" in str(error), f"{variant}: {error}"
            # The bound of the other groups is 60 s.
            assert 1.9 < seconds < 40, f"{variant}: {seconds:.1f} s"
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)  # until rank 2 is in its first wait
        os._exit(9)
    if rank == 2:
        for variant, lane in dying.items():
            error, seconds = failure(lane, variant)
            assert "connection lost" in str(error), f"{variant}: {error}"
            assert seconds < 40, f"{variant}: {seconds:.1f} s"  # of a timeout of 60
