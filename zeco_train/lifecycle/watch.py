"""Finds the rank at fault when communication fails or times out.

A thread of every rank increments a heartbeat in the launcher's store. When a communication fails or times out, the
first rank to notice checks which heartbeats have stopped: those ranks are dead, stopped (SIGSTOP) or on a lost node.
The others read its result: if each of 256 ranks checked all heartbeats, the store would get 400,000 requests at once.
A rank that fails with an error of its own stores its message there too. In normal operation each rank watches only its
neighbour's heartbeat; this ends waits that have no timeout of their own (a host that waits for a CUDA stream). A rank
that gives up sets a flag in the store, and all others exit within moments, whatever they are waiting for.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

from zeco_train.errors import CommunicationError
from zeco_train.lifecycle.join import Launch, name_ranks
from zeco_train.system import background

# All times of a loss; the docs give the sums. Between two heartbeats:
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
# For a flight recorder's dump, which queries the device for the state of operations and may block on a hung one; there
# are two.
DUMP_SECONDS = 5.0

# Both from the end of the timeout of communication, at most. Reported: a neighbour's silence is noticed, and all
# heartbeats are listened to. All others ended: they read of the loss, and wait for their own failure.
REPORT_SECONDS = SILENCE_SECONDS + WATCH_SECONDS + LISTEN_SECONDS
END_SECONDS = SILENCE_SECONDS + WATCH_SECONDS + WATCH_SECONDS + GRACE_SECONDS

# Of this module's keys.
_PREFIX = "zeco"

# Exit code of ranks that their launcher has terminated although none was lost: 128 + signal, as in a shell.
TERMINATED = 128 + signal.SIGTERM

logger = logging.getLogger(__name__)


class BoundedStore:
    """A store whose methods end within `seconds`, or raise `dist.DistNetworkError`.

    A thread makes the requests one after another, as the store's own connection does. Once it does not answer, every
    further request fails at once.
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


@dataclass(frozen=True)
class _Finding:
    # Result of a check of all heartbeats: the ranks at fault, and why ("": all are alive); the ranks' activities; the
    # exit code of all ranks, `TERMINATED` if the launcher has terminated them and none is at fault.
    culprits: str
    places: str
    exit_code: int


