"""Timing of operations: all variants in turn, synchronised ranks, cold caches, a device that never runs out of work.

A run on CUDA is: synchronise; overwrite a buffer larger than the L2 cache, as often as keeps the device busy while the
host launches the run; a barrier on the device (an all-reduce of one number), so that ranks start together; event, run,
event. So neither launch overhead nor a rank's late start is included. A run's time is that of its slowest rank.
Variants take turns, a different one first in each round, so that changes on the machine affect all of them.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zeco_train.bench.config import RunsConfig
from zeco_train.bench.samples import Row, Summary
from zeco_train.bench.session import Session
from zeco_train.errors import CommunicationError, first_cause

_MIB = 1 << 20
_MAX_FLUSHES = 400
# For launching the flushes and the barrier, which no warm-up measures.
_MS_OF_BARRIER = 0.3


@dataclass(frozen=True)
class Subject:
    """An operation to be timed.

    Attributes:
        name, mode: `mode` is `eager` or `graph`.
        run: launches the work on the current stream; on CPUs runs it. Returns a tensor of its result.
        prepare: called before each run, untimed.
        operations: number of operations per `run`; times are per operation.
        repeatable: running `run` twice without `prepare` gives the same result.
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    mode: str = "eager"
    operations: int = 1
    repeatable: bool = True


