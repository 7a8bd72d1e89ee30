"""The processes that ranks are forked from. Without torch, which pytest's controller then need not import."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from multiprocessing import forkserver
from typing import Any
from unittest import mock

# CPU time of all ranks that have reported a result. Forked ranks are not children of the test process.
cpu_seconds = 0.0
# Thresholds of garbage collections. By the defaults they take a tenth of a rank's time: torch's first uses make many
# objects that stay.
GARBAGE = 100_000, 20, 20


class _Shared(forkserver.ForkServer):
    """Another process's server."""

    def __init__(self, place: Sequence[Any]) -> None:
        super().__init__()
        self._forkserver_address, self._forkserver_authkey = place
        # Each fork is given one; the server ends with the process that started it.
        self._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)

    def ensure_running(self) -> None:
        pass


# Of pytest's controller, if this process is one of its workers: places by whether kernels are interpreted.
shared: dict[bool, Sequence[Any]] = {}


@functools.cache
def server_of(interpreted: bool) -> forkserver.ForkServer:
    """The process that ranks are forked from, which has imported the trainer, or the kernels interpreted."""
    if interpreted in shared:
        return _Shared(shared[interpreted])
    server = forkserver.ForkServer()
    server.set_forkserver_preload([f"tests.support.preloaded{'_kernels' if interpreted else ''}"])
    return server


def place_of_server(interpreted: bool) -> tuple[Any, Any]:
    """Start it; what another process needs to use it."""
    server = server_of(interpreted)
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"} if interpreted else {}):
        server.ensure_running()
    return server._forkserver_address, getattr(server, "_forkserver_authkey", None)  # type: ignore[attr-defined]
