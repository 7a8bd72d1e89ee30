"""All-Scan in one kernel, in Triton's interpreter: ranks are CPU processes that share a memory-mapped file."""

from __future__ import annotations

import functools
import itertools
import os
import random
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.collectives.test_collectives import TIMEOUT, Pairs, check
from tests.support import interpreter
from tests.support.all_scan_emulation import allocate_shared
from tests.support.distributed import on_ranks, run_distributed
from zeco_train.collectives import PendingScan, ScanWorker
from zeco_train.collectives.halo import HALO
from zeco_train.collectives.one_kernel import KernelTuning
from zeco_train.collectives.scan_registry import SCANS
from zeco_train.errors import ConfigError
from zeco_train.ops.seam import ScanRequest, fold

pytestmark = pytest.mark.numeric

ALGORITHMS = tuple(name for name, scan in SCANS.items() if scan.kernel)
# [B, H, K, V]: odd sizes, several tiles a rank, and fewer tiles than ranks.
SHAPES = ((2, 3, 5, 7), (1, 4, 8, 16), (1, 1, 3, 1))
# (carry_in given, carry_out wanted)
CARRIES = tuple(itertools.product((False, True), repeat=2))

# Between two looks at a flag; the interpreter counts one as a millisecond.
POLL_SECONDS = 0.005


class Lane:
    """One direction, with few small tiles, so that CTAs have several."""

    def __init__(self, reverse: bool, timeout: timedelta = timedelta(seconds=30)) -> None:
        from zeco_train.collectives.symmetric import SymmetricScans

        self.reverse, self.worker = reverse, ScanWorker(dist.new_group(), timeout)
        tuning = dict.fromkeys((*ALGORITHMS, HALO.name), KernelTuning(2, 4, 32))
        self.scans = SymmetricScans(self.worker, allocate_shared, tuning)

    def launch(self, variant: str, state: torch.Tensor, log_decay: torch.Tensor, **options: object) -> PendingScan:
        request = ScanRequest(state, log_decay, self.reverse, **options)  # type: ignore[arg-type]
        scan = SCANS.get(variant, HALO)
        return self.scans.launch(request, scan, blocks=3 if scan.best_blocks else None)


