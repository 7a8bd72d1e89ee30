"""All-Scan in one kernel, in Triton's interpreter: ranks are processes of a CPU that map one file."""

from __future__ import annotations

import itertools
import os
import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.all_scan_emulation import allocate_shared
from tests.distributed import run_distributed
from tests.test_collectives import Pairs, check
from zeco_train.collectives import Courier, PendingScan, ScanRequest
from zeco_train.errors import CommunicationError, ConfigError

ALGORITHMS = ("two_shot", "chain")
# [B, H, K, V]: odd, of several tiles a rank, and fewer tiles than ranks.
SHAPES = ((2, 3, 5, 7), (1, 4, 8, 16), (1, 1, 3, 1))


class Lane:
    """One direction, with few small tiles, so that CTAs have several."""

    def __init__(self, reverse: bool, timeout: timedelta = timedelta(seconds=30)) -> None:
        from zeco_train.collectives.symmetric import SymmetricScans, Tuning

        self.reverse, self.courier = reverse, Courier(dist.new_group(), timeout)
        tuning = {"two_shot": Tuning(2, 4, 32), "chain": Tuning(2, 4, 32)}
        self.scans = SymmetricScans(self.courier, allocate_shared, tuning)

    def launch(self, variant: str, state: torch.Tensor, log_decay: torch.Tensor, **options: object) -> PendingScan:
        request = ScanRequest(state, log_decay, self.reverse, **options)  # type: ignore[arg-type]
        return self.scans.launch(request, variant, blocks=3 if variant == "chain" else None)


def start_interpreter() -> None:
    """Before anything imports Triton: a decorated function is for the interpreter or not from then on."""
    os.environ["TRITON_INTERPRET"] = "1"


def suite(rank: int, world_size: int) -> None:
    start_interpreter()
    from zeco_train.collectives import arena

    if world_size == 3:
        arena.FLOOR = {
            arena.TwoShotCapacity: arena.TwoShotCapacity(1, 1, 1, 1, 1),
            arena.ChainCapacity: arena.ChainCapacity(1, 1),
        }
    flags = (False, True)
    for reverse in flags:
        lane = Lane(reverse)
        for seed, (algorithm, shape, with_carry, want_carry) in enumerate(
            itertools.product(ALGORITHMS, SHAPES, flags, flags)
        ):
            dtype = torch.float64 if seed % 3 == 0 else torch.float32
            case = f"{algorithm} {reverse=} {shape} {dtype} {with_carry=} {want_carry=}"
            pairs = Pairs.make(seed, world_size, shape, dtype, with_carry, restarts=True)
            scan = pairs.launch(lane, algorithm, rank, "cpu", want_carry)  # type: ignore[arg-type]
            check(f"incoming state of rank {rank}", scan.wait(), pairs.incoming(rank, reverse), case)
            if want_carry:
                check(f"carry_out on rank {rank}", scan.carry_out(), pairs.incoming(world_size, reverse), case)
        if world_size == 3:
            uneven_pace(lane, rank, world_size)
        lane.courier.drain()
    if world_size == 2:
        for algorithm in ALGORITHMS:
            missing_peer(rank, algorithm)


def uneven_pace(lane: Lane, rank: int, world_size: int) -> None:
    """Scans in a row, of changing shapes, algorithms and capacities, while ranks sleep at random."""
    common, own = random.Random(0), random.Random(rank)
    pending: list[tuple[Pairs, PendingScan, str]] = []
    for number in range(60):
        # First the small shapes: later ones are beyond the first arenas' capacity.
        shape, algorithm = common.choice(SHAPES[::-1][: 1 + number // 15]), common.choice(ALGORITHMS)
        pairs = Pairs.make(number, world_size, shape, torch.float32, False, number % 2 == 0)
        if own.random() < 0.2:
            time.sleep(0.05 * own.random())
        scan = pairs.launch(lane, algorithm, rank, "cpu")  # type: ignore[arg-type]
        pending.append((pairs, scan, f"scan {number}, {algorithm} {shape}"))
        if len(pending) == 3 or number == 59:
            for pairs, scan, case in pending:
                check(f"incoming state of rank {rank}", scan.wait(), pairs.incoming(rank, lane.reverse), case)
            pending.clear()


def missing_peer(rank: int, algorithm: str) -> None:
    """Rank 0 leaves out a scan: rank 1 gets NaN, names it, and takes no further scan."""
    lane = Lane(reverse=False, timeout=timedelta(seconds=1))
    state, log_decay = torch.ones(1, 2, 5, 7), torch.zeros(1, 2, 5)
    dist.barrier()
    incoming = lane.launch(algorithm, state, log_decay).wait()
    assert torch.equal(incoming, state * rank)
    lane.courier.drain()
    dist.barrier()
    if rank == 1:
        lane.scans.check()
        assert lane.launch(algorithm, state, log_decay).wait().isnan().all(), algorithm
        for action in (lambda: lane.launch(algorithm, state, log_decay), lane.courier.drain):
            with pytest.raises(CommunicationError, match=f"symmetric_{algorithm} forward: .* in scan 2 with rank 0"):
                action()
    dist.barrier()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_kernels_in_the_interpreter(world_size: int) -> None:
    run_distributed(suite, world_size, timeout=240.0)


def fallbacks(rank: int, world_size: int) -> None:
    from zeco_train.sp.registry import AllScanConfig, AllScanTransport, SPConfig, build_scan

    groups = dist.new_group(), dist.new_group()
    config = SPConfig(all_scan=AllScanConfig(transport=AllScanTransport.symmetric))
    with pytest.raises(ConfigError, match=r"^sp.all_scan.transport=symmetric: needs GPUs .* on cpu\); or take"):
        build_scan(config, groups, timedelta(seconds=30), torch.device("cpu"))
    scan = build_scan(SPConfig(), groups, timedelta(seconds=30), torch.device("cpu"))
    state = torch.ones(1, 2, 5, 3)
    assert torch.equal(scan.launch(state, torch.zeros(1, 2, 5)).wait(), state * rank)
    scan.drain()


def test_transport_that_the_ranks_cannot_use() -> None:
    run_distributed(fallbacks, 2)
