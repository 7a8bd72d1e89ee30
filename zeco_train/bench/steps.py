"""Timing whole steps: contenders take turns, a block of steps each, and a block is timed twice.

The host's clock says how long a block took, from a device that has nothing to do to one that has done all: throughput
is from the median block, since a shared machine stops now and then for longer than a step. Events after each step say
how long each took: median and spread are from those. On CPUs the host's clock says both.
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

from zeco_train.bench.check import check_results
from zeco_train.bench.samples import Row, Summary
from zeco_train.bench.session import Session
from zeco_train.sp.backend import ScanBackend

Mark = torch.cuda.Event | float
# Blocks of steps that each contender's are cut into.
ROUNDS = 4


@dataclass
class Contender:
    """What takes part in a comparison.

    Attributes:
        name: of the variant.
        step: a whole optimizer step, the so-manieth; returns the mean loss, of all ranks' tokens or of its own.
        scan: whose exposed communication is measured.
        samples: ms of each timed step on this rank.
        seconds: of a step, the mean of each block on this rank, by the host's clock.
        first_seconds: of the first step, with all that is compiled and tuned in it.
        exposed: seconds for which compute waited for scans in all timed steps on this rank.
        loss: of the last step.
        peak_gb: of device memory.
        held_gb: of device memory, by buffers of its own, for as long as it is there.
    """

    name: str
    step: Callable[[int], float | Tensor]
    scan: ScanBackend | None = None
    samples: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    first_seconds: float = 0.0
    exposed: float | None = None
    loss: float | Tensor = math.nan
    peak_gb: float | None = None
    held_gb: float = 0.0

    def as_row(self, session: Session) -> Row:
        """By the names that results.json has, the slowest rank counting. Collective.

        Raises:
            WrongResultError: the last loss is not finite.
        """
        by_rank = session.gather(self.samples)
        seconds = [max(block) for block in zip(*session.gather(self.seconds), strict=True)]
        loss = sum(session.gather(float(self.loss))) / session.world_size
        # One that is not finite differs from itself.
        check_results(self.name, session.rank, {"the last loss": (torch.tensor(loss),) * 2}, 0.0)
        exposed = [of_rank for of_rank in session.gather(self.exposed) if of_rank is not None]
        return {
            "variant": self.name,
            **Summary.of(by_rank).as_row(),
            "wall_ms": 1e3 * statistics.median(seconds),
            "exposed_ms": 1e3 * max(exposed) / len(self.samples) if exposed else None,
            "peak_gb": max(session.gather(self.peak_gb or 0.0)) or None,
            "first_step_seconds": max(session.gather(self.first_seconds)),
            "loss": loss,
            "samples_ms_by_rank": by_rank,
            "seconds_by_block": seconds,
        }


def time_in_turns(
    contenders: Sequence[Contender],
    warmup: int,
    steps: int,
    session: Session,
    kept: Callable[[], float] = lambda: 0.0,
) -> int:
    """Warm up, then time all contenders in turns; what was measured is theirs then. Collective.

    Args:
        kept: seconds of the session's budget that are for what comes after.

    Returns:
        The steps of each: fewer than asked for where another round would not end within the session's budget.
    """
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
                contender.step(next(numbers))  # finds what the one before it has left
            _block(contender, count, numbers, session)
        done += count
        if not session.within_budget(time.monotonic() - started + kept()):
            break
    return done


def in_rounds(steps: int) -> Iterator[int]:
    """The steps of each round; the larger ones first, none is 0."""
    for index in range(min(ROUNDS, steps)):
        yield steps // ROUNDS + (index < steps % ROUNDS)


def _block(contender: Contender, count: int, numbers: Iterator[int], session: Session) -> None:
    """Time so many steps."""
    session.settle()
    if contender.scan is not None:
        contender.scan.exposed.take()
    dist.barrier()
    if session.on_cuda:
        torch.cuda.reset_peak_memory_stats()
    started, marks = time.perf_counter(), [_mark(session)]
    for _ in range(count):
        contender.loss = contender.step(next(numbers))
        marks.append(_mark(session))
    session.settle()
    contender.seconds.append((time.perf_counter() - started) / count)
    contender.samples += [_milliseconds(*pair) for pair in itertools.pairwise(marks)]
    if contender.scan is not None and (exposed := contender.scan.exposed.take()) is not None:
        contender.exposed = (contender.exposed or 0.0) + exposed
    if session.on_cuda:
        contender.peak_gb = max(contender.peak_gb or 0.0, torch.cuda.max_memory_allocated() / 1e9)


def _mark(session: Session) -> Mark:
    if not session.on_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(start: Any, end: Any) -> float:
    """Between two marks, which are of one kind."""
    return start.elapsed_time(end) if isinstance(start, torch.cuda.Event) else 1e3 * (end - start)
