"""Diagnosis of a lost peer: which rank, in which step, in which operation; and a store that stops answering."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch.distributed as dist

from tests.support.commands import REPOSITORY
from zeco_train.errors import CommunicationError
from zeco_train.lifecycle import logs, watch
from zeco_train.lifecycle.join import Launch
from zeco_train.lifecycle.watch import BoundedStore, Watchdog
from zeco_train.system import background

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PERIOD_SECONDS", 0.02)
    # Fifty periods, enough for all threads on a busy machine.
    monkeypatch.setattr(watch, "LISTEN_SECONDS", 1.0)


@contextmanager
def watched(store: dist.Store, size: int, ranks: Iterable[int]) -> Iterator[list[Watchdog]]:
    """The watchdogs of some ranks of `size`."""
    alive = [Watchdog(Launch(rank, size, rank), store) for rank in ranks]
    try:
        yield alive
    finally:
        for rank in alive:
            rank.stop()


def test_documented_times_are_the_sums_of_the_constants() -> None:
    times = re.search(
        r"at the latest (\d+) s after `parallel.timeout_seconds`, and all other ranks have ended "
        r"at the latest (\d+) s after. A GPU that hangs takes (\d+) s longer, "
        r"a node with torchrun's store that is cut off (\d+) s",
        (REPOSITORY / "docs" / "training.md").read_text().replace("\n", " "),
    )
    assert times is not None
    dumps = 2 * logs.DUMP_SECONDS
    assert [*map(float, times.groups())] == [watch.REPORT_SECONDS, watch.END_SECONDS, dumps, watch.ANSWER_SECONDS]
    told = [float(seconds) for seconds in re.findall(r"(\d+) s (?:after the timeout|\(`END_)", str(watch.__doc__))]
    assert told == [watch.REPORT_SECONDS, watch.END_SECONDS]


def test_silent_peer_is_reported_with_step_and_operation() -> None:
    """Rank 1 sends heartbeats, rank 2 never has; rank 0 fails in a scan, whose error has no step."""
    with watched(dist.HashStore(), 3, range(2)) as alive:
        alive[0].enter("step 7, micro-batch 2 of 4")
        error = alive[0].diagnose(CommunicationError(0, "all_scan_chain forward: receive of block 0", "closed", 1))
    assert str(error).startswith(
        "rank 0: step 7, micro-batch 2 of 4, all_scan_chain forward: receive of block 0: rank 2 no longer answers"
    )
    assert "rank 1" not in str(error)


@pytest.mark.parametrize("lost", [False, True])
def test_terminated_rank_distinguishes_lost_peer_from_stop(lost: bool) -> None:
    """Rank 0 has received SIGTERM. If rank 1 still sends heartbeats, the launcher was stopped; no rank is at fault."""
    with watched(dist.HashStore(), 2, range(1 if lost else 2)) as alive:
        alive[0].is_terminated = True
        error = alive[0].diagnose(CommunicationError(0, "start", "terminated by the launcher"))
    assert error.exit_code == (CommunicationError.exit_code if lost else watch.TERMINATED)
    assert ("rank 1 no longer answers" in str(error)) == lost


class CountingStore:
    """A store that counts its requests by method."""

    def __init__(self) -> None:
        self.store, self.requests = dist.HashStore(), Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.requests[name] += 1
        return getattr(self.store, name)


@pytest.mark.parametrize("is_lost", [False, True])
def test_one_rank_reads_heartbeats_and_all_get_diagnosis(is_lost: bool) -> None:
    """Rank 2 of 8 is silent; with `is_lost`, the rank that claimed the diagnosis is lost too; another takes over."""
    store, ranks = CountingStore(), (0, 1, 3, 4, 5, 6, 7)
    with watched(cast(dist.Store, store), 8, ranks) as alive, ThreadPoolExecutor(len(alive)) as threads:
        for rank in alive:
            rank.enter("step 7, optimizer")
        while not store.check([f"zeco/heartbeat/{rank}" for rank in ranks]):
            time.sleep(0.01)
        if is_lost:
            store.add("zeco/checking/0", 1)
        errors = [*threads.map(lambda rank: rank.diagnose(RuntimeError("late")), alive)]
    assert {str(error).partition(": ")[2] for error in errors} == {
        "step 7, optimizer: rank 2 no longer answers (killed, stopped or unreachable; last seen in start)"
    }
    # Two reads of all heartbeats by one rank; one read of the diagnosis by each of the others.
    assert (store.requests["multi_get"], store.requests["get"]) == (2, len(alive) - 1)


def test_activity_is_not_repeated_in_diagnosis() -> None:
    watchdog = Watchdog(Launch(0, 2, 0), None)
    watchdog.enter("step 7, optimizer")
    error = watchdog.diagnose(CommunicationError(0, "step 7, optimizer", "silent for 10 s", 1))
    assert str(error) == "rank 0: step 7, optimizer: with rank 1: silent for 10 s"


def test_one_rank_claims_reporting_and_peers_see_it() -> None:
    with watched(dist.HashStore(), 2, range(2)) as (first, second):
        assert not first.board.is_reported()
        assert first.board.claim_reporting()
        assert second.board.is_reported()
        assert not second.board.claim_reporting()


class SilentStore:
    """Answers until the network drops its packets."""

    def __init__(self) -> None:
        self.store, self.requests = dist.HashStore(), 0
        self.is_cut, self.has_ended = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        def request(*arguments: Any) -> Any:
            self.requests += 1
            if self.is_cut.is_set():
                self.has_ended.wait()
            return getattr(self.store, name)(*arguments)

        return request


@pytest.fixture
def silent() -> Iterator[SilentStore]:
    """No thread is left waiting."""
    store = SilentStore()
    yield store
    store.has_ended.set()
    assert background.stop_all() == []


def test_requests_are_answered_and_errors_passed_on() -> None:
    store = BoundedStore(dist.HashStore(), 5.0)
    assert [store.add("n", 2), store.add("n", 3)] == [2, 5]
    store.set("text", "a")
    store.append("text", "b")
    assert (store.get("text"), store.multi_get(["text", "n"])) == (b"ab", [b"ab", b"5"])
    assert (store.check(["text"]), store.check(["none"])) == (True, False)
    broken = SilentStore()
    broken.store = cast(Any, None)
    with pytest.raises(AttributeError):
        BoundedStore(cast(dist.Store, broken), 5.0).get("n")
    assert background.stop_all() == []


def test_stopped_store_starts_again_for_a_later_request() -> None:
    store = BoundedStore(dist.HashStore(), 5.0)
    store.set("n", "1")
    for _ in range(3):
        assert background.stop_all() == []
        assert "store" not in {thread.name for thread in threading.enumerate()}
        assert store.get("n") == b"1"
    assert background.stop_all() == []


def test_silent_store_fails_in_bounded_time_and_then_at_once(silent: SilentStore) -> None:
    store = BoundedStore(cast(dist.Store, silent), 0.3)
    store.set("n", "1")
    silent.is_cut.set()
    started = time.monotonic()
    for _ in range(20):
        with pytest.raises(dist.DistNetworkError, match="no answer within"):
            store.get("n")
    assert 0.3 <= time.monotonic() - started < 3.0
    assert silent.requests == 2
    # The process must not finalise the interpreter now.
    assert background.stop_all(0.1) == ["store"]


def test_rank_that_is_cut_off_names_the_store_and_ends(silent: SilentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "ANSWER_SECONDS", 0.5)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    rank = Watchdog(Launch(1, 2, 1), cast(dist.Store, silent))
    silent.is_cut.set()
    started = time.monotonic()
    found = rank.diagnose(CommunicationError(1, "all-scan", "no message within 10 s", 0))
    assert "the launcher's store at node0 is gone, and so may be its node" in str(found)
    # What a rank does before it exits.
    rank.report_failure("out of memory")
    rank.board.append("left")
    assert rank.board.claim_reporting() is False
    assert rank.board.is_reported()
    assert time.monotonic() - started < 10.0
    rank.stop()
