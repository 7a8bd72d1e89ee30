"""Exposed communication: which waits are measured, and on which rank."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.distributed import on_ranks, run_distributed
from tests.support.sp_reference import build_scans
from zeco_train.collectives import PendingScan
from zeco_train.collectives.wire import Wire
from zeco_train.config.schema import load_config
from zeco_train.distributed.mesh import init_mesh
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.seam import ScanRequest, StateScan
from zeco_train.ops.softmax.span import Span
from zeco_train.sp.attention.method_registry import METHODS, AttentionChoice, build_attention
from zeco_train.sp.backend import LocalScan
from zeco_train.sp.backend_registry import Backend, SPConfig
from zeco_train.sp.exchange import connect, connect_model
from zeco_train.sp.exposed import ExposedMeter, MeteredScan, active_meter

STATE = torch.ones(1, 2, 4, 4)
CPU = torch.device("cpu")
# Seconds by which a rank delays its peer. A busy machine lengthens single waits, and shortens those for a sleeping
# rank: of REPEATS measurements the longest counts for a waiting rank, the shortest for a rank that does not wait.
DELAY = 0.3
REPEATS = 3
# In the caller, and in the background.
NAMES = ("lasp1", "two_shot")


def run_scan(scan: StateScan, before: float, between: float, *, reverse: bool = False, carry: bool = False) -> Tensor:
    """A scan after `before` seconds of compute, with `between` seconds of compute beside it."""
    time.sleep(before)
    pending = scan.launch(ScanRequest(STATE, torch.zeros(1, 2, 4), reverse, want_carry=carry))
    time.sleep(between)
    incoming = pending.wait()
    pending.finish()
    if carry:
        pending.carry_out()
    return incoming


def measured(scan: StateScan, before: float, between: float = 0.0, **options: bool) -> float | None:
    dist.barrier()
    meter = ExposedMeter()
    with meter.measuring():
        run_scan(scan, before, between, **options)
    return meter.take()


def waits(rank: int, world_size: int, name: str) -> dict[str, list[float | None]]:
    scan = build_scans((0, 1), name)[name].states
    run_scan(scan, 0.0, 0.0)
    run_scan(scan, 0.0, 0.0, reverse=True)
    # The second rank waits for the first one's state; the first one for the second's; the state arrives before it is
    # needed; all ranks wait for the carry of the last rank.
    first, second = (DELAY if rank == 0 else 0.0), (DELAY if rank == 1 else 0.0)
    results = {
        "forward": [measured(scan, first) for _ in range(REPEATS)],
        "reverse": [measured(scan, second, reverse=True) for _ in range(REPEATS)],
        "hidden": [measured(scan, first, 0.0 if rank == 0 else 2 * DELAY) for _ in range(REPEATS)],
        "carry": [measured(scan, second, carry=True) for _ in range(REPEATS)],
    }
    meter = ExposedMeter()
    with meter.measuring():
        pass
    run_scan(scan, 0.0, 0.0)
    results["outside"] = [meter.take()]
    scan.drain()
    return results


@pytest.mark.processes
def test_exposed_time_is_measured_on_waiting_rank() -> None:
    # All at once, since ranks mostly sleep.
    with ThreadPoolExecutor() as threads:
        found = [*threads.map(lambda name: run_distributed(waits, 2, name), NAMES)]
    for name, (first, second) in zip(NAMES, found, strict=True):
        assert max(second["forward"]) > 0.7 * DELAY, name
        assert max(first["reverse"]) > 0.7 * DELAY, name
        assert min(second["reverse"]) < 0.5 * DELAY, name
        assert max(first["carry"]) > 0.7 * DELAY, name
        # lasp1 sends in `finish`, and gloo may block a sender until the receiver is ready.
        if name != "lasp1":
            assert min(first["forward"]) < 0.5 * DELAY, name
            assert min(first["hidden"]) < 0.5 * DELAY, name
            assert min(second["hidden"]) < 0.5 * DELAY, name
        assert first["outside"] == [None], name


def attention_waits(rank: int, world_size: int) -> dict[str, dict[str, list[float | None]]]:
    """Forward and backward passes of each method, which a meter measures; the first rank is late."""
    results: dict[str, dict[str, list[float | None]]] = {}
    q, k, v, do = (torch.ones(1, 2, heads, 4) for heads in (2, 2, 2, 2))
    span = Span(2 * rank, 2 * rank + 2)
    for name, spec in METHODS.items():
        meter = ExposedMeter()
        method = build_attention(spec, dist.new_group(range(world_size)), timedelta(seconds=10), CPU)
        attended = method.forward(q, k, v, span, (0, 2, 4), 1.0)
        results[name] = {"outside": [meter.take()], "forward": [], "backward": []}
        for way in ("forward", "backward") * REPEATS:
            dist.barrier()
            with meter.measuring():
                time.sleep(DELAY if rank == 0 else 0.0)
                if way == "forward":
                    method.forward(q, k, v, span, (0, 2, 4), 1.0)
                else:
                    method.backward(do, q, k, v, attended, span, (0, 2, 4), 1.0)
            results[name][way].append(meter.take())
    return results


@pytest.mark.processes
def test_waits_of_softmax_attention_count_as_exposed() -> None:
    first, second = run_distributed(attention_waits, 2)
    for name in METHODS:
        for way in ("forward", "backward"):
            assert max(second[name][way]) > 0.7 * DELAY, (name, way)
            assert min(first[name][way]) < 0.5 * DELAY, (name, way)
        assert first[name]["outside"] == second[name]["outside"] == [None], name


@pytest.mark.processes
@on_ranks(2)
def test_ranks_of_softmax_attention_are_connected_before_the_first_step(rank: int, world_size: int) -> None:
    """By what is on the wire while a hybrid's exchange is built, and in its first forward pass."""
    mesh = init_mesh(Launch(rank, world_size, rank), world_size, CPU, timedelta(seconds=60))
    model = load_config(["model.attn.every=2"]).model
    post = Wire._start
    for name in METHODS:
        messages: list[str] = []

        def start(self: Wire, call: Any, what: str, *rest: Any, seen: list[str] = messages) -> Any:
            if self.operation.startswith("softmax attention"):
                seen.append(what)
            return post(self, call, what, *rest)

        with mock.patch.object(Wire, "_start", start):
            scan = connect_model(SPConfig(attention=AttentionChoice[name]), model, mesh)
            messages.append("built")
            q = torch.ones(1, 2, 2, 4)
            assert scan.attention is not None
            scan.attention.forward(q, q, q, Span(2 * rank, 2 * rank + 2), (0, 2, 4), 1.0)
        scan.drain()
        assert messages[:2] == ["all-to-all of a first message", "built"], name
        assert "all-to-all of a first message" not in messages[1:], name


