"""All-Scan in one kernel under Triton's interpreter: every shape, ranks at uneven pace, captures, a missing peer."""

from __future__ import annotations

import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.collectives.test_all_scan import ALGORITHMS, SHAPES, Lane, compare, start_interpreter
from tests.collectives.test_collectives import Pairs, check
from tests.support.distributed import run_distributed
from zeco_train.collectives import PendingScan
from zeco_train.errors import CommunicationError

pytestmark = pytest.mark.campaign


UNEVEN_SCANS = 30
TALL = (1, 2, 40, 20)


def uneven_pace(lane: Lane, rank: int, world_size: int) -> None:
    """Consecutive scans of changing shapes, algorithms and capacities, with random delays on the ranks."""
    common, own = random.Random(0), random.Random(rank)
    pending: list[tuple[Pairs, PendingScan, bool, str]] = []
    for number in range(UNEVEN_SCANS):
        # Small shapes first: later ones exceed the capacity of the first arenas.
        shape, algorithm = common.choice(SHAPES[::-1][: 1 + 4 * number // UNEVEN_SCANS]), common.choice(ALGORITHMS)
        pairs = Pairs.make(number, world_size, shape, torch.float32, False, number % 2 == 0, common.random() < 0.5)
        if own.random() < 0.2:
            time.sleep(0.05 * own.random())
        want_carry = common.random() < 0.3
        scan = pairs.launch(lane, algorithm, rank, "cpu", want_carry)
        pending.append((pairs, scan, want_carry, f"scan {number}, {algorithm} {shape} {want_carry=}"))
        if len(pending) == 3 or number == UNEVEN_SCANS - 1:
            for pairs, scan, want_carry, case in pending:
                check(f"incoming state of rank {rank}", scan.wait(), pairs.incoming(rank, lane.reverse), case)
                if want_carry:
                    check(f"carry_out on rank {rank}", scan.carry_out(), pairs.incoming(world_size, lane.reverse), case)
            pending.clear()


def refused_capture(algorithm: str) -> None:
    """A scan that has not run before cannot be captured; the refusal does not affect other scans."""
    from zeco_train.collectives import symmetric

    lane = Lane(reverse=False)
    state, log_decay = torch.ones(1, 2, 5, 7), torch.zeros(1, 2, 5)
    expected = state * dist.get_rank()
    for shape, options in ((2, {}), (1, {"want_carry": True})):
        inputs = state[:, :shape], log_decay[:, :shape]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(symmetric, "is_capturing", lambda device: True)
            with pytest.raises(RuntimeError, match=rf"none like this one has: symmetric_{algorithm} .*want_carry="):
                lane.launch(algorithm, *inputs, **options)
        assert torch.equal(lane.launch(algorithm, *inputs, **options).wait(), expected[:, :shape]), algorithm
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(symmetric, "is_capturing", lambda device: True)
            assert torch.equal(lane.launch(algorithm, *inputs, **options).wait(), expected[:, :shape]), algorithm
    lane.worker.drain()


def missing_peer(rank: int, algorithm: str) -> None:
    """Rank 0 skips a scan: rank 1 gets NaN, names rank 0, and refuses further scans.

    The timeout, 1,000 looks at a flag, leaves 5 s for the previous scan, which is slow in the interpreter.
    """
    lane = Lane(reverse=False, timeout=timedelta(seconds=1))
    state, log_decay = torch.ones(1, 2, 5, 7), torch.zeros(1, 2, 5)
    dist.barrier()
    incoming = lane.launch(algorithm, state, log_decay).wait()
    assert torch.equal(incoming, state * rank)
    lane.worker.drain()
    dist.barrier()
    if rank == 1:
        lane.scans.check()
        assert lane.launch(algorithm, state, log_decay).wait().isnan().all(), algorithm
        for action in (lambda: lane.launch(algorithm, state, log_decay), lane.worker.drain):
            with pytest.raises(CommunicationError, match=f"symmetric_{algorithm} forward: .* in scan 2 with rank 0"):
                action()
    dist.barrier()


def suite(rank: int, world_size: int) -> None:
    start_interpreter()
    from zeco_train.collectives import arena, one_kernel

    # Several tiles of a matrix's rows.
    one_kernel._MATRIX_ROWS = 16
    for least in (arena.TwoShotCapacity, arena.ChainCapacity) if world_size == 3 else ():
        # The defaults of its fields.
        least.__new__.__defaults__ = (1,) * len(least._fields)
    compare(rank, world_size, (*SHAPES, TALL))
    for reverse in (False, True) if world_size == 3 else ():
        lane = Lane(reverse)
        uneven_pace(lane, rank, world_size)
        lane.worker.drain()
    for algorithm in ALGORITHMS if world_size == 2 else ():
        refused_capture(algorithm)
        missing_peer(rank, algorithm)


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_one_kernel_scans_in_triton_interpreter(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run_distributed(suite, world_size)
