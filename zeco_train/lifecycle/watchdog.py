"""Who is at fault when a peer does not answer.

Every rank counts up a heartbeat in the launcher's store from a thread of its own. When a communication fails or times
out, the first rank to notice looks whose heartbeat has stopped: a rank that is dead, stopped (SIGSTOP) or on a lost
node. The others read what it has found: if each of 256 looked at all, the one store would get 400,000 requests at once.
A rank that ends with an error of its own leaves its message there too. While all goes well each rank reads its
neighbour's heartbeat only: some waits have no bound of their own (a host that waits for a CUDA stream), and end through
this. And word of a lost job spreads: once one rank gives up, all others end within moments, whatever they are waiting
for.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zeco_train.distributed.agreement import name_ranks
from zeco_train.distributed.mesh import Launch, await_listener, has_launcher_store
from zeco_train.distributed.postmortem import last_communication
from zeco_train.errors import CommunicationError
from zeco_train.system import background

_PERIOD_SECONDS = 0.5
# Six periods: a rank that is merely slow (two cores, eight processes) still beats within that.
_LISTEN_SECONDS = 3.0
# How often a rank looks at its neighbour, and whether the job is lost.
_WATCH_SECONDS = 2.0
# A rank that hears of the loss may be about to meet it itself, and then has more to say.
_GRACE_SECONDS = 6.0
# For the launcher's store to be reached.
_STORE_TIMEOUT = timedelta(seconds=10)

# Exit code of ranks that their launcher has ended although none of them was lost, as a shell has it.
TERMINATED = 128 + signal.SIGTERM

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Finding:
    """Attributes:
    culprits: the ranks at fault, and why; empty if all are alive.
    places: what ranks were doing.
    exit_code: of all that end for this; `TERMINATED` if the launcher has ended ranks of which none is at fault.
    """

    culprits: str
    places: str
    exit_code: int


class Watchdog:
    """This rank's heartbeat, and a reader of the others'.

    Args:
        launch: this rank and how many there are.
        store: where heartbeats go, see `launcher_store`; without one nothing is kept and nobody can be named.
        remedy: what to do about a lost rank, for the user.
        timeout_key: the setting that bounds waits.

    Attributes:
        activity: what this rank is doing now, see `enter`.
        is_terminated: set once this rank has got SIGTERM, for `guard` to act on.
    """

    def __init__(
        self,
        launch: Launch,
        store: dist.Store | None,
        remedy: str = "",
        timeout_key: str = "the timeout",
    ) -> None:
        self._launch, self._store, self._remedy, self._timeout_key = launch, store, remedy, timeout_key
        self.activity = "start"
        self.is_terminated = False
        self._stop = threading.Event()
        # A launcher that restarts a failed group keeps its store, and the words of the dead in it.
        self._prefix = f"zeco/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._spoken = f"{self._prefix}/spoken"
        if store is not None:
            background.start(self._beat, name="heartbeat", stop=self.stop)

    def enter(self, activity: str) -> None:
        """Say what this rank is doing now, for the message of whoever finds it silent."""
        self.activity = activity

    def guard(self, timeout: timedelta, abandon: Callable[[Exception], object], on_loss: Callable[[], object]) -> None:
        """Watch the next rank from now on: once it is silent for longer than `timeout`, call `abandon` from a thread.

        Communication that is bounded by `timeout` fails earlier, and on its own. If another rank has given up,
        `on_loss` is called at once, and `abandon` after a moment. `abandon` is also called after SIGTERM, by which a
        launcher ends the survivors of a lost rank, and all ranks if it has been terminated itself.
        """
        if self._store is not None:
            limit = timeout.total_seconds() + 2 * _LISTEN_SECONDS
            background.start(self._watch, self._store, limit, abandon, on_loss, name="watchdog", stop=self.stop)

    def stop(self) -> None:
        """End the heartbeat and the watch, at a regular end; their threads are joined by `background.stop_all`."""
        self._stop.set()

    def report_failure(self, message: str, exit_code: int = CommunicationError.exit_code) -> None:
        """Leave word that this rank ends through a fault of its own, and which.

        Args:
            exit_code: of the others, too: by that of whoever ends first a launcher judges whether to start again.
        """
        self._add_word("failed", message, exit_code)
        self.report_loss()

    def report_leaving(self) -> None:
        """Leave word that this rank ends because a peer is lost, so that nobody takes it for the culprit."""
        self._add_word("left")

    def report_loss(self) -> None:
        """Leave word that the job is lost: all ranks are to end."""
        self._add_word("lost")

    def may_speak(self) -> bool:
        """True for the first rank that asks: one failure, which all ranks meet, is explained to the user once.

        With the launcher's store gone, once a node.
        """
        if self._store is None:
            # Before they have joined, no other rank is known to have the same error.
            return self._launch.rank == 0 or not dist.is_initialized()
        try:
            return self._store.add(self._spoken, 1) == 1
        except (dist.DistError, RuntimeError) as error:
            logger.info("the launcher's store is gone: %s", error)
            return self._launch.local_rank == 0

    def has_spoken(self) -> bool:
        """True once a rank has been given the word by `may_speak`, or when that cannot be known any more."""
        if self._store is None:
            return False
        try:
            return self._store.check([self._spoken])
        except (dist.DistError, RuntimeError):
            return True

    def diagnose(self, error: Exception) -> CommunicationError:
        """The error for the user behind a failed communication: it names the rank at fault."""
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

    def _find(self, store: dist.Store) -> _Finding:
        """What the first rank that asks finds, on every rank; should that one be lost meanwhile, the next one looks."""
        turn = 0
        while store.add(f"{self._prefix}/looking/{turn}", 1) > 1:
            deadline = time.monotonic() + 2 * _LISTEN_SECONDS
            # Not by the store's own wait, which would hold up this rank's heartbeat on the same connection.
            while time.monotonic() < deadline:
                if (text := self._get("finding")) is not None:
                    return _Finding(**json.loads(text))
                time.sleep(_PERIOD_SECONDS)
            turn += 1
        finding = self._look(store)
        self._set("finding", json.dumps(asdict(finding)))
        return finding

    def _look(self, store: dist.Store) -> _Finding:
        """Listen to all other ranks."""
        others = [r for r in range(self._launch.world_size) if r != self._launch.rank]
        before = self._heartbeats(store, others)
        time.sleep(_LISTEN_SECONDS)
        after = self._heartbeats(store, others)
        failed, left = self._words("failed"), self._words("left")
        silent = [r for r in others if before[r][0] == after[r][0] and r not in left and r not in failed]
        culprits = [f"rank {r} failed: {text}" for r, (text, _) in sorted(failed.items())] or [
            f"rank {r} no longer answers (killed, stopped or unreachable; last seen in {after[r][1]})" for r in silent
        ]
        places = {self._launch.rank: self.activity} | {r: after[r][1] for r in others if r not in left}
        # Of the first one that failed.
        exit_code = next((code for _, code in failed.values()), CommunicationError.exit_code)
        if self.is_terminated and not culprits:
            exit_code = TERMINATED
        return _Finding("; ".join(culprits), _where(places), exit_code)

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(_PERIOD_SECONDS):
            count += 1
            try:
                self._set(f"heartbeat/{self._launch.rank}", f"{count} {self.activity}")
            except (dist.DistError, RuntimeError):
                return

    def _operation(self, error: Exception) -> str:
        """What this rank was doing: its activity, and the communication that has failed, or the last one."""
        if isinstance(error, CommunicationError):
            last = "" if error.operation == self.activity else error.operation
        else:
            last = last_communication() if dist.is_initialized() else ""
        return f"{self.activity}, {last}" if last else self.activity

    def _watch(
        self, store: dist.Store, limit: float, abandon: Callable[[Exception], object], on_loss: Callable[[], object]
    ) -> None:
        neighbour = (self._launch.rank + 1) % self._launch.world_size
        last, since = "", time.monotonic()
        while not self._stop.wait(_WATCH_SECONDS):
            if self.is_terminated:
                abandon(CommunicationError(self._launch.rank, self.activity, "terminated by the launcher"))
                return
            try:
                lost = self._words("lost")
                count, _ = self._heartbeats(store, [neighbour])[neighbour]
            except (dist.DistError, RuntimeError):
                # The store's node is gone. Communication will fail, or the launcher terminate this rank.
                continue
            if lost:
                on_loss()
                problem = f"rank {next(iter(lost))} has given up"
                if not self._stop.wait(_GRACE_SECONDS):
                    abandon(CommunicationError(self._launch.rank, self.activity, problem))
                return
            if count != last:
                last, since = count, time.monotonic()
            elif time.monotonic() - since > limit:
                abandon(CommunicationError(self._launch.rank, self.activity, f"silent for {limit:.0f} s", neighbour))
                return

    def _heartbeats(self, store: dist.Store, ranks: Sequence[int]) -> dict[int, tuple[str, str]]:
        """The last beat of each rank, and what it was doing, in one request if all of them have started."""
        keys = {rank: f"{self._prefix}/heartbeat/{rank}" for rank in ranks}
        if not store.check([*keys.values()]):
            # To ask for the value of one that is not there would be to wait for it.
            keys = {rank: key for rank, key in keys.items() if store.check([key])}
        values = store.multi_get([*keys.values()]) if keys else []
        heartbeats = dict.fromkeys(ranks, ("0", "start"))
        for rank, value in zip(keys, values, strict=True):
            beat, _, activity = value.decode().partition(" ")
            heartbeats[rank] = beat, activity
        return heartbeats

    def _words(self, kind: str) -> dict[int, list[Any]]:
        """What ranks have left by `_add_word`, the first one first."""
        return dict(json.loads(line) for line in (self._get(kind) or "").splitlines())

    def _add_word(self, kind: str, *word: str | int) -> None:
        """Append to a key that all ranks share: it is there to be read in one request, whoever has left a word."""
        if self._store is None:
            return
        try:
            line = json.dumps([self._launch.rank, word]) + "\n"
            self._store.append(f"{self._prefix}/{kind}", line)  # type: ignore[attr-defined]
        except (dist.DistError, RuntimeError) as error:
            logger.info("the launcher's store is gone: %s", error)

    def _set(self, key: str, value: str) -> None:
        if self._store is not None:
            self._store.set(f"{self._prefix}/{key}", value)

    def _get(self, key: str) -> str | None:
        if self._store is None or not self._store.check([f"{self._prefix}/{key}"]):
            return None
        return self._store.get(f"{self._prefix}/{key}").decode()


def _where(activities: Mapping[int, str]) -> str:
    """ "ranks 0, 2 in step 3, optimizer; rank 1 in step 3, waiting for data"."""
    by_activity: dict[str, list[int]] = {}
    for rank in sorted(activities):
        by_activity.setdefault(activities[rank], []).append(rank)
    return "; ".join(f"{name_ranks(ranks)} in {activity}" for activity, ranks in by_activity.items())


def is_communication_failure(error: BaseException) -> bool:
    """True for what torch.distributed raises when a peer is gone or late."""
    if isinstance(error, CommunicationError | dist.DistError):
        return True
    # gloo's failures are plain RuntimeErrors.
    return isinstance(error, RuntimeError) and any(
        mark in str(error) for mark in ("gloo", "Connection closed by peer", "Timed out waiting", "NCCL")
    )


def launcher_store(launch: Launch) -> dist.TCPStore | None:
    """A connection of its own to torchrun's store; None in a world of one, and under launchers that have no store.

    Raises:
        CommunicationError: it cannot be reached.
    """
    if launch.world_size == 1 or not has_launcher_store():
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    unreachable = f"the launcher's store at {host}:{port} cannot be reached; its node may be gone"
    # torch would print a page of C++ frames.
    if await_listener(host, port, _STORE_TIMEOUT) is not None:
        raise CommunicationError(launch.rank, "start", unreachable)
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=_STORE_TIMEOUT)
    except (dist.DistError, RuntimeError) as error:
        raise CommunicationError(launch.rank, "start", unreachable) from error
