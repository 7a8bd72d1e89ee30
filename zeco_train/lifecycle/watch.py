"""A lost rank: who notices, who names it, what the user reads, and when and with which code all others end.

A rank is killed, stopped (SIGSTOP), or on a node that is gone, in the middle of a step:

1. *Noticed*, at the latest by the end of `parallel.timeout_seconds`, by a communication with it that fails
   (`Job.fail`), or by the launcher, whose SIGTERM to the others does not end them at once (`guard`). A wait that has no
   timeout (a host that waits for a CUDA stream) is ended by the rank before the lost one, which watches its heartbeat:
   `_watch`, `SILENCE_SECONDS` later.
2. *Named* by the first rank that noticed, whose finding the others read: `_find`. It listens to all heartbeats for
   `LISTEN_SECONDS`; a rank whose heartbeat stands still is lost. A rank that failed by an error of its own has stored
   that (`report_failure`), and is named with it.
3. *Read*: one rank prints one line, `diagnose`, such as "error: rank 0: step 7, …: rank 1 no longer answers (killed,
   stopped or unreachable; last seen in step 7, …); …". All write stacks and flight records beside their logs.
4. *Ended*: ranks that wait for something else read that the job is lost, within `WATCH_SECONDS`, and end themselves
   `GRACE_SECONDS` later: `_watch`, `abandon`. All exit with the code of `CommunicationError`, 6, or that of the failed
   rank, by which a launcher decides whether a restart helps; with 143 (`TERMINATED`) if no rank was lost, but the
   launcher ended all. Nothing is saved, and nothing waits for another rank.

The line comes at most 11 s after the timeout (`REPORT_SECONDS`), and all others have ended after 16 s (`END_SECONDS`).
A device that hangs takes two `DUMP_SECONDS` more, a store that is cut off `ANSWER_SECONDS`.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist
from tqdm import tqdm

from zeco_train.errors import CommunicationError, ZecoError
from zeco_train.lifecycle.join import Launch, name_ranks
from zeco_train.lifecycle.logs import Postmortem, last_communication
from zeco_train.system import background
from zeco_train.system.signals import catch_in_this_process
from zeco_train.system.terminal import repeat_below_launcher, report_to_launcher

# Between two heartbeats.
PERIOD_SECONDS = 0.5
# Six periods: the heartbeat of a rank that is merely slow (two cores, eight processes) still advances within that.
LISTEN_SECONDS = 3.0
# Beyond the timeout of communication, whose own error names the operation: how long a neighbour may be silent.
SILENCE_SECONDS = 2 * LISTEN_SECONDS
# How often a rank checks its neighbour's heartbeat and whether the job is lost.
WATCH_SECONDS = 2.0
# A rank informed of the loss may be about to hit the failure itself, which gives a more specific error.
GRACE_SECONDS = 6.0
# For the launcher's store to answer a request, which takes it milliseconds; later requests fail at once.
ANSWER_SECONDS = 15.0

# Both from the end of the timeout of communication, at most. Reported: a neighbour's silence is noticed, and all
# heartbeats are listened to. All others ended: they read of the loss, and wait for their own failure.
REPORT_SECONDS = SILENCE_SECONDS + WATCH_SECONDS + LISTEN_SECONDS
END_SECONDS = SILENCE_SECONDS + WATCH_SECONDS + WATCH_SECONDS + GRACE_SECONDS

# Exit code of ranks that their launcher has terminated although none was lost: 128 + signal, as in a shell.
TERMINATED = 128 + signal.SIGTERM

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Finding:
    # Result of a check of all heartbeats: the ranks at fault, and why ("": all are alive); the ranks' activities; the
    # exit code of all ranks, `TERMINATED` if the launcher has terminated them and none is at fault.
    culprits: str
    places: str
    exit_code: int


class Watchdog:
    """Publishes this rank's heartbeat, watches the next rank's, and ends this process if a rank is lost.

    Without a store there are no heartbeats, and no rank can be blamed. `remedy` is advice to the user about a lost
    rank, `timeout_key` the setting of the communication timeout.
    """

    def __init__(
        self, launch: Launch, store: dist.Store | None, remedy: str = "", timeout_key: str = "the timeout"
    ) -> None:
        self._launch, self._remedy, self._timeout_key = launch, remedy, timeout_key
        self.board = Board(launch, store, ANSWER_SECONDS)
        self.postmortem = Postmortem(launch.rank)
        self.activity = "start"  # what this rank is doing, for errors
        self.is_terminated = False  # whether this rank has received SIGTERM since `guard`
        self._stop = threading.Event()
        # Held by the thread that ends this process because of a failure; reentrant, since `Job.fail` calls `abandon`.
        self._ending = threading.RLock()
        if store is not None:
            background.start(self._beat, name="heartbeat", stop=self.stop)

    def enter(self, activity: str) -> None:
        """Set this rank's current activity, for the error of a rank that finds this one unresponsive."""
        self.activity = activity

    def guard(self, timeout: timedelta) -> None:
        """From now on, `abandon` if the next rank's heartbeat stops for longer than `timeout`, or another gives up.

        SIGTERM, too, leads there, and no longer ends this rank at once: a launcher sends it to the survivors within
        0.1 s of a rank's death, often before they have noticed the loss, and an immediate exit could not name the lost
        rank.
        """
        if self.board.store is not None:
            catch_in_this_process(signal.SIGTERM, self._remember_termination)
            background.start(self._watch, timeout.total_seconds() + SILENCE_SECONDS, name="watchdog", stop=self.stop)

    def stop(self) -> None:
        """Stop the heartbeat and the watch at a regular shutdown; `background.stop_all` joins their threads."""
        self._stop.set()

    def report_failure(self, message: str, exit_code: int = CommunicationError.exit_code) -> None:
        """Store the error with which this rank exits, for the others to report; they exit with its code, too."""
        # In this order: ranks that learn of the loss look for its reason.
        self.board.append("failed", message, exit_code)
        self.board.append("lost")

    def claim_end(self) -> None:
        """Only one thread ends this process; any other that tries stops here."""
        if not self._ending.acquire(blocking=False):
            if threading.current_thread() is not threading.main_thread():
                raise SystemExit  # ends this thread only, and without a message
            # The main thread must not return: the process would exit before the other thread has reported.
            threading.Event().wait()

    def abandon(self, error: Exception) -> NoReturn:
        """End this process because a communication failed, or another rank is lost: names it, waits for none."""
        self.claim_end()
        if threading.current_thread() is threading.main_thread():
            # A launcher that has seen the peer die sends SIGTERM to this process at once.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        logger.info("communication failed", exc_info=error)
        self.board.append("lost")
        # Stacks are most useful now; but a launcher may terminate all ranks without a loss, which needs no postmortem.
        if not self.is_terminated:
            self.postmortem.write()
        explained = self.diagnose(error)
        logger.info("%s", explained)
        # So that this rank is not taken for the culprit.
        self.board.append("left")
        if explained.exit_code != TERMINATED:
            report_to_launcher(explained.line)
            self.postmortem.write()
            if self.board.claim_reporting():
                print_error(explained)
                # torchrun's report ends with the lost rank, of which it has only the signal.
                if not _is_restarted():
                    repeat_below_launcher(explained.line)
        leave_process(explained.exit_code)

    def diagnose(self, error: Exception) -> CommunicationError:
        """Build the user-facing error after a failed communication; it names the rank at fault."""
        rank, operation = self._launch.rank, self._operation(error)
        detail = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, CommunicationError):
            detail = error.problem if error.peer is None else f"with rank {error.peer}: {error.problem}"
        if self.board.store is None:
            return CommunicationError(rank, operation, detail)
        try:
            found = self._find()
        except STORE_ERRORS as lost:
            logger.info("the store is gone: %s", lost)
            host = os.environ.get("MASTER_ADDR", "")
            problem = f"the launcher's store at {host} is gone, and so may be its node; {self._remedy}"
            return CommunicationError(rank, operation, problem)
        alive = f"{detail} (every rank is alive: one is stuck, or slower than {self._timeout_key}; {found.places})"
        problem = found.culprits or alive
        problem += f"; {self._remedy}" if self._remedy else ""
        explained = CommunicationError(rank, operation, problem)
        explained.exit_code = found.exit_code
        return explained

    def _find(self) -> _Finding:
        # Elects one rank to check all heartbeats; every rank returns its finding. If it is lost, another one checks.
        # If each of 256 ranks checked all heartbeats, the store would get 400,000 requests at once.
        turn = 0
        while not self.board.is_first(f"checking/{turn}"):
            deadline = time.monotonic() + 2 * LISTEN_SECONDS
            # Not `store.wait`, which would block this rank's heartbeat on the same connection.
            while time.monotonic() < deadline:
                if (fields := self.board.published("finding")) is not None:
                    return _Finding(**fields)
                time.sleep(PERIOD_SECONDS)
            turn += 1
        finding = self._check_heartbeats()
        self.board.publish("finding", asdict(finding))
        return finding

    def _check_heartbeats(self) -> _Finding:
        others = [r for r in range(self._launch.world_size) if r != self._launch.rank]
        before = self.board.heartbeats(others)
        time.sleep(LISTEN_SECONDS)
        after = self.board.heartbeats(others)
        failed, left = self.board.entries("failed"), self.board.entries("left")
        silent = [r for r in others if before[r][0] == after[r][0] and r not in left and r not in failed]
        culprits = [f"rank {r} failed: {text}" for r, (text, _) in sorted(failed.items())] or [
            f"rank {r} no longer answers (killed, stopped or unreachable; last seen in {after[r][1]})" for r in silent
        ]
        # Ranks that have left because of the loss are no longer in their last activity.
        places = {self._launch.rank: self.activity} | {r: after[r][1] for r in others if r not in left}
        # That of the first rank that failed.
        exit_code = next((code for _, code in failed.values()), CommunicationError.exit_code)
        if self.is_terminated and not culprits:
            exit_code = TERMINATED
        return _Finding("; ".join(culprits), _name_places(places), exit_code)

    def _operation(self, error: Exception) -> str:
        # With the communication that has failed, or the last one.
        if isinstance(error, CommunicationError):
            last = "" if error.operation == self.activity else error.operation
        else:
            last = last_communication() if dist.is_initialized() else ""
        return f"{self.activity}, {last}" if last else self.activity

    def _beat(self) -> None:
        count = 0
        with suppress(*STORE_ERRORS):
            while not self._stop.wait(PERIOD_SECONDS):
                count += 1
                self.board.beat(count, self.activity)

    def _watch(self, limit: float) -> None:
        neighbour = (self._launch.rank + 1) % self._launch.world_size
        last, since = "", time.monotonic()
        while not self._stop.wait(WATCH_SECONDS):
            if self.is_terminated:
                self.abandon(CommunicationError(self._launch.rank, self.activity, "terminated by the launcher"))
            try:
                lost = self.board.entries("lost")
                count, _ = self.board.heartbeats([neighbour])[neighbour]
            except STORE_ERRORS:
                # The store's node is gone. Communication will fail, or the launcher will terminate this rank.
                continue
            if lost:
                # This rank may already be shutting down.
                if self._ending.acquire(blocking=False):
                    self._ending.release()
                    self.postmortem.write()
                problem = f"rank {next(iter(lost))} has given up"
                if not self._stop.wait(GRACE_SECONDS):
                    self.abandon(CommunicationError(self._launch.rank, self.activity, problem))
                return
            if count != last:
                last, since = count, time.monotonic()
            elif time.monotonic() - since > limit:
                problem = f"silent for {limit:.0f} s"
                self.abandon(CommunicationError(self._launch.rank, self.activity, problem, neighbour))

    def _remember_termination(self, number: int, frame: FrameType | None) -> None:
        # A plain attribute: a signal handler must not take locks.
        self.is_terminated = True


