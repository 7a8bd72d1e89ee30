"""SIGTERM while a rank forks."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.lifecycle.test_end import ADVICE
from zeco_train.lifecycle import end
from zeco_train.lifecycle.end import Job
from zeco_train.lifecycle.join import Launch
from zeco_train.lifecycle.watch import Watchdog

pytestmark = pytest.mark.campaign


def test_sigterm_goes_to_watchdog_but_ends_forked_child(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(end, "launcher_store", lambda launch: store)
    before = signal.getsignal(signal.SIGTERM)
    # The watchdog would end this process within two seconds.
    monkeypatch.setattr(Watchdog, "abandon", lambda *arguments: None)
    running = Job(Launch(0, 2, 0), ADVICE)
    try:
        running.watchdog.guard(timedelta(seconds=60))
        os.kill(os.getpid(), signal.SIGTERM)
        assert running.watchdog.is_terminated
        # Many attempts, since the signal has to arrive during the fork.
        for _ in range(100):
            child = os.fork()
            if child == 0:
                time.sleep(5)
                os._exit(0)
            os.kill(child, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        running.watchdog.stop()
        signal.signal(signal.SIGTERM, before)