class Runner:
    """Times subjects with the settings of `config`."""

    def __init__(self, config: RunsConfig, session: Session) -> None:
        self._session, self._warmup, self._runs = session, config.warmup, config.runs
        size = config.flush_mb * _MIB
        if size < 0:
            size = 64 * _MIB
            if session.on_cuda:
                size = max(size, 4 * torch.cuda.get_device_properties(session.device).L2_cache_size)
        self._buffer = torch.empty(size, dtype=torch.uint8, device=session.device)
        self._token = torch.zeros(1, device=session.device)
        self._flush_ms = self._time_flush() if session.on_cuda and size else 0.0

    def rows(self, subjects: Sequence[Subject]) -> list[Row]:
        """Warm up, then time all subjects in turn; a row each. Collective: the same subjects on all ranks.

        `host_ms` is the launch time of a run on the slowest host, from the first flush on, at its 90th percentile;
        `cover_ms` the time for which the device was kept busy meanwhile.
        """
        flushes = [self._warm_up(subject) for subject in subjects]
        samples: list[list[Callable[[], float]]] = [[] for _ in subjects]
        issues: list[list[float]] = [[] for _ in subjects]
        timed = self._timed_cuda if self._session.on_cuda else self._timed_cpu
        # A collection within a run would delay its launch, and with it every other rank.
        gc.collect()
        gc.disable()
        try:
            for turn in range(self._runs):
                for i in range(len(subjects)):
                    index = (turn + i) % len(subjects)
                    sample, issue_ms = timed(subjects[index], flushes[index])
                    samples[index].append(sample)
                    issues[index].append(issue_ms)
        finally:
            gc.enable()
        if self._session.on_cuda:
            torch.cuda.synchronize()
        own = [[sample() for sample in of_subject] for of_subject in samples]
        hosts = self._session.gather([sorted(of_subject)[len(of_subject) * 9 // 10] for of_subject in issues])
        rows = []
        for index, (subject, by_rank) in enumerate(
            zip(subjects, zip(*self._session.gather(own), strict=True), strict=True)
        ):
            row: Row = {"variant": subject.name, "mode": subject.mode, **Summary.of(by_rank).as_row()}
            row |= {"host_ms": max(host[index] for host in hosts), "cover_ms": flushes[index] * self._flush_ms}
            row["samples_ms_by_rank"] = list(by_rank)
            if 0 < row["cover_ms"] < row["host_ms"]:
                row["note"] = "bound by the host"
            rows.append(row)
        return rows

    def _warm_up(self, subject: Subject) -> int:
        # Returns the number of flushes that cover a launch.
        seconds = []
        for _ in range(self._warmup):
            subject.prepare()
            self._session.settle()
            start = time.perf_counter()
            subject.run()
            seconds.append(time.perf_counter() - start)
        self._session.settle()
        # The first runs compile and connect.
        host_ms = max(self._session.gather(1e3 * min(seconds[-3:])))
        if not self._flush_ms:
            return 1
        # Twice the measured time, since hosts are less steady than devices and launch other work meanwhile.
        wanted = math.ceil((2 * host_ms + _MS_OF_BARRIER) / self._flush_ms)
        return min(max(wanted, 1), _MAX_FLUSHES)

    def _timed_cuda(self, subject: Subject, flushes: int) -> tuple[Callable[[], float], float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        subject.prepare()
        issued = time.perf_counter()
        for _ in range(flushes):
            self._buffer.fill_(1)
        dist.all_reduce(self._token)
        start.record()
        subject.run()
        end.record()
        issue_ms = 1e3 * (time.perf_counter() - issued)
        # Read later: at this point the device has not reached the events.
        return lambda: start.elapsed_time(end) / subject.operations, issue_ms

    def _timed_cpu(self, subject: Subject, flushes: int) -> tuple[Callable[[], float], float]:
        subject.prepare()
        self._buffer.fill_(1)
        dist.barrier()
        start = time.perf_counter()
        subject.run()
        sample = 1e3 * (time.perf_counter() - start) / subject.operations
        # Otherwise pending sends of a scan would count towards the next one.
        self._session.drain()
        return lambda: sample, 0.0

    def _time_flush(self) -> float:
        for _ in range(3):
            self._buffer.fill_(1)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            self._buffer.fill_(1)
        end.record()
        torch.cuda.synchronize()
        # The same number on all ranks, so that all launch the same work.
        return max(self._session.gather(start.elapsed_time(end) / 20))


def capture_all(
    subjects: Iterable[Subject], operations: int, session: Session, tolerance: float
) -> tuple[list[Subject], list[Row]]:
    """A CUDA graph of each subject, created lazily; and a row for each subject that cannot be captured.

    Raises:
        WrongResultError: a graph's result differs from the uncaptured one by more than the tolerance on some rank.
    """
    captured, failed = [], []
    for subject in subjects:
        graph, problem = _capture(subject, operations, session, tolerance)
        if graph is None:
            failed.append({"variant": subject.name, "mode": "graph", "note": f"not captured: {problem}"})
            session.forget("graph")
        else:
            captured.append(graph)
    return captured, failed


def _capture(subject: Subject, operations: int, session: Session, tolerance: float) -> tuple[Subject | None, str]:
    # The graph; or None, and the reason why it cannot be captured.
    expected = None
    for _ in range(2):  # compile, connect and allocate before the capture
        subject.prepare()
        expected = subject.run()
    # A copy, since a subject may return a buffer that its next run overwrites.
    expected = expected.clone() if isinstance(expected, Tensor) else None
    subject.prepare()
    torch.cuda.synchronize()
    graph, result, problem = torch.cuda.CUDAGraph(), None, ""
    try:
        # Threads of autograd and NCCL's watchdog may make calls that a capture forbids.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(operations):
                result = subject.run()
    except (RuntimeError, CommunicationError) as error:
        problem = first_cause(error)
    torch.cuda.synchronize()
    # Captured on all ranks or on none: a replay is collective.
    problem = next((text for text in session.gather(problem) if text), "")
    if problem:
        return None, problem
    # `subject` stays alive with the graph, which holds addresses of its tensors.
    captured = Subject(subject.name, partial(_replay, graph, subject), subject.prepare, "graph", operations)
    if subject.repeatable and isinstance(result, Tensor) and expected is not None:
        for _ in range(2):
            captured.prepare()
            # A replay that writes nothing must not pass with the result of the one before.
            result.zero_()
            captured.run()
        torch.cuda.synchronize()
        session.check(f"{captured.name} in a CUDA graph", {"result": (result, expected)}, tolerance)
    return captured, ""


def _replay(graph: torch.cuda.CUDAGraph, captured: Subject) -> None:
    graph.replay()
