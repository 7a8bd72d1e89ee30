"""Timing: single operations by `Runner`, whole steps by `time_in_turns`; variants take turns in both.

A run of an operation on CUDA is: synchronise; overwrite a buffer larger than the L2 cache, as often as keeps the device
busy while the host launches the run; a barrier on the device (an all-reduce of one number), so that ranks start
together; event, run, event. So neither launch overhead nor a rank's late start is included. A run's time is that of its
slowest rank. A different variant is first in each round, so that changes on the machine affect all of them.

Of steps each variant runs a block, and each block is timed several times. The host's clock measures a block, from an
idle device to an idle device: throughput is from the median block, since a shared machine occasionally stalls for
longer than a step. Events after each step give step times: their median and spread. On CPUs the host's clock measures
both.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from zeco_train.bench.config import RunsConfig
from zeco_train.bench.session import Row, Session, check_results
from zeco_train.bench.variants import Variant
from zeco_train.errors import CommunicationError, first_cause
from zeco_train.sp.exposed import ExposedMeter
from zeco_train.training.graphs import WARM_UP, StepGraphs

_MIB = 1 << 20
_MAX_FLUSHES = 400
# For launching the flushes and the barrier, which no warm-up measures.
_MS_OF_BARRIER = 0.3
Mark = torch.cuda.Event | float
# Blocks of steps per contender.
ROUNDS = 4
# Fragments, and what the first launches allocate.
_ROOM = 1.2


@dataclass(frozen=True)
class Summary:
    """Times of one variant in ms, by the slowest rank of each run; percentiles are interpolated."""

    median: float
    p10: float
    p90: float
    min: float
    max: float
    runs: int

    @classmethod
    def of(cls, by_rank: Sequence[Sequence[float]]) -> Summary:
        """Summarise samples [ranks][runs] in ms; raises `ValueError` without any, or if numbers differ."""
        slowest = slowest_rank(by_rank)
        p10, median, p90 = (float(np.percentile(slowest, q)) for q in (10, 50, 90))
        return cls(median, p10, p90, min(slowest), max(slowest), len(slowest))

    def as_row(self) -> Row:
        """Fields by their names in results.json."""
        return {name if name == "runs" else f"{name}_ms": value for name, value in asdict(self).items()}


def slowest_rank(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Each run's time on its slowest rank: [ranks][runs] → [runs]."""
    if not by_rank or not by_rank[0]:
        raise ValueError("no samples")
    return [max(run) for run in zip(*by_rank, strict=True)]


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


@dataclass
class Contender:
    """A variant in a comparison of whole steps.

    Attributes:
        step: runs the optimizer step of a given number; returns the mean loss, of all ranks' tokens or of its own.
        meter: of its exposed communication.
        samples: ms of each timed step on this rank.
        launching: seconds after which the host has launched each step, of all steps on this rank; empty: not measured.
        seconds: per step, the mean of each block on this rank, by the host's clock.
        first_seconds: duration of the first step, including compilation and autotuning.
        exposed: seconds that compute waited for scans in all timed steps on this rank.
        loss: of the last step.
        held_gb: device memory of its own buffers or graphs, held while others run.
        peak_gb: without what other contenders held.
        graphs: that replay its steps.
    """

    variant: Variant
    step: Callable[[int], float | Tensor]
    meter: ExposedMeter | None = None
    samples: list[float] = field(default_factory=list)
    launching: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    first_seconds: float = 0.0
    exposed: float | None = None
    loss: float | Tensor = math.nan
    peak_gb: float | None = None
    held_gb: float = 0.0
    graphs: StepGraphs | None = None

    @property
    def name(self) -> str:
        return self.variant.name

    def as_row(self, session: Session) -> Row:
        """Fields by their names in results.json, by the slowest rank. Collective.

        Raises:
            WrongResultError: the last loss is not finite.
        """
        by_rank = session.gather(self.samples)
        seconds = [max(block) for block in zip(*session.gather(self.seconds), strict=True)]
        loss = sum(session.gather(float(self.loss))) / session.world_size
        # A non-finite loss: NaN differs from itself.
        check_results(self.name, session.rank, {"the last loss": (torch.tensor(loss),) * 2}, 0.0)
        exposed = [of_rank for of_rank in session.gather(self.exposed) if of_rank is not None]
        return {
            "variant": self.name,
            **Summary.of(by_rank).as_row(),
            "wall_ms": 1e3 * statistics.median(seconds),
            "host_ms": max(session.gather(self._host_ms())) or None,
            "exposed_ms": 1e3 * max(exposed) / len(self.samples) if exposed else None,
            "peak_gb": max(session.gather(self.peak_gb or 0.0)) or None,
            "first_step_seconds": max(session.gather(self.first_seconds)),
            "loss": loss,
            "samples_ms_by_rank": by_rank,
            "seconds_by_block": seconds,
        }

    def _host_ms(self) -> float:
        # Of the last steps, as many as are timed; 0 if not measured.
        last = self.launching[-len(self.samples) :]
        return 1e3 * statistics.median(last) if last else 0.0


