"""A store whose requests end. If the network drops packets silently, torch's own would wait for an answer for ever.

That is the case on a node that is cut off from the launcher's: no connection is closed, and the timeout of a `TCPStore`
bounds its waits for keys only.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from zeco_train.system import background


class BoundedStore:
    """The requests that a watchdog makes, each of which ends within `seconds`.

    A thread makes them one after another, as the store's own connection does. Once it does not answer, every further
    request fails at once. Methods have the arguments of torch's, and raise `dist.DistNetworkError` then; the store's
    own errors are passed on.
    """

    def __init__(self, store: dist.Store, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        # None wakes the thread up to end.
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_silent = self._is_serving = self._is_stopped = False
        # Of the last two, and of putting a request where a thread serves it.
        self._lock = threading.Lock()

    def add(self, key: str, amount: int) -> int:
        """Add to a number; its new value."""
        return self._ask(lambda: self._store.add(key, amount))

    def append(self, key: str, text: str) -> None:
        """Append to a text."""
        self._ask(lambda: self._store.append(key, text))  # type: ignore[attr-defined]

    def set(self, key: str, text: str) -> None:
        """Store a text."""
        self._ask(lambda: self._store.set(key, text))

    def get(self, key: str) -> bytes:
        """A text; the key must exist."""
        return self._ask(lambda: self._store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The texts of several keys, which must exist."""
        return self._ask(lambda: self._store.multi_get(keys))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""
        return self._ask(lambda: self._store.check(keys))

    def _ask(self, request: Callable[[], Any]) -> Any:
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((request(), None))
            except BaseException as error:
                answers.put((None, error))

        if self._is_silent:
            raise dist.DistNetworkError(f"no answer within {self._seconds:g} s")
        self._put(run)
        try:
            answer, error = answers.get(timeout=self._seconds)
        except queue.Empty:
            self._is_silent = True
            raise dist.DistNetworkError(f"no answer within {self._seconds:g} s") from None
        if error is not None:
            raise error
        return answer

    def _put(self, request: Callable[[], None]) -> None:
        with self._lock:
            self._requests.put(request)
            if not self._is_serving:
                self._is_serving, self._is_stopped = True, False
                background.start(self._serve, name="store", stop=self._stop)

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
