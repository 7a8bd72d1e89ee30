"""Who is at fault when a peer does not answer.

Every rank counts up a heartbeat in the launcher's store from a thread of its own. Nobody reads it while all goes
well. When a communication fails or times out, the others look whose heartbeat has stopped: a rank that is dead,
stopped (SIGSTOP) or on a lost node. A rank that ends with an error of its own leaves its message there too.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from zeco_train.errors import CommunicationError
from zeco_train.mesh import Launch

_PERIOD_SECONDS = 0.5
# Six periods: a rank that is merely slow (two cores, eight processes) still beats within that.
_LISTEN_SECONDS = 3.0

logger = logging.getLogger(__name__)


class Watchdog:
    """This rank's heartbeat, and a reader of the others'. Does nothing in a world of one."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._activity = "start"
        self._stop = threading.Event()
        self._store: dist.TCPStore | None = None
        if launch.world_size > 1:
            self._store = _connect()
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def enter(self, activity: str) -> None:
        """Say what this rank is doing now, for the message of whoever finds it silent."""
        self._activity = activity

    def stop(self) -> None:
        """End the heartbeat, at a regular end."""
        self._stop.set()

    def report(self, message: str) -> None:
        """Leave the reason for which this rank ends."""
        if self._store is not None:
            try:
                self._store.set(f"zeco/end/{self._launch.rank}", message)
            except dist.DistError as error:
                logger.info("the store is gone: %s", error)

    def diagnose(self, error: Exception) -> tuple[CommunicationError, bool]:
        """Name the rank at fault behind a failed communication.

        Returns:
            The error for the user, and whether this rank is the one to print it: the lowest that still lives.
        """
        rank, others = self._launch.rank, [r for r in range(self._launch.world_size) if r != self._launch.rank]
        operation = error.operation if isinstance(error, CommunicationError) else self._activity
        detail = (str(error).splitlines() or [type(error).__name__])[0]
        try:
            before = {r: self._read(r) for r in others}
            time.sleep(_LISTEN_SECONDS)
            after = {r: self._read(r) for r in others}
            ended = {r: text for r in others if (text := self._last_words(r))}
        except (dist.DistError, RuntimeError) as lost:
            logger.info("the store is gone: %s", lost)
            return CommunicationError(rank, operation, f"{detail} (and the launcher's store is gone)"), True
        silent = [r for r in others if before[r][0] == after[r][0]]
        culprits = [f"rank {r} ended: {text}" for r, text in ended.items()] or [
            f"rank {r} no longer answers (killed, stopped or unreachable; last seen in {after[r][1]})" for r in silent
        ]
        living = [r for r in range(self._launch.world_size) if r not in silent and r not in ended]
        problem = "; ".join(culprits) if culprits else f"{detail} (all ranks are alive: one of them is stuck)"
        return CommunicationError(rank, operation, problem + "; nothing was saved"), rank == min(living)

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(_PERIOD_SECONDS):
            count += 1
            try:
                assert self._store is not None
                self._store.set(f"zeco/heartbeat/{self._launch.rank}", f"{count} {self._activity}")
            except (dist.DistError, RuntimeError):
                return

    def _read(self, rank: int) -> tuple[str, str]:
        assert self._store is not None
        key = f"zeco/heartbeat/{rank}"
        if not self._store.check([key]):
            return "", "start"
        count, _, activity = self._store.get(key).decode().partition(" ")
        return count, activity

    def _last_words(self, rank: int) -> str:
        assert self._store is not None
        key = f"zeco/end/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""


def is_communication_failure(error: BaseException) -> bool:
    """True for what torch.distributed raises when a peer is gone or late."""
    if isinstance(error, CommunicationError | dist.DistError):
        return True
    # gloo's failures are plain RuntimeErrors.
    return isinstance(error, RuntimeError) and any(
        mark in str(error) for mark in ("gloo", "Connection closed by peer", "Timed out waiting", "NCCL")
    )


def _connect() -> dist.TCPStore:
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=10)
    )