class Watchdog:
    """Publishes this rank's heartbeat and reads those of the others.

    Without a store there are no heartbeats, and no rank can be blamed. `remedy` is advice to the user about a lost
    rank, `timeout_key` the setting of the communication timeout.

    Attributes:
        is_terminated: set once this rank has received SIGTERM, for `guard` to act on.
    """

    def __init__(
        self,
        launch: Launch,
        store: dist.Store | None,
        remedy: str = "",
        timeout_key: str = "the timeout",
    ) -> None:
        self._launch, self._remedy, self._timeout_key = launch, remedy, timeout_key
        self._store = None if store is None else BoundedStore(store, ANSWER_SECONDS)
        self.activity = "start"
        self.is_terminated = False
        self._stop = threading.Event()
        self._reported = f"{_PREFIX}/reported"
        if store is not None:
            background.start(self._beat, name="heartbeat", stop=self.stop)

    def enter(self, activity: str) -> None:
        """Set this rank's current activity, for the error of a rank that finds this one unresponsive."""
        self.activity = activity

    def guard(self, timeout: timedelta, abandon: Callable[[Exception], object], on_loss: Callable[[], object]) -> None:
        """Watch the next rank from now on: if its heartbeat stops for longer than `timeout`, a thread calls `abandon`.

        Communication with this `timeout` fails earlier by itself. If another rank has given up, `on_loss` is called at
        once, and `abandon` after a grace period. `abandon` is also called after SIGTERM, which a launcher sends to the
        survivors of a lost rank, and to all ranks if it has been terminated itself.
        """
        if self._store is not None:
            limit = timeout.total_seconds() + SILENCE_SECONDS
            background.start(self._watch, self._store, limit, abandon, on_loss, name="watchdog", stop=self.stop)

    def stop(self) -> None:
        """Stop the heartbeat and the watch at a regular shutdown; `background.stop_all` joins their threads."""
        self._stop.set()

    def report_failure(self, message: str, exit_code: int = CommunicationError.exit_code) -> None:
        """Store the error with which this rank exits, for the others to report.

        They exit with its code, too: a launcher decides on a restart by the first exit code.
        """
        # In this order: ranks that learn of the loss look for its reason.
        self._append("failed", message, exit_code)
        self.report_loss()

    def report_leaving(self) -> None:
        """Record that this rank exits because a peer is lost, so that it is not taken for the culprit."""
        self._append("left")

    def report_loss(self) -> None:
        """Record that the job is lost: all ranks are to exit."""
        self._append("lost")

    def claim_reporting(self) -> bool:
        """True for the first caller among all ranks, without the launcher's store on this node."""
        if self._store is None:
            # Before the rendezvous, no other rank is known to have the same error.
            return self._launch.rank == 0 or not dist.is_initialized()
        try:
            return self._store.add(self._reported, 1) == 1
        except (dist.DistError, RuntimeError) as error:
            logger.info("the launcher's store is gone: %s", error)
            return self._launch.local_rank == 0

    def is_reported(self) -> bool:
        """Whether a rank has succeeded in `claim_reporting`; True if the store is gone and that cannot be known."""
        if self._store is None:
            return False
        try:
            return self._store.check([self._reported])
        except (dist.DistError, RuntimeError):
            return True

    def diagnose(self, error: Exception) -> CommunicationError:
        """Build the user-facing error after a failed communication; it names the rank at fault."""
        rank, operation = self._launch.rank, self._operation(error)
        detail = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, CommunicationError):
            detail = error.problem if error.peer is None else f"with rank {error.peer}: {error.problem}"
        if self._store is None:
            return CommunicationError(rank, operation, detail)
        try:
            found = self._find(self._store)
        except (dist.DistError, RuntimeError) as lost:
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

    def _find(self, store: BoundedStore) -> _Finding:
        # Elects one rank to check all heartbeats; every rank returns its finding. If it is lost, another one checks.
        turn = 0
        while store.add(f"{_PREFIX}/checking/{turn}", 1) > 1:
            deadline = time.monotonic() + 2 * LISTEN_SECONDS
            # Not `store.wait`, which would block this rank's heartbeat on the same connection.
            while time.monotonic() < deadline:
                if (text := self._get("finding")) is not None:
                    return _Finding(**json.loads(text))
                time.sleep(PERIOD_SECONDS)
            turn += 1
        finding = self._check_heartbeats(store)
        self._set("finding", json.dumps(asdict(finding)))
        return finding

    def _check_heartbeats(self, store: BoundedStore) -> _Finding:
        others = [r for r in range(self._launch.world_size) if r != self._launch.rank]
        before = self._heartbeats(store, others)
        time.sleep(LISTEN_SECONDS)
        after = self._heartbeats(store, others)
        failed, left = self._entries("failed"), self._entries("left")
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

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(PERIOD_SECONDS):
            count += 1
            try:
                self._set(f"heartbeat/{self._launch.rank}", f"{count} {self.activity}")
            except (dist.DistError, RuntimeError):
                # The store was the launcher's, and does not come back.
                return

    def _operation(self, error: Exception) -> str:
        # With the communication that has failed, or the last one.
        if isinstance(error, CommunicationError):
            last = "" if error.operation == self.activity else error.operation
        else:
            last = last_communication() if dist.is_initialized() else ""
        return f"{self.activity}, {last}" if last else self.activity

    def _watch(
        self, store: BoundedStore, limit: float, abandon: Callable[[Exception], object], on_loss: Callable[[], object]
    ) -> None:
        neighbour = (self._launch.rank + 1) % self._launch.world_size
        last, since = "", time.monotonic()
        while not self._stop.wait(WATCH_SECONDS):
            if self.is_terminated:
                abandon(CommunicationError(self._launch.rank, self.activity, "terminated by the launcher"))
                return
            try:
                lost = self._entries("lost")
                count, _ = self._heartbeats(store, [neighbour])[neighbour]
            except (dist.DistError, RuntimeError):
                # The store's node is gone. Communication will fail, or the launcher will terminate this rank.
                continue
            if lost:
                on_loss()
                problem = f"rank {next(iter(lost))} has given up"
                if not self._stop.wait(GRACE_SECONDS):
                    abandon(CommunicationError(self._launch.rank, self.activity, problem))
                return
            if count != last:
                last, since = count, time.monotonic()
            elif time.monotonic() - since > limit:
                abandon(CommunicationError(self._launch.rank, self.activity, f"silent for {limit:.0f} s", neighbour))
                return

    def _heartbeats(self, store: BoundedStore, ranks: Sequence[int]) -> dict[int, tuple[str, str]]:
        # The last heartbeat of each rank with its activity, in one request if all of them have started.
        keys = {rank: f"{_PREFIX}/heartbeat/{rank}" for rank in ranks}
        if not store.check([*keys.values()]):
            # multi_get blocks on missing keys.
            keys = {rank: key for rank, key in keys.items() if store.check([key])}
        values = store.multi_get([*keys.values()]) if keys else []
        heartbeats = dict.fromkeys(ranks, ("0", "start"))
        for rank, value in zip(keys, values, strict=True):
            beat, _, activity = value.decode().partition(" ")
            heartbeats[rank] = beat, activity
        return heartbeats

    def _entries(self, kind: str) -> dict[int, list[Any]]:
        # In order of time.
        return dict(json.loads(line) for line in (self._get(kind) or "").splitlines())

    def _append(self, kind: str, *entry: str | int) -> None:
        # To a key that all ranks share, so that one request reads the entries of all.
        if self._store is None:
            return
        line = json.dumps([self._launch.rank, entry]) + "\n"
        try:
            self._store.append(f"{_PREFIX}/{kind}", line)
        except (dist.DistError, RuntimeError) as error:
            logger.info("the launcher's store is gone: %s", error)

    def _set(self, key: str, value: str) -> None:
        if self._store is not None:
            self._store.set(f"{_PREFIX}/{key}", value)

    def _get(self, key: str) -> str | None:
        if self._store is None or not self._store.check([f"{_PREFIX}/{key}"]):
            return None
        return self._store.get(f"{_PREFIX}/{key}").decode()


