"""What ranks write for each other into the launcher's store: heartbeats, failures, and who has reported them."""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch.distributed as dist

from zeco_train.lifecycle.join import Launch
from zeco_train.system import background

# Of this module's keys.
_PREFIX = "zeco"
# The store was the launcher's, and does not come back; or it does not answer.
STORE_ERRORS = (dist.DistError, RuntimeError)

logger = logging.getLogger(__name__)


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
        """Store a JSON value for all ranks."""
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
