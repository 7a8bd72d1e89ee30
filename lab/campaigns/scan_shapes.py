"""Question: are scans of random shapes exact, by messages and in one kernel, and do they notice faults in the kernels?
Command: python -m lab.campaigns.scan_shapes [--seconds 60] [--ranks 2 3 5] [--seed 0]; --faults
Date: 2026-11-27, again 2026-11-28 with folds by slices, 2 CPU cores
Answer: no scan of 11,145, and of 3,183, is wrong, and all 12 faults are caught: lab/results/scan_shapes.txt. 8 ranks by
messages only.

States [B, H, K, V] with log-decays or matrices, some of which cut the state off, with and without carries, in both
directions, against a sum of explicit products in fp64. By messages all scans run over 1 to 8 ranks of one process
(`lab.virtual_ranks`), on one node or several; kernels run in Triton's interpreter over `--ranks` processes, at random
pace and in tiles so small that a head has several. With `--faults` the kernels run so in copies of the code, in each of
which a fault of `faults/kernels/` is planted: it is caught if a scan is wrong, or does not end.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lab.campaigns.grid import catalogue
from lab.campaigns.judges import Copy
from lab.virtual_ranks import COSTS, run_virtual
from tests.collectives.test_all_scan import ALGORITHMS, Lane, halos
from tests.collectives.test_collectives import Pairs, check
from tests.support.distributed import run_distributed
from zeco_train.collectives.scan_registry import SCANS
from zeco_train.collectives.topology import Topology

_BOUND_SECONDS = 240


def by_messages(seed: int, seconds: float) -> int:
    """Scans of random shapes by all algorithms for so long; returns their number. AssertionError: one is wrong."""
    rng, count, until = random.Random(seed), 0, time.monotonic() + seconds
    while time.monotonic() < until:
        ranks = rng.randint(1, 8)
        nodes = rng.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
        topology = Topology((ranks // nodes,) * nodes)
        name = rng.choice([name for name, scan in SCANS.items() if scan.problem(topology) is None])
        shape, reverse, matrices = _shape(rng, 9, 12), rng.random() < 0.5, rng.random() < 0.7
        with_carry = rng.random() < 0.5
        pairs = Pairs.make(
            rng.randrange(1 << 20), ranks, shape, torch.float64, with_carry, rng.random() < 0.5, matrices
        )
        # The carry of a serial scan would need all ranks at once.
        requests = pairs.requests(reverse, rng.random() < 0.5 and not SCANS[name].in_series)
        blocks = rng.randint(1, 9) if SCANS[name].best_blocks else None
        found = run_virtual(SCANS[name], requests, topology, COSTS, blocks)
        case = f"{name} {topology} {shape} {reverse=} {matrices=} {with_carry=} {blocks=}"
        for rank, incoming in enumerate(found.incoming):
            check(f"incoming state of rank {rank}", incoming, pairs.incoming(rank, reverse), case)
        for carry in found.carries:
            check("carry_out", carry, pairs.incoming(ranks, reverse), case)
        count += 1
    return count


def by_kernels(rank: int, world_size: int, seed: int, seconds: float) -> int:
    """The same in one kernel, on this rank: some halos, then up to three scans under way, with random delays."""
    halos(rank, world_size, 3)
    from zeco_train.collectives import arena, one_kernel

    one_kernel._MATRIX_ROWS = one_kernel.SLICE = 16
    for least in (arena.TwoShotCapacity, arena.ChainCapacity):
        # The defaults of its fields: so that arenas grow.
        least.__new__.__defaults__ = (1,) * len(least._fields)
    lanes, common, own = [Lane(reverse) for reverse in (False, True)], random.Random(seed), random.Random(rank)
    lane, count, until, goes_on = lanes[0], 0, time.monotonic() + seconds, True
    pending: list[tuple[Any, ...]] = []
    size, late = 3, world_size
    while goes_on:
        if not pending:
            # Now and then a rank stays behind in the middle, and those before it could run ahead of their buffers.
            size, late = (7, common.randrange(world_size)) if common.random() < 0.3 else (3, world_size)
        if rank == late and len(pending) == 2:
            for _, scan, *_ in pending:
                scan.wait()
            time.sleep(2.0)
        name, matrices = common.choice(ALGORITHMS), common.random() < 0.7
        shape = _shape(common, 20, 9)
        if late < world_size:
            name, shape = "chain", (1, 1, 3, 4)
        dtype = torch.float64 if common.random() < 0.5 else torch.float32
        with_carry, want_carry = common.random() < 0.5, common.random() < 0.4 and late == world_size
        pairs = Pairs.make(
            common.randrange(1 << 20), world_size, shape, dtype, with_carry, common.random() < 0.5, matrices
        )
        if matrices and common.random() < 0.5:  # as in memory where the backward pass has them
            pairs.transitions = pairs.transitions.mT.contiguous().mT
        if own.random() < 0.3:
            time.sleep(0.1 * own.random())
        scan = pairs.launch(lane, name, rank, "cpu", want_carry)
        case = f"scan {count}: {name} {shape} {dtype} {lane.reverse=} {matrices=} {with_carry=} {want_carry=}"
        pending.append((pairs, scan, want_carry, case))
        count += 1
        if len(pending) == size:
            for pairs, scan, want_carry, case in pending:
                check(f"incoming state of rank {rank}", scan.wait(), pairs.incoming(rank, lane.reverse), case)
                if want_carry:
                    expected = pairs.incoming(world_size, lane.reverse)
                    check(f"carry_out on rank {rank}", scan.carry_out(), expected, case)
            pending.clear()
            # The interpreter runs in one thread at a time.
            lane.worker.drain()
            lane = common.choice(lanes)
            left = torch.tensor(float(time.monotonic() < until))
            dist.broadcast(left, 0)
            goes_on = bool(left)
    for lane in lanes:
        lane.worker.drain()
    return count


def _shape(rng: random.Random, most_keys: int, most_values: int) -> tuple[int, int, int, int]:
    return rng.randint(1, 2), rng.randint(1, 3), rng.randint(1, most_keys), rng.randint(1, most_values)


def _kernels(ranks: list[int], seed: int, seconds: float) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    for size in ranks:
        count = run_distributed(by_kernels, size, seed, seconds / len(ranks))[0]
        print(f"in one kernel over {size} ranks: {count} scans right", flush=True)


def _faults(seconds: float, only: str) -> int:
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        command = [sys.executable, "-m", "lab.campaigns.scan_shapes", "--only-kernels", "--ranks", "3"]
        options: dict[str, Any] = {
            "cwd": copy.tree,
            "env": {**os.environ, **copy.environment()},
            "capture_output": True,
        }
        for fault in [None, *(fault for fault in catalogue("kernels/*.toml") if only in fault.id)]:
            began = time.monotonic()
            with copy.planted(fault) if fault else nullcontext():
                try:
                    done = subprocess.run([*command, f"--seconds={seconds:g}"], timeout=_BOUND_SECONDS, **options)
                    by = "" if done.returncode == 0 else _reason(done.stderr.decode())
                except subprocess.TimeoutExpired:
                    by = "it does not end"
            if fault is None:
                assert not by, by
                continue
            missed += not by
            verdict = f"caught in {time.monotonic() - began:.0f} s: {by}" if by else "NOT caught"
            print(f"{fault.id:<44} {fault.wrong}\n{'':8}{verdict}", flush=True)
    return missed


def _reason(text: str) -> str:
    # Of the scan, the first rank's error: other errors are of what was planted, not of a result.
    lines = [line for line in text.splitlines() if re.match(r"(\w+\.)*\w*(Error|Exception)\b", line)]
    return (lines or ["no error"])[0][:160]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 5])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only-kernels", action="store_true")
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--only", default="", help="faults with this in their name")
    options = parser.parse_args()
    if options.faults:
        return _faults(options.seconds, options.only)
    if not options.only_kernels:
        print(f"by messages: {by_messages(options.seed, options.seconds)} scans right", flush=True)
    _kernels(options.ranks, options.seed, options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