def _name_places(activities: Mapping[int, str]) -> str:
    # Groups ranks by activity: `ranks 0, 2 in step 3, optimizer; rank 1 in step 3, waiting for data`.
    by_activity: dict[str, list[int]] = {}
    for rank in sorted(activities):
        by_activity.setdefault(activities[rank], []).append(rank)
    return "; ".join(f"{name_ranks(ranks)} in {activity}" for activity, ranks in by_activity.items())


def is_communication_failure(error: BaseException) -> bool:
    """Whether torch.distributed raises this error when a peer is gone or late."""
    if isinstance(error, CommunicationError | dist.DistError):
        return True
    # gloo's failures are plain RuntimeErrors.
    return isinstance(error, RuntimeError) and any(
        mark in str(error) for mark in ("gloo", "Connection closed by peer", "Timed out waiting", "NCCL")
    )


def last_communication() -> str:
    """This rank's last collective as text, such as `all_reduce of [[4]] over "scan forward"`; empty if unknown."""
    dump: Callable[..., bytes] | None = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    entries = json.loads(dump(True, False)).get("entries") if dump is not None else None
    if not entries:
        return ""
    last = max(entries, key=lambda entry: entry["record_id"])
    name, group = last["profiling_name"].rpartition(":")[2], last["process_group"]
    return f'{name} of {last["input_sizes"]} over "{group[1] if group[1] != "undefined" else group[0]}"'
