"""Process lifecycle of one rank: start, error handling, exit code.

A command that succeeds synchronises all ranks and destroys the process groups. Expected failures (user error, lost
peer, out of memory) print one line on stderr from one rank and exit with a code of their own; after the rendezvous, a
failing rank waits for no other. Any other exception is a bug and propagates.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from zeco_train.errors import CommunicationError, OutOfMemoryError, ZecoError, open_files_error
from zeco_train.lifecycle.join import Launch, OwnRankError, launcher_store
from zeco_train.lifecycle.watch import SILENCE_SECONDS, Watchdog, is_communication_failure, leave_process, print_error
from zeco_train.system import background
from zeco_train.system.signals import STOP_SIGNALS, die_with_launcher
from zeco_train.system.terminal import is_reader_gone, repeat_below_launcher, report_to_launcher

logger = logging.getLogger(__name__)

# A launcher kills all ranks once one has exited, so the others give rank 0 time to print its error: before the
# rendezvous, the time of its imports on a busy machine; afterwards, a moment.
_SECONDS_TO_IMPORT = 20.0
_SECONDS_AMONG_RANKS = 2.0
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Advice:
    """Remedies that messages give: after a lost rank, after running out of memory; the key of the timeout."""

    lost_peer: str
    memory: str
    timeout_key: str


class Job:
    """A command's handle on its rank while it runs.

    Attributes:
        closing: resources to close at exit, after the message is printed, since a tracker may be slow to finish. Not
            closed after a lost peer, for which they might wait, nor after a bug.
    """

    def __init__(self, launch: Launch, advice: Advice) -> None:
        self.launch, self._advice = launch, advice
        self.watchdog = Watchdog(launch, launcher_store(launch), advice.lost_peer, advice.timeout_key)
        self.closing = ExitStack()

    def enter(self, activity: str) -> None:
        """Set this rank's current activity, for error messages."""
        self.watchdog.enter(activity)

    @contextmanager
    def joining(self, timeout: timedelta) -> Iterator[None]:
        """For the creation of the process groups; afterwards `Watchdog.guard` is in force.

        This rank ends if it takes much longer than `timeout`, which gloo applies to each of its tries to connect.
        """
        self.enter("joining the other ranks")
        seconds = timeout.total_seconds()
        late = CommunicationError(self.launch.rank, self.watchdog.activity, f"not done within {seconds:g} s")
        timer = threading.Timer(seconds + SILENCE_SECONDS, self.watchdog.abandon, [late])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        self.watchdog.guard(timeout)

    def keep_evidence(self, log: Path) -> None:
        """From now on, write a postmortem beside this rank's log file if the job fails. Collective."""
        start = [time.strftime("%Y%m%dT%H%M%S")]
        dist.broadcast_object_list(start, src=0)
        self.watchdog.postmortem.open(log, start[0])

    def report_stop(self, line: str) -> None:
        """Have `line`, which the user has seen, come last on the screen, below torchrun's own report."""
        report_to_launcher(line)
        if self.launch.rank == 0:
            repeat_below_launcher(line)

    def finish(self, code: int) -> None:
        """Shut down regularly with exit code `code`. Collective once the process group exists."""
        self.closing.close()
        if dist.is_initialized():
            # A launcher terminates the other ranks when one exits with a code ≠ 0. So all exit together, and a signal
            # during the rest of the shutdown does not change the exit code.
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            # Over the CPU's group: `barrier` would connect the GPUs for this alone, which takes a second.
            dist.all_reduce(torch.zeros(()))
        # Before the process groups on which worker threads wait are destroyed.
        _end_threads(code)
        self.watchdog.postmortem.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def fail(self, error: Exception) -> int | None:
        """Shut down because of an error.

        Returns:
            The exit code; None for a bug, whose traceback is due. After the rendezvous, an expected failure exits the
            process here.
        """
        self.watchdog.claim_end()
        expected = self._as_expected(error)
        if not isinstance(expected, OutOfMemoryError) and is_communication_failure(error):
            self.watchdog.abandon(error)
        if expected is None:
            report_to_launcher("".join(traceback.format_exception(error)).rstrip())
            self.watchdog.report_failure(f"{type(error).__name__}: {_first_line(error)}")
            return None
        report_to_launcher(expected.line)
        # At info level the traceback goes to the log file only; the terminal gets one line.
        logger.info("ending", exc_info=error)
        # Stored before the wait in `_print_once`: peers that notice first should find the reason.
        self.watchdog.report_failure(str(expected), expected.exit_code)
        self._print_once(expected)
        self.closing.close()
        if dist.is_initialized():
            leave_process(expected.exit_code)
        return expected.exit_code

    def leave(self, number: signal.Signals) -> int:
        """Exit without a message after Ctrl-C or a closed stdout, with code 128 + signal as in a shell.

        After the rendezvous the process exits here.
        """
        # A launcher forwards the SIGINT that the terminal has already sent.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.watchdog.claim_end()
        self.watchdog.report_failure(number.name)
        self.closing.close()
        if dist.is_initialized():
            leave_process(128 + number)
        return 128 + number

    def _as_expected(self, error: Exception) -> ZecoError | None:
        # None for a bug.
        if isinstance(error, ZecoError):
            return error
        if (limit := open_files_error(error)) is not None:
            return limit
        # Out of memory raises a plain RuntimeError on CPUs, and in libraries with their own GPU allocations.
        signs = ("can't allocate memory", "out of memory")
        lacks_memory = isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
        if lacks_memory or isinstance(error, torch.OutOfMemoryError | MemoryError):
            problem = _first_line(error) or "no details"
            return OutOfMemoryError(self.launch.rank, self.watchdog.activity, problem, self._advice.memory)
        return None

    def _print_once(self, error: ZecoError) -> None:
        # Rank 0 prints an error that all ranks have, while the others wait. A rank that is still alive after the wait
        # is the only one with this error and prints it itself.
        joined = dist.is_initialized()
        if self.launch.rank != 0:
            waited = 0.0
            while not joined and waited < _SECONDS_TO_IMPORT and not self.watchdog.board.is_reported():
                time.sleep(_POLL_SECONDS)
                waited += _POLL_SECONDS
            # When this rank exits, its launcher kills the others, perhaps mid-message; no wait if it already has begun.
            waited = 0.0
            while waited < _SECONDS_AMONG_RANKS and not self.watchdog.is_terminated:
                time.sleep(_POLL_SECONDS)
                waited += _POLL_SECONDS
        # Without the launcher's store, or before the rendezvous, ranks cannot agree on which one prints.
        if (not joined and self.watchdog.board.store is None) or self.watchdog.board.claim_reporting():
            print_error(error)


