"""Ranks forked from a process that has imported torch and the trainer, with a launcher's store, as under torchrun.

For `many_ranks.py` and `recall_family.py`. A fork shares the memory of the imports and takes no time for them. The
forking process must not have started threads or queried CUDA devices: neither survives a fork.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import zeco_train.training.build  # noqa: F401 - train.py imports it after its arguments are checked
from zeco_train.system.signals import die_with_launcher


@dataclass(frozen=True)
class Ranks:
    """Forked ranks.

    Attributes:
        pids: by rank.
        store: process of the launcher's store.
        folder: of their output.
    """

    pids: list[int]
    store: int
    folder: Path

    def wait(self, seconds: float) -> list[int | None]:
        """Exit codes by rank, None for those that still run after `seconds`, which are killed."""
        deadline, codes = time.monotonic() + seconds, dict[int, int]()
        try:
            while len(codes) < len(self.pids) and time.monotonic() < deadline:
                for rank, pid in enumerate(self.pids):
                    if rank not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                        codes[rank] = os.waitstatus_to_exitcode(ended[1])
                time.sleep(0.05)
        finally:
            for pid in [pid for rank, pid in enumerate(self.pids) if rank not in codes] + [self.store]:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        return [codes.get(rank) for rank in range(len(self.pids))]

    def errors(self) -> list[str]:
        """Lines of errors that the ranks have printed."""
        return [line for lines in self._lines() for line in lines if line.startswith("error:")]

    def last_lines(self, count: int = 12) -> list[str]:
        """The end of each rank's output: of an exception that nothing has caught, where it was and what it says."""
        return [line for lines in self._lines() for line in lines[-count:]]

    def _lines(self) -> list[list[str]]:
        return [(self.folder / f"rank_{rank}.txt").read_text().splitlines() for rank in range(len(self.pids))]


def start(count: int, run: Callable[[int], int], folder: Path) -> Ranks:
    """Fork a launcher's store and `count` ranks.

    Args:
        count: number of ranks.
        run: what a rank does, given its number; returns the exit code.
        folder: of the ranks' output.
    """
    # What ranks import later; not at the top, where tests would import it to collect.
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp  # noqa: F401

    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        OMP_NUM_THREADS="1",
    )
    store = _fork(lambda: _serve(port), folder / "store.txt")
    pids = [_fork(lambda: _rank(rank, run), folder / f"rank_{rank}.txt") for rank in range(count)]  # noqa: B023
    return Ranks(pids, store, folder)


def _fork(run: Callable[[], int], output: Path) -> int:
    """Run a function in a new process, with its output in a file; returns its id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        code = run()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(port: int) -> int:
    die_with_launcher()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    signal.pause()
    del store
    return 0


def _rank(rank: int, run: Callable[[int], int]) -> int:
    os.nice(10)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    return run(rank)
