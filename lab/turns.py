"""Threads of which one runs at a time, in the same order in every run.

A thousand threads that contend for Python's lock spend minutes on nothing else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Turns:
    """The turn, which the thread that makes this object has first, and a thread keeps until it waits or ends."""

    def __init__(self) -> None:
        self._ready: deque[threading.Lock] = deque()
        # In the order of their waits: a dict, since a set has no order.
        self._waiting: dict[threading.Lock, None] = {}
        self._resting: threading.Lock | None = None

    def task(self, run: Callable[[], None]) -> Callable[[], None]:
        """`run` for another thread, which starts with its turn."""
        turn = _closed()
        self._ready.append(turn)

        def wrapped() -> None:
            turn.acquire()
            try:
                run()
            finally:
                self._give()

        return wrapped

    def rest(self) -> None:
        """Let all tasks run to their ends."""
        self._resting = turn = _closed()
        self._give()
        turn.acquire()

    def wait(self, announce: Callable[[threading.Lock], object]) -> None:
        """Wait until `wake` is called with what `announce` is given, or until nobody is left who could call it."""
        turn = _closed()
        announce(turn)
        self._waiting[turn] = None
        self._give()
        turn.acquire()

    def wake(self, turn: threading.Lock) -> None:
        """Let a thread that waits go on, after those that are ready already."""
        del self._waiting[turn]
        self._ready.append(turn)

    def _give(self) -> None:
        if not self._ready and self._waiting:
            self.wake(next(iter(self._waiting)))
        if self._ready:
            self._ready.popleft().release()
        else:
            assert self._resting is not None
            self._resting.release()


def _closed() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
