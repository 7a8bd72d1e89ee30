"""Ctrl-C, SIGTERM and SIGUSR1 as a request to save and leave; and an end of ranks whose launcher is gone.

SIGUSR1 is what Slurm is asked to warn with before a time limit (`sbatch --signal=USR1@300`). Slurm sends it to every
process of a step, so the launcher has to be started with it ignored (`trap '' USR1` in the shell before): torchrun
itself would die of it, and take its ranks along. Ranks inherit that, and set a handler of their own all the same.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

from zeco_train.system.packages import explained_if_missing, put_own_packages_first
from zeco_train.system.terminal import nobody_reads, show_any_text

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

# What a batch system may start again: a run that was told to stop, and has saved (EX_TEMPFAIL of sysexits.h).
REQUEUE_EXIT_CODE = 75

_PR_SET_PDEATHSIG = 1

_early: list[signal.Signals] = []

# Handlers installed by `catch_in_this_process`, by signal.
_caught: dict[int, Callable[[int, FrameType | None], None]] = {}
_before_fork = threading.local()


def remember_warning() -> None:
    """Take note of SIGUSR1 from now on, for the `StopRequest` to come; by itself it would end the process."""
    signal.signal(signal.SIGUSR1, lambda number, frame: _early.append(signal.Signals(number)))


def run_command(module: str) -> NoReturn:
    """Run the `main` of a module as a command that Ctrl-C ends without a traceback.

    To import torch takes seconds, and it answers a KeyboardInterrupt in ways of its own: until it is there, the signal
    ends the process. A module that is also the command calls this before its other imports, and is imported again, by
    its name.
    """
    show_any_text()
    put_own_packages_first()
    if (before := signal.getsignal(signal.SIGINT)) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Some packages are imported by what needs them only.
    with explained_if_missing():
        main = importlib.import_module(module).main
        signal.signal(signal.SIGINT, before)
        try:
            code = main(sys.argv[1:])
            sys.stdout.flush()
            sys.exit(code)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        except BrokenPipeError:
            if not nobody_reads():
                raise
            sys.exit(128 + signal.SIGPIPE)


def exit_code(stopped_by: signal.Signals) -> int:
    """Of a process that a signal has stopped: 130 after Ctrl-C, `REQUEUE_EXIT_CODE` after what batch systems send."""
    return 128 + stopped_by if stopped_by is signal.SIGINT else REQUEUE_EXIT_CODE


def die_with_launcher() -> None:
    """Have the kernel kill this process when its launcher dies, on Linux.

    torchrun starts ranks in sessions of their own: if it is killed with SIGKILL they would train on, unsupervised, and
    get in the way of the next start of the same run.
    """
    if sys.platform != "linux":
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        # It died before the call; nobody will tell.
        os.kill(os.getpid(), signal.SIGKILL)


def catch_in_this_process(number: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> None:
    """Set a signal's handler for this process; children that it forks get the default action back.

    The signal is blocked while a child is forked. Python forgets in a new child which signals have just come (their
    handlers run later), so one that arrives before the child has the default action would be lost.
    """
    if not _caught:
        os.register_at_fork(
            before=_block_caught, after_in_parent=_unblock_caught, after_in_child=_drop_handlers_in_child
        )
    _caught[number] = handler
    signal.signal(number, handler)


def _block_caught() -> None:
    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _caught)


def _unblock_caught() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _drop_handlers_in_child() -> None:
    for number, handler in _caught.items():
        if signal.getsignal(number) == handler:
            signal.signal(number, signal.SIG_DFL)
    _unblock_caught()


class StopRequest:
    """While entered, remembers the first stop signal instead of dying of it. Later ones change nothing: a launcher
    forwards what a terminal has already sent, so a second signal is no sign of impatience."""

    def __init__(self) -> None:
        self.signal = _early[0] if _early else None
        _early.clear()
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            # It has still to be explained, and a launcher terminates the survivors of a lost rank at once.
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
