"""Timing whole steps: contenders take turns, a block of steps each, and a block is timed twice.

The host's clock measures a block, from an idle device to an idle device: throughput is from the median block, since a
shared machine occasionally stalls for longer than a step. Events after each step give step times: their median and
spread. On CPUs the host's clock measures both.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeco_train.bench.samples import Row, Summary, check_results
from zeco_train.bench.session import Session
from zeco_train.bench.variants import Variant
from zeco_train.sp.exposed import ExposedMeter
from zeco_train.training.graphs import StepGraphs

Mark = torch.cuda.Event | float
# Blocks of steps per contender.
ROUNDS = 4


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
        held_gb: device memory of its own buffers, held for its whole lifetime.
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
    contenders: Sequence[Contender], warmup: int, steps: int, session: Session, kept: Callable[[], float] = lambda: 0.0
) -> int:
    """Warm up, then time all contenders in turns; stores the results in them. Collective.

    `kept` seconds of the session's budget are reserved for later measurements. Returns the number of steps per
    contender: less than requested if another round would exceed the budget.
    """
    # One count for all contenders: no two of their steps train on the same tokens.
    numbers = itertools.count()
    for contender in contenders:
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
            if len(contenders) > 1:
                contender.step(next(numbers))  # warm up: caches hold the previous contender's data
            _block(contender, count, numbers, session)
        done += count
        if not session.within_budget(time.monotonic() - started + kept()):
            break
    return done


def in_rounds(steps: int) -> Iterator[int]:
    """The steps of each round, larger ones first; none is 0."""
    for index in range(min(ROUNDS, steps)):
        yield steps // ROUNDS + (index < steps % ROUNDS)


def _block(contender: Contender, count: int, numbers: Iterator[int], session: Session) -> None:
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
        peak = torch.cuda.max_memory_allocated()
        if contender.graphs is not None:
            # The allocator does not see what replays use.
            held, used = contender.graphs.memory()
            contender.held_gb, peak = held / 1e9, peak + used
        contender.peak_gb = max(contender.peak_gb or 0.0, peak / 1e9)


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