@functools.cache
def start_interpreter() -> None:
    """Must precede any import of Triton, which decides at decoration whether a function is interpreted."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime.interpreter import InterpreterBuilder

    interpreter.quicken()
    interpreter.patch_bf16()
    load = InterpreterBuilder.create_masked_load
    last: list[int] = []

    def give_way(builder: Any, pointers: Any, *rest: Any) -> Any:
        # Only flags are integers. A rank that polls one without a pause takes CPU time that its peer needs.
        if pointers.get_element_ty().is_int():
            flags = pointers.data.ravel().tolist()
            if flags == last:
                time.sleep(POLL_SECONDS)
            last[:] = flags
        return load(builder, pointers, *rest)

    InterpreterBuilder.create_masked_load = give_way


def compare(rank: int, world_size: int, shapes: tuple[tuple[int, int, int, int], ...]) -> None:
    start_interpreter()
    if world_size > 2:
        interpreter.skip_overflow_checks()
    for reverse in (False, True):
        lane = Lane(reverse)
        kinds = itertools.product(ALGORITHMS, (False, True), enumerate(shapes))
        for seed, (algorithm, matrices, (number, shape)) in enumerate(kinds):
            if matrices and algorithm != "chain" and shape != shapes[-1]:
                continue
            # The shapes and both directions have all four cases of carries; the smallest shape alone has both carries.
            with_carry, want_carry = CARRIES[(number + len(shapes) * reverse) % 4] if len(shapes) > 1 else (True, True)
            dtype = torch.float64 if seed % 3 == 0 else torch.float32
            case = f"{algorithm} {matrices=} {reverse=} {shape} {dtype} {with_carry=} {want_carry=}"
            pairs = Pairs.make(seed, world_size, shape, dtype, with_carry, True, matrices)
            if matrices and reverse:  # as in memory where the backward pass has them
                pairs.transitions = pairs.transitions.mT.contiguous().mT
            scan = pairs.launch(lane, algorithm, rank, "cpu", want_carry)  # type: ignore[arg-type]
            check(f"incoming state of rank {rank}", scan.wait(), pairs.incoming(rank, reverse), case)
            if want_carry:
                check(f"carry_out on rank {rank}", scan.carry_out(), pairs.incoming(world_size, reverse), case)
        lane.worker.drain()


@pytest.mark.processes
def test_one_kernel_scans_in_triton_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run_distributed(compare, 2, SHAPES[-1:])
    run_distributed(compare, 2, ((1, 1, 72, 8),))  # slices and tiles of a matrix


def halos(rank: int, world_size: int, count: int) -> None:
    """A state goes one rank on, at once; with fewer tokens than rows in a rank, or a carry that is wanted, farther."""
    start_interpreter()
    interpreter.skip_overflow_checks()
    store = dist.distributed_c10d._get_default_store()
    lanes = [Lane(way, timedelta(seconds=10)) for way in (False, True)]
    for lane, number in itertools.product(lanes, range(count)):
        ranks, arrived = range(world_size)[:: -1 if lane.reverse else 1], f"{lane.reverse} arrived"
        kind = {"generator": torch.Generator().manual_seed(number), "dtype": (torch.float32, torch.float64)[number % 2]}
        states = torch.randn(world_size, 2, 1, 3, 37, **kind)
        transitions, short = states.new_zeros(world_size, 2, 1, 3, 3), number % 4 if number % 3 == 2 else world_size
        # A row of the second sequence passes, and is all there is.
        transitions[short : short + 1, 1, 0, 0, 2], states[short : short + 1, 1, 0, 0] = 1, 0
        if number == 1 and rank == ranks[0]:  # begins once the last rank is done, to which nothing of it comes
            store.wait([arrived], TIMEOUT)
        time.sleep(0.1 * random.Random(rank + 7 * number).random())
        options = {"want_carry": number % 5 == 4, "cuts": rank != short}
        scan = lane.launch(HALO.name, states[rank], transitions[rank], **options)
        incoming, found = torch.zeros_like(states[0]), scan.wait()
        for other in ranks:
            assert other != rank or torch.equal(found, incoming), f"halo {number} of rank {rank}, {lane.reverse=}"
            incoming = fold(states[other], transitions[other], incoming)
        if number == 1 and rank == ranks[-1]:
            store.set(arrived, "")
        assert scan.carry is None or torch.equal(scan.carry_out(), incoming), f"carry {number} on rank {rank}"
    for lane in lanes:
        lane.worker.drain()


@pytest.mark.processes
def test_halos_in_one_kernel_go_one_hop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run_distributed(halos, 3, 6)


@pytest.mark.processes
@on_ranks(2)
def test_unusable_transport_is_refused_or_falls_back(rank: int, world_size: int) -> None:
    from zeco_train.sp.all_scan_config import AllScanConfig, AllScanTransport
    from zeco_train.sp.backend_registry import SPConfig
    from zeco_train.sp.exchange import connect

    groups = dist.new_group(), dist.new_group()
    config = SPConfig(all_scan=AllScanConfig(transport=AllScanTransport.symmetric))
    with pytest.raises(ConfigError, match=r"^sp.all_scan.transport=symmetric: needs GPUs .* on cpu\); or take"):
        connect(config, groups, timedelta(seconds=30), torch.device("cpu"))
    scan = connect(SPConfig(), groups, timedelta(seconds=30), torch.device("cpu"))
    state = torch.ones(1, 2, 5, 3)
    assert torch.equal(scan.states.launch(ScanRequest(state, torch.zeros(1, 2, 5))).wait(), state * rank)
    scan.drain()
    memory_of_one_rank(rank, groups[0])


def memory_of_one_rank(rank: int, group: dist.ProcessGroup) -> None:
    """Rank 1 is out of memory: rank 0 does not wait for it, and raises its error."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    from zeco_train.collectives.arena import allocate_symmetric

    def empty(size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if rank == 1:
            raise torch.OutOfMemoryError("no memory\nis left")
        return torch.empty(size, dtype=dtype, device=device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_memory, "empty", empty)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(symmetric_memory, "rendezvous", lambda *_: pytest.fail("rank 0 waits for rank 1"))
        with pytest.raises(RuntimeError, match=r"^rank 1: no memory$"):
            allocate_symmetric(1 << 10, group, torch.device("cpu"))


@pytest.mark.processes
@on_ranks(2)
def test_transport_fallback_is_logged_once(rank: int, world_size: int) -> None:
    """Not once per direction; nothing is logged for a scan over one rank."""
    from zeco_train.collectives.cost_model import Link
    from zeco_train.collectives.worker import ScanSpec
    from zeco_train.sp import scan_choice, zeco
    from zeco_train.sp.backend_registry import SPConfig
    from zeco_train.sp.exchange import connect

    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan_choice, "request_problem", lambda *_: "K=4096, V=8")
        patch.setattr(ScanSpec, "over", lambda *_: lambda request: None)
        patch.setattr(zeco, "scan_alone", lambda _: None)
        patch.setattr(scan_choice.logger, "warning", lambda text, *values: said.append(text % values))
        patch.setattr(scan_choice.logger, "info", lambda text, *values: said.append(text % values))
        patch.setattr(scan_choice.ScanChooser, "link", lambda *_: Link.symmetric)
        for ranks in ([0, 1], [rank]):
            groups = [dist.new_group(ranks, use_local_synchronization=True) for _ in range(2)]
            scan = connect(SPConfig(), (groups[0], groups[1]), timedelta(seconds=30)).states
            for reverse in (False, True):
                scan.launch(ScanRequest(torch.ones(1, 2, 5, 3), torch.zeros(1, 2, 5), reverse))
    fallbacks, rest = said[:1], said[1:]
    assert len(said) == (0 if rank > 0 else 3), said
    assert all(text.endswith("symmetric memory has no kernel for K=4096, V=8") for text in fallbacks)
    assert all(text.startswith("all-scan of 0.00012 MB over 2 ranks: chain") for text in rest)
