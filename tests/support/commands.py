"""Runs `train.py` as a user does: in-process to check its messages, and under torchrun for several ranks."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from unittest import mock

import torch
import torch.distributed as dist

from data.sources import corpora
from tests.support.loaded import Forked, Start, can_fork, ignored_signals, loaded, python_path
from tests.support.waiting import ENOUGH
from zeco_train import cli
from zeco_train.lifecycle import join
from zeco_train.lifecycle.logs import close_logging
from zeco_train.system import environment
from zeco_train.system.signals import STOP_SIGNALS
from zeco_train.tracking import recorder

REPOSITORY = Path(__file__).resolve().parents[2]
TORCHRUN = (sys.executable, str(REPOSITORY / "tests/support/torchrun.py"))
# A model of one small layer: these tests are about the run's behaviour, not its result.
SMALL = [
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.intermediate_size=32",
    "data.seq_len=64",
    "data.global_batch=4",
    "sched.warmup_steps=2",
    "train.log_every=1",
    "train.eval_sequences=0",
]


@dataclass(frozen=True)
class Outcome:
    """Result of a command."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """The user-facing error lines, without their prefix."""
        prefix = "error: "
        return [line.removeprefix(prefix) for line in self.err.splitlines() if line.startswith(prefix)]


class _Exit(BaseException):
    """Stands for `os._exit`."""


def _exit(code: int) -> NoReturn:
    raise _Exit(code)


# Each run reads all sources of the standard library and its own, and asks git four times for the commit.
_read = corpora.standard_library_documents
_read_once, _commit_once, _code_once = map(functools.cache, (_read, environment._commit, join._code_version))


def train_here(*arguments: str, draws: bool = False) -> Outcome:
    """Run `train.py` on one rank inside this process; see `run_here`. Pictures would take a third of its time."""
    if draws:
        return run_here(cli.main, *SMALL, *arguments)
    with mock.patch.multiple(recorder, plot_run=mock.DEFAULT, plot_validations=mock.DEFAULT):
        return run_here(cli.main, *SMALL, *arguments)


def run_here(main: Callable[[list[str]], int], *arguments: str) -> Outcome:
    """Run a command on one rank inside this process, however it exits; much faster than a subprocess."""
    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    # A test may have replaced it.
    read = _read_once if corpora.standard_library_documents is _read else corpora.standard_library_documents
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch("os._exit", _exit),
            mock.patch.object(corpora, "standard_library_documents", read),
            mock.patch.object(environment, "_commit", _commit_once),
            mock.patch.object(join, "_code_version", _code_once),
            # Restore the environment: a command sets variables for itself and its children.
            mock.patch.dict(os.environ),
        ):
            code = main([*arguments])
    except _Exit as end:
        code = end.args[0]
    finally:
        close_logging()
        if dist.is_initialized():
            dist.destroy_process_group()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Outcome(code, out.getvalue(), err.getvalue())


class Command:
    """A process that runs `train.py`, with its ranks; leaving the `with` block kills those that are still running.

    Commands of Python and the ranks of `TORCHRUN` are forks of a process that has imported the trainer, unless `fresh`:
    for claims about imports, the start or the end of the interpreter, or the time of a start. See support/loaded.py.
    """

    def __init__(self, command: list[str], folder: Path, fault: str = "", fresh: bool = False) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(), "ZECO_FAULT": fault}
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._process: Forked | subprocess.Popen[bytes]
        # Devices that a process has queried are lost in its forks.
        if fresh or torch.cuda.is_available() or not can_fork(command, environment):
            # As `trap '' USR1` in a batch script: otherwise Slurm's warning signal would kill torchrun.
            command = ["/bin/sh", "-c", "trap '' USR1; exec \"$@\"", "sh", *command]
            self._process = subprocess.Popen(command, cwd=folder, env=environment, stdout=self._out, stderr=self._err)
        else:
            launches = command[1] == TORCHRUN[1] or command[1:3] == ["-m", "torch.distributed.run"]
            ignored = [*ignored_signals(), signal.SIGUSR1]
            start = Start(command, str(folder), environment, ignored, launches=launches)
            self._process = loaded().start(start, self._out.fileno(), self._err.fileno())
        self._ranks: dict[int, int] = {}

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in [self._process.pid, *_ranks_of(self._process.pid).values(), *self._ranks.values()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait()
        self._out.close()
        self._err.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    @property
    def out(self) -> str:
        return _contents(self._out)

    @property
    def err(self) -> str:
        return _contents(self._err)

    def ranks(self) -> dict[int, int]:
        """Process ids by rank; cached, since children of a dead launcher cannot be found any more."""
        self._ranks |= _ranks_of(self._process.pid)
        return self._ranks

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def warn(self) -> None:
        """Send SIGUSR1 to the launcher and its ranks, as Slurm does to all processes of a step."""
        for process in (self._process.pid, *self.ranks().values()):
            os.kill(process, signal.SIGUSR1)

    def wait(self, timeout: float = ENOUGH) -> Outcome:
        """Wait for the end.

        Raises:
            AssertionError: it still runs after `timeout` seconds.
        """
        self.wait_until(lambda: self._process.poll() is not None, "end", timeout)
        return Outcome(self._process.wait(), self.out, self.err)

    def wait_until(self, condition: Callable[[], object], what: str, timeout: float = ENOUGH) -> float:
        """Wait for a condition; returns the seconds waited."""
        started = time.monotonic()
        while not condition():
            waited = time.monotonic() - started
            assert waited < timeout, f"no {what} within {timeout:g} s\n{self.out}\n{self.err}"
            assert what == "end" or self._process.poll() is None, f"ended before {what}\n{self.out}\n{self.err}"
            time.sleep(0.05)
        return time.monotonic() - started


def torchrun(
    ranks: int,
    folder: Path,
    *arguments: str,
    fault: str = "",
    launcher_options: Sequence[str] = ("--standalone",),
    fresh: bool = False,
) -> Command:
    """Start `train.py` on several ranks of this machine, unmodified or with a fault (see support/faulty_train.py)."""
    launcher = [*TORCHRUN, *launcher_options, "--nproc-per-node", str(ranks)]
    script = REPOSITORY / ("tests/support/faulty_train.py" if fault else "train.py")
    return Command([*launcher, str(script), *SMALL, *arguments], folder, fault, fresh)


def check_line(outcome: Outcome, code: int, *parts: str) -> None:
    """Check that stderr is a single line that contains each of `parts`."""
    assert outcome.code == code, outcome
    assert len(outcome.errors) == 1, outcome
    assert outcome.err == f"error: {outcome.errors[0]}\n"
    for part in parts:
        assert part in outcome.errors[0]


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """The contents of a folder by path: bytes of files, None for folders."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def is_running(process: int) -> bool:
    """Whether a process exists and is not a zombie."""
    state = _stat(process)
    return state is not None and state[0] != "Z"


def _contents(file: io.BufferedRandom) -> str:
    file.seek(0, os.SEEK_END)
    return os.pread(file.fileno(), file.tell(), 0).decode(errors="replace")


def _ranks_of(launcher: int) -> dict[int, int]:
    ranks = {}
    for process in _children(launcher):
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            rank = next((entry for entry in environment if entry.startswith(b"RANK=")), None)
            if rank is not None:
                ranks[int(rank.removeprefix(b"RANK="))] = process
    return ranks


def _children(parent: int) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (stat := _stat(int(folder.name))) and int(stat[1]) == parent:
            yield int(folder.name)


def _stat(process: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on; None if the process is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
