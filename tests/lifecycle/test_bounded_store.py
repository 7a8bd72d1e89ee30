"""A store that stops answering: requests end, and ranks that use it do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch.distributed as dist

from zeco_train.errors import CommunicationError
from zeco_train.lifecycle import watch
from zeco_train.lifecycle.join import Launch
from zeco_train.lifecycle.watch import BoundedStore, Watchdog
from zeco_train.system import background


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
    monkeypatch.setattr(watch, "_ANSWER_SECONDS", 0.5)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    rank = Watchdog(Launch(1, 2, 1), cast(dist.Store, silent))
    silent.is_cut.set()
    started = time.monotonic()
    found = rank.diagnose(CommunicationError(1, "all-scan", "no message within 10 s", 0))
    assert "the launcher's store at node0 is gone, and so may be its node" in str(found)
    # What a rank does before it exits.
    rank.report_failure("out of memory")
    rank.report_leaving()
    assert rank.claim_reporting() is False
    assert rank.has_spoken()
    assert time.monotonic() - started < 10.0
    rank.stop()