def is_communication_failure(error: BaseException) -> bool:
    """Whether torch.distributed raises this error when a peer is gone or late."""
    if isinstance(error, CommunicationError | dist.DistError):
        return True
    # gloo's failures are plain RuntimeErrors.
    return isinstance(error, RuntimeError) and any(
        mark in str(error) for mark in ("gloo", "Connection closed by peer", "Timed out waiting", "NCCL")
    )


def print_error(error: ZecoError) -> None:
    """Print an error's line on stderr. A closed terminal changes neither the shutdown nor the exit code."""
    with suppress(OSError):
        # Above a progress bar, if there is one.
        tqdm.write(error.line, file=sys.stderr)
        sys.stderr.flush()


def leave_process(code: int) -> NoReturn:
    """Exit at once. Not by sys.exit: destroying the process groups would wait for the lost rank."""
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def _name_places(activities: Mapping[int, str]) -> str:
    # Groups ranks by activity: `ranks 0, 2 in step 3, optimizer; rank 1 in step 3, waiting for data`.
    by_activity: dict[str, list[int]] = {}
    for rank in sorted(activities):
        by_activity.setdefault(activities[rank], []).append(rank)
    return "; ".join(f"{name_ranks(ranks)} in {activity}" for activity, ranks in by_activity.items())


