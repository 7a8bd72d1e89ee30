"""`python -m zeco_train.bench` with a fault on rank 1 during measurement: `ZECO_FAULT=memory`, or `wait` to be killed.

Each rank creates `measuring_RANK` in the working directory once its heartbeat reports the current phase.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from zeco_train.bench import __main__ as command
from zeco_train.bench import collectives
from zeco_train.lifecycle.join import Launch, launcher_store

_RANK = os.environ["RANK"]


def _measure(*arguments: Any) -> None:
    store = launcher_store(Launch.from_environment())
    assert store is not None
    while b"a state of" not in store.get(f"zeco/heartbeat/{_RANK}"):
        time.sleep(0.05)
    Path(f"measuring_{_RANK}").touch()
    if _RANK == "1" and os.environ["ZECO_FAULT"] == "memory":
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB")
    if _RANK == "1":
        signal.pause()
    dist.barrier()


if __name__ == "__main__":
    with mock.patch.object(collectives, "_measure_size", _measure):
        sys.exit(command.main(sys.argv[1:]))
