"""Exposed communication: how long compute waits for scans, and for messages of softmax attention.

A scan that completes before its `wait` costs nothing. The rest is measured: on CPUs the wall time for which `wait`,
`finish` and `carry_out` block their caller, on CUDA the time between two events on the caller's stream, right before
and right after such a call. This includes waiting for a late peer, and all of LASP-1's communication.

CUDA events are read once the device has passed them, never waited for. Two consecutive events are 1 to 2 µs apart, so
a scan reads that much even if nothing is exposed. A CUDA graph has its events in it: each replay records them anew, and
of several replays before a reading the last one counts for all.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from zeco_train.ops.seam import LaunchedScan

T = TypeVar("T")
Events = tuple[torch.cuda.Event, torch.cuda.Event]


class ExposedMeter:
    """Accumulates the time that compute waits. What is launched outside of `measuring` is not measured."""

    def __init__(self) -> None:
        self._seconds: float | None = None
        self._recorded: deque[Events] = deque()
        # Reused: creating an event costs more than recording one.
        self._free: list[Events] = []
        # Of the graph that is being captured, and of the graphs replayed since the last `take`.
        self._captured: list[Events] = []
        self._replayed: list[list[Events]] = []

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure scans that are launched inside, and messages of softmax attention that are waited for inside."""
        MEASURING.append(self)
        try:
            yield
        finally:
            MEASURING.remove(self)

    def take(self) -> float | None:
        """Seconds of waiting since the last call; None if no wait was measured. Does not synchronise with the device.

        Pending events count next time; those of a graph count only if the device has passed them, so call it after the
        last replay's end and before the next one.
        """
        for waits in self._replayed:
            if waits[-1][1].query():
                self._add(sum(before.elapsed_time(after) for before, after in waits) / 1e3)
        self._replayed.clear()
        while self._recorded and self._recorded[0][1].query():
            events = self._recorded.popleft()
            self._add(events[0].elapsed_time(events[1]) / 1e3)
            self._free.append(events)
        seconds, self._seconds = self._seconds, None
        return seconds

    def timed(self, call: Callable[[], T], device: torch.device) -> T:
        """Run and time a call that waits for communication."""
        if device.type != "cuda":
            started = time.perf_counter()
            result = call()
            self._add(time.perf_counter() - started)
            return result
        # Always recorded: the host does not know whether the device will have to wait.
        if is_captured := torch.cuda.is_current_stream_capturing():
            before, after = _timing_event(external=True), _timing_event(external=True)
        else:
            before, after = self._free.pop() if self._free else (_timing_event(), _timing_event())
        stream = torch.cuda.current_stream(device)
        before.record(stream)
        result = call()
        after.record(stream)
        (self._captured if is_captured else self._recorded).append((before, after))
        return result

    def take_captured(self) -> list[Events]:
        """The events of the waits that were captured since the last call, for `add_replay`."""
        captured, self._captured = self._captured, []
        return captured

    def add_replay(self, events: list[Events]) -> None:
        """Count a replay of a graph with these events."""
        if events:
            self._replayed.append(events)

    def _add(self, seconds: float) -> None:
        self._seconds = (self._seconds or 0.0) + seconds


# Not of a thread: a backward pass may run on another one.
MEASURING: list[ExposedMeter] = []


def active_meter() -> ExposedMeter | None:
    """The meter that is inside of `measuring`."""
    return MEASURING[-1] if MEASURING else None


def run_wait(call: Callable[[], T], device: torch.device) -> T:
    """Run a call that waits for communication beside the scans; the meter that is inside of `measuring` times it."""
    meter = active_meter()
    return call() if meter is None else meter.timed(call, device)


class MeteredScan:
    """A scan whose calls a meter times, `finish` only if it waits for communication."""

    def __init__(self, scan: LaunchedScan, device: torch.device, meter: ExposedMeter, finish_waits: bool) -> None:
        self._scan, self._device, self._meter, self._finish_waits = scan, device, meter, finish_waits

    def wait(self) -> Tensor:
        return self._meter.timed(self._scan.wait, self._device)

    def finish(self) -> None:
        if self._finish_waits:
            self._meter.timed(self._scan.finish, self._device)
        else:
            self._scan.finish()

    def carry_out(self) -> Tensor:
        return self._meter.timed(self._scan.carry_out, self._device)


def _timing_event(external: bool = False) -> torch.cuda.Event:
    # `external`: a graph records it in each replay.
    return torch.cuda.Event(enable_timing=True, external=external)
