"""Signals that ask a run to save and to exit."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from tests.support.commands import REPOSITORY, is_running
from tests.support.waiting import ENOUGH
from zeco_train.system.signals import REQUEUE_EXIT_CODE, STOP_SIGNALS, StopRequest, exit_code, remember_warning


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_asks_to_save(number: signal.Signals) -> None:
    # A shell or nohup may have the tests ignore it.
    signal.signal(number, signal.SIG_DFL)
    with StopRequest() as stop:
        assert stop.signal is None
        signal.raise_signal(number)
        assert stop.signal is number
    assert signal.getsignal(number) is signal.SIG_DFL
    assert exit_code(number) == (130 if number is signal.SIGINT else REQUEUE_EXIT_CODE)


def test_run_below_nohup_outlives_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert stop.signal is None
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU])
def test_warning_during_imports_is_remembered(number: signal.Signals) -> None:
    remember_warning()
    signal.raise_signal(number)
    assert StopRequest().signal is number
    assert StopRequest().signal is None


@pytest.mark.processes
def test_rank_dies_with_launcher_but_not_with_thread_that_started_it() -> None:
    rank = "from zeco_train.system.signals import die_with_launcher as d; d(); print(flush=True); input()"
    launcher = f"""
import subprocess, sys, threading
def start():
    rank = subprocess.Popen([sys.executable, "-c", {rank!r}], stdout=subprocess.PIPE)
    rank.stdout.readline()
    print(rank.pid, flush=True)
threading.Thread(target=start).start()
input()
"""
    command = [sys.executable, "-c", launcher]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        # Longer than the kernel takes for its signal.
        time.sleep(0.5)
        assert is_running(pid)
        process.kill()
        deadline = time.monotonic() + ENOUGH
        while is_running(pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)