def _is_restarted() -> bool:
    # Whether torchrun starts the ranks again after they have failed.
    count, most = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return count < most


# --- what ranks write for each other into the launcher's store: heartbeats, failures, and who has reported them ---

# Of the keys.
_PREFIX = "zeco"
# The store was the launcher's, and does not come back; or it does not answer.
STORE_ERRORS = (dist.DistError, RuntimeError)


class BoundedStore:
    """A store whose methods end within `seconds`, or raise `dist.DistNetworkError`.

    A thread makes the requests one after another, as the store's own connection does: one for all, since a rank that is
    out of memory can start no other. Once the store does not answer, every further request fails at once.
    """

    def __init__(self, store: dist.Store, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        # None wakes the thread up to end.
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_silent = self._is_serving = self._is_stopped = False
        # Of the last two, and of putting a request where a thread serves it.
        self._lock = threading.Lock()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *arguments: self._ask(lambda: getattr(self._store, method)(*arguments))

    def _ask(self, request: Callable[[], Any]) -> Any:
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(request())
            except BaseException as error:
                answer.set_exception(error)

        silent = dist.DistNetworkError(f"no answer within {self._seconds:g} s")
        if self._is_silent:
            raise silent
        with self._lock:
            self._requests.put(run)
            if not self._is_serving:
                self._is_serving, self._is_stopped = True, False
                background.start(self._serve, name="store", stop=self._stop)
        # Not `result(timeout)`, whose TimeoutError a store may raise, too.
        if not wait([answer], self._seconds).done:
            self._is_silent = True
            raise silent
        return answer.result()

    def _stop(self) -> None:
        """End the thread when it has made all requests; a later one starts another."""
        with self._lock:
            self._is_stopped = True
            self._requests.put(None)

    def _serve(self) -> None:
        while True:
            if (request := self._requests.get()) is not None:
                request()
            with self._lock:
                if self._is_stopped and self._requests.empty():
                    self._is_serving = False
                    return


class Board:
    """A rank's view of the store; `seconds` bounds each request.

    Without a store nothing is written or reported; `heartbeats` and `is_first` need one.
    """

    def __init__(self, launch: Launch, store: dist.Store | None, seconds: float) -> None:
        self._launch = launch
        self.store = None if store is None else BoundedStore(store, seconds)

    def beat(self, count: int, activity: str) -> None:
        """Publish a heartbeat of this rank. Raises one of `STORE_ERRORS`, as do most methods."""
        self._set(f"heartbeat/{self._launch.rank}", f"{count} {activity}")

    def heartbeats(self, ranks: Sequence[int]) -> dict[int, tuple[str, str]]:
        """The last heartbeat of each rank and its activity; one request, if all of them have started."""
        store, keys = self.store, {rank: f"{_PREFIX}/heartbeat/{rank}" for rank in ranks}
        assert store is not None
        if not store.check([*keys.values()]):
            # multi_get blocks on missing keys.
            keys = {rank: key for rank, key in keys.items() if store.check([key])}
        values = store.multi_get([*keys.values()]) if keys else []
        found = dict.fromkeys(ranks, ("0", "start"))
        for rank, value in zip(keys, values, strict=True):
            beat, _, activity = value.decode().partition(" ")
            found[rank] = beat, activity
        return found

    def append(self, kind: str, *entry: str | int) -> None:
        """Add this rank's entry to the list of `kind`, one key of all ranks; nothing if the store is gone."""
        if self.store is None:
            return
        line = json.dumps([self._launch.rank, entry]) + "\n"
        try:
            self.store.append(f"{_PREFIX}/{kind}", line)
        except STORE_ERRORS as error:
            logger.info("the launcher's store is gone: %s", error)

    def entries(self, kind: str) -> dict[int, list[Any]]:
        """The entries of `kind` by rank, in order of time."""
        return dict(json.loads(line) for line in (self._get(kind) or "").splitlines())

    def is_first(self, name: str) -> bool:
        """True for one caller among all ranks."""
        assert self.store is not None
        return bool(self.store.add(f"{_PREFIX}/{name}", 1) == 1)

    def publish(self, name: str, value: object) -> None:
        self._set(name, json.dumps(value))

    def published(self, name: str) -> Any:
        """What a rank has published; None: nothing yet."""
        return None if (text := self._get(name)) is None else json.loads(text)

    def claim_reporting(self) -> bool:
        """True for the first caller among all ranks, without the launcher's store on this node."""
        if self.store is None:
            # Before the rendezvous, no other rank is known to have the same error.
            return self._launch.rank == 0 or not dist.is_initialized()
        try:
            return self.is_first("reported")
        except STORE_ERRORS as error:
            logger.info("the launcher's store is gone: %s", error)
            return self._launch.local_rank == 0

    def is_reported(self) -> bool:
        """Whether a rank has succeeded in `claim_reporting`; True if the store is gone and that cannot be known."""
        try:
            return self._get("reported") is not None
        except STORE_ERRORS:
            return True

    def _set(self, key: str, value: str) -> None:
        if self.store is not None:
            self.store.set(f"{_PREFIX}/{key}", value)

    def _get(self, key: str) -> str | None:
        if self.store is None or not self.store.check([f"{_PREFIX}/{key}"]):
            return None
        return str(self.store.get(f"{_PREFIX}/{key}").decode())