def run_job(command: Callable[[Job], int], advice: Advice) -> int:
    """Run a command on this rank; returns the exit code, unless a failure exits the process directly. Raises bugs."""
    try:
        launch = Launch.from_environment()
        if launch.world_size > 1:
            die_with_launcher()
        job = Job(launch, advice)
    except ZecoError as error:
        report_to_launcher(error.line)
        # There is no store yet to elect the reporting rank: one rank a node prints.
        if os.environ.get("LOCAL_RANK", "0") == "0" or isinstance(error, OwnRankError):
            print_error(error)
        return error.exit_code
    code = 1  # Python's exit code after an uncaught exception
    try:
        try:
            done = command(job)
            job.finish(done)
            code = done
        except Exception as error:
            failure = job.leave(signal.SIGPIPE) if is_reader_gone(error) else job.fail(error)
            if failure is None:
                raise
            code = failure
    except KeyboardInterrupt:
        code = job.leave(signal.SIGINT)
    except SystemExit as end:
        code = int(end.code or 0)  # --help has been printed
        raise
    finally:
        _end_threads(code)
    return code


def _end_threads(code: int) -> None:
    # If a background thread keeps running, the interpreter cannot be finalised.
    if running := background.stop_all():
        logger.info("still running: %s", ", ".join(running))
        if isinstance(error := sys.exception(), Exception):
            sys.excepthook(type(error), error, error.__traceback__)
        leave_process(code)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
