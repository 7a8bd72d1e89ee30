"""Background threads of this process, all of which end before the interpreter does.

Once Python 3.11 has begun to finalise, a thread that asks for the interpreter lock is ended by `pthread_exit`. If it
comes back from a call of torch (a request to a store, the release of a tensor), that unwinds through a C++ destructor,
which must not throw, and the process dies of SIGABRT: "terminate called without an active exception", whatever its exit
code was to be. So each thread is started here, and asked to end and joined at the end of a command, see
`zeco_train.lifecycle.job`, or of any other process that uses these modules. Threads are daemons besides: one that waits
for a peer that is gone must not keep the process from ending.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

# For a request to a store, or a read, that is under way.
_SECONDS_TO_END = 5.0

_lock = threading.Lock()
_running: dict[threading.Thread, Callable[[], object]] = {}


def start(
    target: Callable[..., object], *arguments: object, name: str, stop: Callable[[], object] = lambda: None
) -> threading.Thread:
    """Start a daemon thread that runs `target(*arguments)`.

    Args:
        name: of the thread.
        stop: makes the thread end soon; called from another one, possibly after the thread has ended.
    """
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    with _lock:
        # Not by the threads themselves: they would still have a little to do afterwards.
        for ended in [other for other in _running if not other.is_alive()]:
            del _running[ended]
        thread.start()
        _running[thread] = stop
    return thread


def stop_all(seconds: float = _SECONDS_TO_END) -> list[str]:
    """Have all threads end, and wait for that; the calling thread may be one of them, and is left alone.

    Args:
        seconds: bound of the wait for all of them together.

    Returns:
        The names of the threads that are still running. The interpreter must not be finalised then.
    """
    with _lock:
        threads = {thread: stop for thread, stop in _running.items() if thread is not threading.current_thread()}
    for stop in threads.values():
        stop()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]


atexit.register(stop_all)
