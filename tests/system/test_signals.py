"""Signals that ask a run to save and to exit."""

from __future__ import annotations

import signal

import pytest

from zeco_train.system.signals import REQUEUE_EXIT_CODE, STOP_SIGNALS, StopRequest, exit_code, remember_warning


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_asks_to_save(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
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
