"""Background threads, which are joined before the interpreter finalises.

Once Python 3.11 has begun to finalise, a thread that requests the GIL is ended by `pthread_exit`. If it returns from a
torch call, that unwinds through a noexcept C++ destructor, and the process dies of SIGABRT instead of its exit code. So
each thread is started here, and stopped and joined at the end of a command (`zeco_train.lifecycle.end`), or of any
other process that uses these modules. Threads are also daemons: one that waits for a lost peer must not block the exit.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

# For a store request or a read in progress.
_SECONDS_TO_END = 5.0

_lock = threading.Lock()
_running: dict[threading.Thread, Callable[[], object]] = {}


def start(
    target: Callable[..., object], *arguments: object, name: str, stop: Callable[[], object] = lambda: None
) -> threading.Thread:
    """Start a daemon thread that runs `target(*arguments)`.

    `stop` makes the thread end soon; it is called from another thread, possibly after this one has ended.
    """
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    with _lock:
        # Threads do not deregister themselves: they would still run for a moment afterwards.
        for ended in [other for other in _running if not other.is_alive()]:
            del _running[ended]
        thread.start()
        _running[thread] = stop
    return thread


def stop_all(seconds: float = _SECONDS_TO_END) -> list[str]:
    """Stop and join all threads but the calling one, in `seconds` for all together.

    Returns the names of those still running. The interpreter must not be finalised then.
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
