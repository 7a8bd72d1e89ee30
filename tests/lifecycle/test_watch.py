"""Diagnosis of a lost peer: which rank, in which step, in which operation."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import pytest
import torch.distributed as dist

from zeco_train.errors import CommunicationError
from zeco_train.lifecycle import watch
from zeco_train.lifecycle.join import Launch
from zeco_train.lifecycle.watch import Watchdog

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_PERIOD_SECONDS", 0.02)
    # Fifty periods, enough for all threads on a busy machine.
    monkeypatch.setattr(watch, "_LISTEN_SECONDS", 1.0)


def test_silent_peer_is_reported_with_step_and_operation() -> None:
    """Rank 1 sends heartbeats, rank 2 never has; rank 0 fails in a scan, whose error has no step."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    alive = [Watchdog(Launch(rank, 3, rank), store) for rank in range(2)]
    alive[0].enter("step 7, micro-batch 2 of 4")
    error = alive[0].diagnose(CommunicationError(0, "all_scan_chain forward: receive of block 0", "closed", 1))
    for rank in alive:
        rank.stop()
    assert str(error).startswith(
        "rank 0: step 7, micro-batch 2 of 4, all_scan_chain forward: receive of block 0: rank 2 no longer answers"
    )
    assert "rank 1" not in str(error)


@pytest.mark.parametrize("lost", [False, True])
def test_terminated_rank_distinguishes_lost_peer_from_stop(lost: bool) -> None:
    """Rank 0 has received SIGTERM. If rank 1 still sends heartbeats, the launcher was stopped; no rank is at fault."""
    store = dist.HashStore()
    first = Watchdog(Launch(0, 2, 0), store)
    other = None if lost else Watchdog(Launch(1, 2, 1), store)
    first.is_terminated = True
    error = first.diagnose(CommunicationError(0, "start", "terminated by the launcher"))
    for rank in filter(None, (first, other)):
        rank.stop()
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
    store = CountingStore()
    alive = [Watchdog(Launch(rank, 8, rank), cast(dist.Store, store)) for rank in (0, 1, 3, 4, 5, 6, 7)]
    for rank in alive:
        rank.enter("step 7, optimizer")
    while not store.check([f"zeco/heartbeat/{rank}" for rank in (0, 1, 3, 4, 5, 6, 7)]):
        time.sleep(0.01)
    if is_lost:
        store.add("zeco/looking/0", 1)
    with ThreadPoolExecutor(len(alive)) as threads:
        errors = [*threads.map(lambda rank: rank.diagnose(RuntimeError("late")), alive)]
    for rank in alive:
        rank.stop()
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
    store = dist.HashStore()
    first, second = (Watchdog(Launch(rank, 2, rank), store) for rank in range(2))
    assert not first.has_spoken()
    assert first.claim_reporting()
    assert second.has_spoken()
    assert not second.claim_reporting()
    first.stop()
    second.stop()
