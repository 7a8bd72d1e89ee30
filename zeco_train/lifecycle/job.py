"""One rank of a command of ours, from its start to its end, whatever that is.

A command that succeeds waits for all ranks and lets go of their groups. Everything that is expected to go wrong, a
user's mistake, a lost peer, too little memory, ends with one line on stderr from one rank and an exit code of its own;
once the ranks have joined, nobody waits for anybody then. What is not expected is raised: it is a fault of ours.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist
from tqdm import tqdm

from zeco_train.distributed.mesh import Launch, OwnRankError
from zeco_train.distributed.postmortem import Postmortem
from zeco_train.errors import OutOfMemoryError, ZecoError
from zeco_train.lifecycle.watchdog import TERMINATED, Watchdog, is_communication_failure, launcher_store
from zeco_train.system import background
from zeco_train.system.signals import catch_in_this_process, die_with_launcher
from zeco_train.system.terminal import nobody_reads

logger = logging.getLogger(__name__)

# A launcher kills all ranks once one has ended, so the others leave rank 0 the time to speak: until it has imported
# what it needs on a busy machine, or, once all work together, for a moment.
_SECONDS_TO_IMPORT = 20.0
_SECONDS_AMONG_RANKS = 2.0
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Advice:
    """What a command tells its user to do.

    Attributes:
        lost_peer: after a rank is lost.
        memory: with too little of it: what needs less.
        timeout_key: the setting that bounds waits.
    """

    lost_peer: str
    memory: str
    timeout_key: str


class Job:
    """What a command has of this rank while it runs.

    Attributes:
        launch: this rank and how many there are.
        watchdog: its heartbeat.
        closing: what is closed at the end, but after the user has been told: a tracker may take its time to finish.
            Not closed after a peer is lost, which is what it might wait for, nor after a fault of ours.
    """

    def __init__(self, launch: Launch, advice: Advice) -> None:
        self.launch, self._advice = launch, advice
        self._store = launcher_store(launch)
        self.watchdog = Watchdog(launch, self._store, advice.lost_peer, advice.timeout_key)
        self.closing = ExitStack()
        self._postmortem = Postmortem(launch.rank)
        # Held by the thread that ends this process because of a failure.
        self._ending = threading.RLock()

    def enter(self, activity: str) -> None:
        """Say what this rank is doing now, for messages about it."""
        self.watchdog.enter(activity)

    def guard(self, timeout: timedelta) -> None:
        """From now on, end this rank if the next one is silent for longer than `timeout`; see `Watchdog.guard`.

        SIGTERM no longer ends it at once: a launcher sends it to the survivors within 0.1 s of a rank's death, and
        those that have not yet run by then could not name the rank that is lost.
        """
        if self._store is not None:
            catch_in_this_process(signal.SIGTERM, self._remember_termination)
        self.watchdog.guard(timeout, self._abandon, self._hear_of_loss)

    def keep_evidence(self, log: Path) -> None:
        """From now on, leave a postmortem beside this rank's log file if the job is lost. Collective."""
        start = [time.strftime("%Y%m%dT%H%M%S")]
        dist.broadcast_object_list(start, src=0)
        self._postmortem.open(log, start[0])

    def finish(self, code: int) -> None:
        """A regular end, with that exit code. Collective, if the ranks have joined."""
        self.closing.close()
        if dist.is_initialized():
            # A launcher that sees one rank end with a code ≠ 0 terminates the others: all end together, and what is
            # left to do from here on is not worth another code.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            dist.barrier()
        # Before the groups that couriers wait in are destroyed.
        _end_threads(code)
        self._postmortem.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def fail(self, error: Exception) -> int | None:
        """End because of an error.

        Returns:
            The exit code; None for a fault of this program, whose traceback is due. Once the ranks have joined, a
            failure that is expected ends the process here.
        """
        self._end_alone()
        expected = self._as_expected(error)
        if not isinstance(expected, OutOfMemoryError) and is_communication_failure(error):
            self._abandon(error)
        if expected is None:
            self.watchdog.report_failure(f"{type(error).__name__}: {_first_line(error)}")
            return None
        # At a level that only a log file takes: the terminal gets one line.
        logger.info("ending", exc_info=error)
        self.watchdog.report_failure(str(expected), expected.exit_code)
        self._say_once(expected)
        self.closing.close()
        if dist.is_initialized():
            _leave(expected.exit_code)
        return expected.exit_code

    def leave(self, number: signal.Signals) -> int:
        """End in silence: the user has left, by Ctrl-C or by reading no further.

        Returns:
            The exit code, as a shell has it for what a signal has ended; once the ranks have joined, the process ends
            here.
        """
        # A launcher forwards what a terminal has already sent.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._end_alone()
        self.watchdog.report_failure(number.name)
        self.closing.close()
        if dist.is_initialized():
            _leave(128 + number)
        return 128 + number

    def _remember_termination(self, number: int, frame: FrameType | None) -> None:
        # A plain attribute: what interrupts the main thread must not take locks.
        self.watchdog.is_terminated = True

    def _hear_of_loss(self) -> None:
        """Another rank has given up: write down what this one is doing, unless it ends for a reason of its own."""
        if self._ending.acquire(blocking=False):
            self._ending.release()
            self._postmortem.write()

    def _end_alone(self) -> None:
        """Have this thread be the one that ends the process; another one that would do so, too, comes no further."""
        if not self._ending.acquire(blocking=False):
            if threading.current_thread() is not threading.main_thread():
                raise SystemExit  # ends this thread only, and without a message
            threading.Event().wait()

    def _as_expected(self, error: Exception) -> ZecoError | None:
        """The error as one whose message is written for the user; None for a fault of this program."""
        if isinstance(error, ZecoError):
            return error
        # On CPUs torch raises a plain RuntimeError, and so do libraries that allocate on GPUs by themselves.
        signs = ("can't allocate memory", "out of memory")
        lacks_memory = isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
        if lacks_memory or isinstance(error, torch.OutOfMemoryError | MemoryError):
            problem = _first_line(error) or "no details"
            return OutOfMemoryError(self.launch.rank, self.watchdog.activity, problem, self._advice.memory)
        return None

    def _say_once(self, error: ZecoError) -> None:
        """Mostly every rank has the error, and rank 0 speaks; the others hold back meanwhile.

        One that is still there after that is alone with its error, and speaks itself.
        """
        joined = dist.is_initialized()
        if self.launch.rank != 0:
            waited = 0.0
            while not joined and waited < _SECONDS_TO_IMPORT and not self.watchdog.has_spoken():
                time.sleep(_LOOK_SECONDS)
                waited += _LOOK_SECONDS
            # The end of this rank has its launcher end the others, in the middle of a word; unless it is at it already.
            waited = 0.0
            while waited < _SECONDS_AMONG_RANKS and not self.watchdog.is_terminated:
                time.sleep(_LOOK_SECONDS)
                waited += _LOOK_SECONDS
        # Without the launcher's store nobody knows who has spoken, and before the ranks have joined nobody agrees.
        if (not joined and self._store is None) or self.watchdog.may_speak():
            _say(error)

    def _abandon(self, error: Exception) -> NoReturn:
        """Leave after a peer is lost: name it, save nothing, wait for nobody."""
        self._end_alone()
        if threading.current_thread() is threading.main_thread():
            # A launcher that has seen the peer die terminates this process at once, too.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        logger.info("communication failed", exc_info=error)
        self.watchdog.report_loss()
        if not self.watchdog.is_terminated:
            self._postmortem.write()
        explained = self.watchdog.diagnose(error)
        logger.info("%s", explained)
        self.watchdog.report_leaving()
        if explained.exit_code != TERMINATED:
            self._postmortem.write()
            if self.watchdog.may_speak():
                _say(explained)
        _leave(explained.exit_code)


