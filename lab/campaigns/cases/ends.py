"""Interpreter exits while a thread is inside a torch call: `main` prints the exit codes.

Each exit runs in its own interpreter, which takes so long to finalise that the call returns meanwhile. Python ends a
thread that returns then, and C++ code aborts the whole process for that, see `zeco_train.system.background`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist

from zeco_train.collectives.worker import ScanWorker
from zeco_train.errors import ConfigError
from zeco_train.lifecycle import end
from zeco_train.lifecycle.end import Advice, Job, run_job
from zeco_train.lifecycle.join import Launch

_CALL_SECONDS = 1.0
_END_SECONDS = 2.5
# Longer than an exit waits for a thread.
_NEVER_SECONDS = 60.0


class _SlowStore:
    """A store that is slow to answer heartbeats, and only those."""

    def __init__(self, seconds: float) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        self._seconds = seconds
        self.asked = False

    def set(self, key: str, value: str) -> None:
        self.asked = True
        self._store.wait(["never"], timedelta(seconds=self._seconds))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _SlowEnd:
    """Delays the finalisation of the interpreter that drops it."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(_END_SECONDS)


def _raise(error: BaseException) -> NoReturn:
    raise error


def _with_heartbeat(act: Callable[[], int], seconds: float) -> int:
    store = _SlowStore(seconds)

    def command(running: Job) -> int:
        while not store.asked:
            time.sleep(0.01)
        return act()

    with mock.patch.object(end, "launcher_store", return_value=store):
        return run_job(command, Advice("", "", ""))


def _with_courier(act: Callable[[], int], seconds: float) -> int:
    store = _SlowStore(seconds)

    def command(running: Job) -> int:
        worker = ScanWorker(mock.Mock(), timedelta(seconds=1))
        worker.submit(lambda: store.set("", ""), [], torch.device("cpu"))
        while not store.asked:
            time.sleep(0.01)
        return act()

    return run_job(command, Advice("", "", ""))


_regular = partial(int, 3)
_mistake = partial(_raise, ConfigError("field", 1, "must be 2"))
_interrupt = partial(_raise, KeyboardInterrupt())
_bug = partial(_raise, KeyError("ours"))
_help = partial(_raise, SystemExit(0))

ENDS: dict[str, Callable[[], int]] = {
    "regular, heartbeat": partial(_with_heartbeat, _regular, _CALL_SECONDS),
    "help, heartbeat": partial(_with_heartbeat, _help, _CALL_SECONDS),
    "regular, worker": partial(_with_courier, _regular, _CALL_SECONDS),
    "mistake, worker": partial(_with_courier, _mistake, _CALL_SECONDS),
    "interrupt, worker": partial(_with_courier, _interrupt, _CALL_SECONDS),
    "bug, worker": partial(_with_courier, _bug, _CALL_SECONDS),
    "regular, stuck worker": partial(_with_courier, _regular, _NEVER_SECONDS),
    "bug, stuck worker": partial(_with_courier, _bug, _NEVER_SECONDS),
}


def main() -> int:
    """Run all exits concurrently; prints exit codes and stderr by name, as JSON."""
    started = {}
    for name, act in ENDS.items():
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(writing, 2)
            sys.modules["slow_end"] = _SlowEnd()  # type: ignore[assignment]
            with mock.patch.object(Launch, "from_environment", return_value=Launch(0, 1, 0)):
                return act()
        os.close(writing)
        started[name] = child, reading
    ended = {}
    for name, (child, reading) in started.items():
        with os.fdopen(reading) as file:
            err = file.read()
        ended[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), err
    print(json.dumps(ended))
    return 0
