"""Handles stop signals as requests to save and exit; and ends ranks whose launcher has died.

SIGUSR1 is Slurm's warning before a time limit (`sbatch --signal=USR1@300`). Slurm sends it to every process of a step,
so the launcher must be started with the signal ignored (`trap '' USR1` in the shell before): otherwise torchrun would
die of it and kill its ranks. Ranks inherit the ignored signal and install their own handler.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

from zeco_train.system.command import choose_variables, explained_if_missing, put_own_packages_first, quick_imports
from zeco_train.system.terminal import is_reader_gone, show_any_text

# A batch system's, before it ends a job: Slurm and Grid Engine send SIGUSR1 or SIGUSR2, limits of CPU time SIGXCPU.
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
# Requests to save and exit; docs/training.md has all signals. SIGHUP: the terminal or the connection to it was closed.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *_WARNINGS)

# Exit code of a run that was stopped and has saved, which a batch system may requeue (EX_TEMPFAIL of sysexits.h).
REQUEUE_EXIT_CODE = 75

# How often a rank looks whether its launcher is alive.
_LOOK_SECONDS = 0.2

_early: list[signal.Signals] = []


def remember_warning() -> None:
    """Record a batch system's warning from now on for the later `StopRequest`; by default it ends the process."""
    for warning in _WARNINGS:
        signal.signal(warning, lambda number, frame: _early.append(signal.Signals(number)))


def run_command(module: str) -> NoReturn:
    """Run the `main` of a module as a command, which Ctrl-C ends without a traceback.

    Until its imports are done, SIGINT ends the process: torch does not handle a KeyboardInterrupt cleanly. A module
    that is itself the command calls this before its other imports, and is imported again by its name.
    """
    show_any_text()
    put_own_packages_first()
    choose_variables()
    if (before := signal.getsignal(signal.SIGINT)) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # `main` is inside, too: some packages are imported on first use.
    with explained_if_missing():
        with quick_imports():
            main = importlib.import_module(module).main
        signal.signal(signal.SIGINT, before)
        try:
            code = main(sys.argv[1:])
            sys.stdout.flush()
            sys.exit(code)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        except OSError as error:
            if not is_reader_gone(error):
                raise
            sys.exit(128 + signal.SIGPIPE)


def exit_code(stopped_by: signal.Signals) -> int:
    """Exit code of a stopped process: 130 after Ctrl-C, `REQUEUE_EXIT_CODE` after a batch system's signal."""
    return 128 + stopped_by if stopped_by is signal.SIGINT else REQUEUE_EXIT_CODE


def die_with_launcher() -> None:
    """Kill this process when its launcher has died.

    torchrun starts ranks in their own sessions: after a SIGKILL of torchrun they would continue unsupervised and
    conflict with the run's next start. A thread watches; the kernel's parent-death signal (`PR_SET_PDEATHSIG`) would
    also come when only that thread of a living launcher has ended which started this process.
    """
    threading.Thread(target=_watch_launcher, args=[os.getppid()], name="launcher", daemon=True).start()


def _watch_launcher(launcher: int) -> None:
    # A process whose parent has died gets another one.
    while os.getppid() == launcher:
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def catch_in_this_process(number: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> None:
    """Set a signal's handler for this process, once; forked children get the default action back.

    The signal is blocked during a fork. Python clears pending signals (whose handlers run later) in a new child, so one
    that arrives before the child has restored the default action would be lost.
    """
    before_fork = threading.local()

    def block() -> None:
        before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [number])

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before_fork.mask)

    def drop_in_child() -> None:
        # Unless it has been replaced since.
        if signal.getsignal(number) == handler:
            signal.signal(number, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=drop_in_child)
    signal.signal(number, handler)


class StopRequest:
    """Context manager that records the first stop signal instead of letting it end the process, as `signal`.

    It may be from before the start (`remember_warning`). Later ones are ignored: a launcher forwards the signal that
    the terminal has already sent, so a second one does not mean urgency.
    """

    def __init__(self) -> None:
        self.signal = _early[0] if _early else None
        _early.clear()
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        for number in STOP_SIGNALS:
            # nohup ignores it, for a run that outlives its terminal; the others only launchers are to ignore.
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            # The error is still to be reported, and a launcher sends SIGTERM to survivors of a lost rank at once.
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
