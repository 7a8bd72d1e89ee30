"""Background threads end before the interpreter, however the command ends."""

from __future__ import annotations

import threading
from datetime import timedelta
from unittest import mock

import pytest
import torch

from zeco_train.collectives.worker import ScanWorker
from zeco_train.lifecycle.end import Advice, Job
from zeco_train.lifecycle.join import Launch
from zeco_train.system import background


def test_stop_all_joins_threads_and_returns_stuck_ones() -> None:
    told, release = threading.Event(), threading.Event()
    ends = background.start(told.wait, name="ends", stop=told.set)
    stuck = background.start(release.wait, name="stuck")
    try:
        assert background.stop_all(0.2) == ["stuck"]
        assert not ends.is_alive()
    finally:
        release.set()
    stuck.join()
    assert background.stop_all(0.2) == []


def test_stop_all_skips_calling_thread() -> None:
    left: list[list[str]] = []
    background.start(lambda: left.append(background.stop_all(5)), name="stops").join()
    assert left == [[]]


def test_stopped_courier_restarts_on_submit() -> None:
    worker, ran = ScanWorker(mock.Mock(), timedelta(seconds=1)), threading.Event()
    for _ in range(2):
        ran.clear()
        worker.submit(ran.set, [], torch.device("cpu"))
        assert background.stop_all() == []
        assert ran.is_set()


# pytest warns of the SystemExit, which threading ignores.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_late_thread_ends_if_process_is_already_ending() -> None:
    """A watchdog thread that fires during shutdown must not outlive the interpreter."""
    ending = Job(Launch(0, 1, 0), Advice("", "", ""))
    ending.watchdog.claim_end()
    late = background.start(ending.watchdog.abandon, RuntimeError("late"), name="late")
    late.join(10)
    assert not late.is_alive()