@pytest.mark.processes
@on_ranks(1)
def test_single_rank_has_no_exposed_time(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    for scan in (LocalScan(), connect(SPConfig(Backend.zeco), (group, group), timedelta(seconds=10)).states):
        assert measured(scan, 0.0, carry=True) is None


class SlowScan:
    """Sleeps in each call."""

    def wait(self) -> Tensor:
        time.sleep(0.02)
        return STATE

    def finish(self) -> None:
        time.sleep(0.03)

    def carry_out(self) -> Tensor:
        time.sleep(0.04)
        return STATE


@pytest.mark.processes
def test_exposed_time_sums_all_calls_and_is_taken_once() -> None:
    meter = ExposedMeter()
    assert meter.take() is None
    with pytest.raises(RuntimeError, match="a peer"), meter.measuring():
        raise RuntimeError("a peer is gone")
    assert active_meter() is None
    with meter.measuring():
        scans = [MeteredScan(SlowScan(), CPU, meter, finish_waits=True) for _ in range(2)]
    # Scans launched inside `measuring` are measured even if the waits come later.
    began = time.perf_counter()
    for scan in scans:
        assert scan.wait() is STATE
        scan.finish()
        assert scan.carry_out() is STATE
    assert 2 * 0.09 <= (meter.take() or 0.0) <= time.perf_counter() - began
    assert meter.take() is None


class FakeEvent:
    """A CUDA event of a fake device: complete once `FakeEvent.passed` has reached its time."""

    clock = 0.0
    passed = -1.0
    made = 0

    def __init__(self, enable_timing: bool = False, external: bool = False) -> None:
        assert enable_timing
        self.external = external
        FakeEvent.made += 1

    def record(self, stream: object) -> None:
        assert stream == "the stream of cuda:1"
        self.at = FakeEvent.clock

    def query(self) -> bool:
        return self.at <= FakeEvent.passed

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.query(), "an event that the device has not passed has no time"
        return end.at - self.at


class DeviceScan:
    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = milliseconds

    def wait(self) -> Tensor:
        FakeEvent.clock += self.milliseconds
        return STATE

    def finish(self) -> None:
        FakeEvent.clock += 1.0

    def carry_out(self) -> Tensor:
        raise AssertionError


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Fake events; whether the stream is being captured."""
    state = [False]
    for name, value in (("clock", 0.0), ("passed", -1.0), ("made", 0)):
        monkeypatch.setattr(FakeEvent, name, value)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
    return state


def device_steps(meter: ExposedMeter, *milliseconds: float) -> None:
    with meter.measuring():
        for value in milliseconds:
            scan = MeteredScan(DeviceScan(value), torch.device("cuda", 1), meter, finish_waits=True)
            assert scan.wait() is STATE
            FakeEvent.clock += 100.0  # compute between the two calls is not waiting
            scan.finish()


def test_device_times_are_read_after_events_complete(capturing: list[bool]) -> None:
    meter = ExposedMeter()
    device_steps(meter, 5.0, 7.0)
    assert meter.take() is None
    FakeEvent.passed = 110.0  # within the second wait
    assert meter.take() == pytest.approx(0.006)
    FakeEvent.passed = FakeEvent.clock
    assert meter.take() == pytest.approx(0.008)
    assert meter.take() is None
    assert FakeEvent.made == 2 * 4
    device_steps(meter, 1.0, 2.0)
    FakeEvent.passed = FakeEvent.clock
    assert meter.take() == pytest.approx(0.005)
    assert FakeEvent.made == 2 * 4, "events are used again"


def test_waits_in_a_graph_are_read_after_its_replays(capturing: list[bool]) -> None:
    meter = ExposedMeter()
    capturing[0] = True
    device_steps(meter, 5.0)
    captured = meter.take_captured()
    assert all(event.external for pair in captured for event in pair)  # type: ignore[attr-defined]
    # A capture runs nothing.
    assert meter.take() is None
    assert meter.take_captured() == []
    for _ in range(3):
        meter.add_replay(captured)
    assert meter.take() is None, "the device has not passed them"
    FakeEvent.passed = FakeEvent.clock
    assert meter.take() is None, "what could not be read is not read later, from other replays' events"
    for _ in range(3):
        meter.add_replay(captured)
    assert meter.take() == pytest.approx(3 * 0.006)
    meter.add_replay([])
    assert meter.take() is None


def test_courier_scan_records_two_events(capturing: list[bool]) -> None:
    """Its `finish` does not communicate, so it needs no events."""
    meter, scan = ExposedMeter(), PendingScan(want_carry=False)
    scan.incoming.set_result(STATE)
    with meter.measuring():
        metered: Any = MeteredScan(scan, torch.device("cuda", 1), meter, finish_waits=False)
    metered.wait()
    metered.finish()
    assert FakeEvent.made == 2