def time_in_turns(
    contenders: Sequence[Contender],
    warmup: int,
    steps: int,
    session: Session,
    kept: Callable[[], float] = lambda: 0.0,
    what: str = "timing",
) -> int:
    """Warm up, then time all contenders in turns; stores the results in them. Collective.

    `kept` seconds of the session's budget are reserved for later measurements. Returns the number of steps per
    contender: less than requested if another round would exceed the budget. An error names `what` and the contender.
    If CUDA graphs of all do not fit the device, those of the others are freed before a contender's first step, and
    captured again in their turn.
    """
    # One count for all contenders: no two of their steps train on the same tokens.
    numbers = itertools.count()
    for contender in contenders:
        session.enter(f"{what}, {contender.name}")
        _make_room(contender, contenders, session)
        for index in range(warmup):
            started = time.perf_counter()
            contender.step(next(numbers))
            if index == 0:
                session.settle()
                contender.first_seconds += time.perf_counter() - started
    done = 0
    for turn, count in enumerate(in_rounds(steps)):
        started = time.monotonic()
        for index in range(len(contenders)):
            contender = contenders[(turn + index) % len(contenders)]
            others = [each for each in contenders if each is not contender]
            session.enter(f"{what}, {contender.name}")
            warm_again(contender, others, numbers, session)
            _block(contender, others, count, numbers, session)
        done += count
        if not session.within_budget(time.monotonic() - started + kept()):
            break
    return done


def in_rounds(steps: int) -> Iterator[int]:
    """The steps of each round, larger ones first; none is 0."""
    for index in range(min(ROUNDS, steps)):
        yield steps // ROUNDS + (index < steps % ROUNDS)


def warm_again(contender: Contender, others: Sequence[Contender], numbers: Iterator[int], session: Session) -> None:
    """Run the steps needed after those of others, whose data is in the caches, and for which its graphs may be gone."""
    _make_room(contender, others, session)
    launched = contender.graphs is not None and not contender.graphs.are_replays
    for _ in range(WARM_UP + 2 if launched else bool(others)):
        contender.step(next(numbers))


def _make_room(contender: Contender, others: Sequence[Contender], session: Session) -> None:
    # A step's launched passes, and the capture after them, take as much as another contender's graphs.
    graphs = [each.graphs for each in others if each.graphs is not None and each.graphs.are_replays]
    if contender.graphs is None or contender.graphs.are_replays or not graphs:
        return
    session.settle()
    torch.cuda.empty_cache()
    needed, (free, _) = max(sum(each.memory()) for each in graphs), torch.cuda.mem_get_info()
    if any(session.gather(free < _ROOM * needed)):
        for each in graphs:
            each.release()
        gc.collect()
        torch.cuda.empty_cache()


def _block(
    contender: Contender, others: Sequence[Contender], count: int, numbers: Iterator[int], session: Session
) -> None:
    session.settle()
    if contender.meter is not None:
        # Drop what warm-up steps have measured.
        contender.meter.take()
    dist.barrier()
    if session.on_cuda:
        torch.cuda.reset_peak_memory_stats()
    started, marks = time.perf_counter(), [mark(session)]
    for _ in range(count):
        contender.loss = contender.step(next(numbers))
        marks.append(mark(session))
    session.settle()
    contender.seconds.append((time.perf_counter() - started) / count)
    contender.samples += [milliseconds(*pair) for pair in itertools.pairwise(marks)]
    if contender.meter is not None and (exposed := contender.meter.take()) is not None:
        contender.exposed = (contender.exposed or 0.0) + exposed
    if session.on_cuda:
        peak = torch.cuda.max_memory_allocated() / 1e9
        if contender.graphs is not None:
            # The allocator does not see what replays use.
            contender.held_gb, used = (part / 1e9 for part in contender.graphs.memory())
            peak += used
        held = sum(each.held_gb if each.graphs is None else each.graphs.memory()[0] / 1e9 for each in others)
        contender.peak_gb = max(contender.peak_gb or 0.0, peak - held)


def mark(session: Session) -> Mark:
    """The present moment of the device: an event on the current stream; on CPUs the host's clock."""
    if not session.on_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: Any, end: Any) -> float:
    """Time between two marks of the same kind."""
    return start.elapsed_time(end) if isinstance(start, torch.cuda.Event) else 1e3 * (end - start)