def run_job(command: Callable[[Job], int], advice: Advice) -> int:
    """Run a command on this rank; returns the process's exit code, if the process outlives the command's failure.

    Raises:
        Exception: a fault of the command, as it is.
    """
    try:
        launch = Launch.from_environment()
        if launch.world_size > 1:
            die_with_launcher()
        job = Job(launch, advice)
    except ZecoError as error:
        # Nobody can be asked who speaks: one rank of a node does.
        if os.environ.get("LOCAL_RANK", "0") == "0" or isinstance(error, OwnRankError):
            _say(error)
        return error.exit_code
    code = 1  # Python's, for what is raised
    try:
        code = _run(command, job)
    except KeyboardInterrupt:
        code = job.leave(signal.SIGINT)
    except SystemExit as end:
        code = int(end.code or 0)  # help was asked for, and has been printed
        raise
    finally:
        _end_threads(code)
    return code


def _run(command: Callable[[Job], int], job: Job) -> int:
    try:
        code = command(job)
        job.finish(code)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and nobody_reads():
            return job.leave(signal.SIGPIPE)
        failure = job.fail(error)
        if failure is None:
            raise
        return failure
    return code


def _say(error: ZecoError) -> None:
    # A terminal that is gone changes nothing of what is to follow, nor of the exit code.
    with suppress(OSError):
        # Above a progress bar, if there is one.
        tqdm.write(error.line, file=sys.stderr)
        sys.stderr.flush()


def _leave(code: int) -> NoReturn:
    """Not sys.exit: shutting the process groups down would wait for whoever is lost."""
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def _end_threads(code: int) -> None:
    """Before the interpreter ends, see `background`: with a thread that does not, leave without that."""
    if running := background.stop_all():
        logger.info("still running: %s", ", ".join(running))
        if isinstance(error := sys.exception(), Exception):
            sys.excepthook(type(error), error, error.__traceback__)
        _leave(code)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
