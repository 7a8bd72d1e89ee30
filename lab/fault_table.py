"""Question: what does a user see of real faults in real jobs, and after how long have all processes ended?
Command: python -m lab.fault_table [NAME …] > FILE
Date: 2026-11-21; the rows of NaNs 2026-11-25, f67979b
Answer: lab/fault_table.md.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from data.store import shard_name
from data.store.writer import StoreWriter
from tests.support.commands import Command, is_running, torchrun

TIMEOUT = 10.0
_ENOUGH = 180.0
_JOB = [
    "train.steps=1000000",
    f"parallel.timeout_seconds={TIMEOUT:g}",
    "run_dir=run",
    "checkpoint.every=5",
    "data.seq_len=96",
    "data.global_batch=1",
]


@dataclass
class Row:
    """A row of the table; seconds count from the fault.

    Attributes:
        printed: the lines for the user.
        codes: exit codes of the ranks as reported by torchrun.
        ranks_ended: until the last rank that could still run had ended; job_ended: until torchrun had ended.
    """

    printed: str
    codes: str
    ranks_ended: float
    job_ended: float


class Case:
    """A running job, and the timer."""

    def __init__(self, folder: Path, job: Command) -> None:
        self.folder, self.job = folder, job
        self.struck = 0.0

    def wait_for_steps(self, count: int = 3) -> None:
        """Wait until it has trained for some steps."""
        metrics = self.folder / "run" / "metrics.jsonl"
        done = lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= count  # noqa: E731
        self.job.wait_until(done, f"step {count}", _ENOUGH)
        self.job.ranks()

    def strike(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank and start the timer."""
        self.struck = time.time()
        os.kill(self.job.ranks()[rank], number)

    def end(self, without: tuple[int, ...] = (), also: Command | None = None) -> Row:
        """Wait for the launcher and all ranks to end, except those that cannot end by themselves."""
        fault = self.folder / "fault"
        if not self.struck:
            self.job.wait_until(fault.exists, "fault", _ENOUGH)
            self.struck = fault.stat().st_mtime
        ranks = {rank: process for rank, process in self.job.ranks().items() if rank not in without}
        ended = None
        while self.job.poll() is None or ended is None:
            if ended is None and not any(map(is_running, ranks.values())):
                ended = time.time() - self.struck
            time.sleep(0.02)
            assert time.time() - self.struck < _ENOUGH, self.job.err
        job_ended = time.time() - self.struck
        err = self.job.err + (also.err if also is not None else "")
        codes = sorted(set(re.findall(r"exitcode *: (-?\d+) \(pid", err)), key=int)
        return Row(self._lines(err), ", ".join(codes), ended, job_ended)

    def _lines(self, err: str) -> str:
        lines = [line for line in err.splitlines() if line.startswith(("error: ", "warning: "))]
        lines += [line for line in self.job.out.splitlines() if "goes on from there" in line]
        return "<br>".join(line.replace(f"{self.folder}/", "").replace("|", "\\|") for line in lines) or "(nothing)"


@contextlib.contextmanager
def _case(ranks: int, *settings: str, fault: str = ""):  # type: ignore[no-untyped-def]
    folder = Path(tempfile.mkdtemp(prefix="zeco-faults-"))
    try:
        with torchrun(ranks, folder, *_JOB, *settings, fault=fault, fresh=True) as job:
            yield Case(folder, job)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _signal(number: signal.Signals) -> Row:
    with _case(2) as case:
        case.wait_for_steps()
        case.struck = time.time()
        if number is signal.SIGUSR1:
            case.job.warn()
        else:
            case.job.signal(number)
        return case.end()


def _lost(number: signal.Signals) -> Row:
    with _case(3) as case:
        case.wait_for_steps()
        case.strike(1, number)
        return case.end(without=(1,))


def _inside(fault: str, *settings: str, ranks: int = 3) -> Row:
    with _case(ranks, *settings, fault=fault) as case:
        case.job.wait_until((case.folder / "fault").exists, "fault", _ENOUGH)
        return case.end()


def _at_start(fault: str) -> Row:
    with _case(2, fault=fault) as case:
        case.job.wait_until(lambda: len(case.job.ranks()) == 2, "two ranks", _ENOUGH)
        case.struck = time.time()
        return case.end()


def _skips() -> Row:
    with _case(2, "train.nonfinite=skip:2", fault="activation:1:3:5:6:8:9:10") as case:
        return case.end()


def _launcher_killed() -> Row:
    with _case(2) as case:
        case.wait_for_steps()
        case.struck = time.time()
        case.job.signal(signal.SIGKILL)
        return case.end()


def _node_lost(node: int) -> Row:
    """Two launchers with c10d rendezvous, as on two nodes; one is killed together with its ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="zeco-faults-"))
    options = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=faults"]
    try:
        with contextlib.ExitStack() as stack:
            jobs = []
            for number in range(2):
                host = f"--rdzv-conf=is_host={number == 0}"
                launcher = [*options, host, "--local-addr=127.0.0.1"]
                job = torchrun(2, folder, *_JOB, launcher_options=launcher, fresh=True)
                jobs.append(stack.enter_context(job))
            other = Case(folder, jobs[1 - node])
            other.wait_for_steps()
            doomed = jobs[node]
            other.struck = time.time()
            for process in (doomed.pid, *doomed.ranks().values()):
                os.kill(process, signal.SIGKILL)
            return other.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _data(harm: Callable[[Path], object]) -> Row:
    """A store of several shards, one of which is damaged while the run reads it."""
    folder = Path(tempfile.mkdtemp(prefix="zeco-faults-"))
    try:
        tokens = np.random.default_rng(0).integers(3, 250, 200_000)
        with StoreWriter(
            folder / "store", vocab_size=259, eos_id=1, tokenizer={"kind": "bytes"}, shard_tokens=50_000
        ) as writer:
            writer.append(tokens, [len(tokens)])
            writer.finish("sources")
        settings = ["data=tokens", "data.path=store", "train.eval_sequences=0"]
        with torchrun(2, folder, *_JOB, *settings, fresh=True) as job:
            case = Case(folder, job)
            case.wait_for_steps()
            case.struck = time.time()
            harm(folder / "store" / shard_name(2))
            return case.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _truncate(path: Path) -> None:
    os.truncate(path, 1000)


def _overwrite(path: Path) -> None:
    """Overwrite a file in place with garbage of the same size."""
    with path.open("r+b") as file:
        file.write(np.full(path.stat().st_size // 2, 60_000, np.uint16).tobytes())


FAULTS: dict[str, tuple[str, Callable[[], Row]]] = {
    "usr1": ("SIGUSR1 to all processes (Slurm's warning)", lambda: _signal(signal.SIGUSR1)),
    "term": ("SIGTERM to torchrun", lambda: _signal(signal.SIGTERM)),
    "kill": ("rank 1 of 3 killed (SIGKILL; the kernel's OOM killer does the same)", lambda: _lost(signal.SIGKILL)),
    "stop": ("rank 1 of 3 stopped (SIGSTOP)", lambda: _lost(signal.SIGSTOP)),
    "hang": ("rank 1 of 3 hangs in a read that never returns", lambda: _inside("hang:1:8")),
    "crash": ("rank 1 of 3 crashes (SIGSEGV)", lambda: _inside("crash:1:8")),
    "memory": (
        "rank 1 of 3 gets no more memory (RLIMIT_AS)",
        lambda: _inside("memory:1:8", "data.seq_len=49152", "model.hidden_size=128"),
    ),
    "bug": ("an exception that nobody expects, on rank 1 of 3", lambda: _inside("bug:1:8")),
    "node": ("one of two nodes lost (torchrun and its 2 ranks killed)", lambda: _node_lost(1)),
    "first node": ("the node of the rendezvous lost", lambda: _node_lost(0)),
    "launcher": ("torchrun killed (SIGKILL)", _launcher_killed),
    "gradient": (
        "NaN written into a gradient on rank 1 of 2, after its reduction",
        lambda: _inside("gradient:1:8", ranks=2),
    ),
    "activation": ("NaN in an activation on rank 1 of 2", lambda: _inside("activation:1:8", ranks=2)),
    "skip": ("the same at steps 3, 5, 6, 8, 9, 10 with `train.nonfinite=skip:2`", _skips),
    "truncated": ("a shard of the data becomes shorter in mid-run", lambda: _data(_truncate)),
    "garbage": ("a shard is overwritten with garbage in mid-run", lambda: _data(_overwrite)),
    "removed": ("a shard is removed in mid-run", lambda: _data(Path.unlink)),
    "setting": ("rank 1 of 2 started with another `optim.lr`", lambda: _at_start("setting:1:1")),
}


def main(names: list[str]) -> None:
    """Run the named faults, or all, and print the table."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"gloo, {os.cpu_count()} CPU cores"
    load = f"load average {os.getloadavg()[0]:.0f}"
    print(f"torch {torch.__version__}, {device} ({load}), parallel.timeout_seconds={TIMEOUT:g}.\n")
    print("| fault | printed | ranks' exit codes | ranks ended after | job ended after |")
    print("|---|---|---|---|---|", flush=True)
    for name in names or FAULTS:
        title, run = FAULTS[name]
        row = run()
        print(
            f"| {title} | {row.printed} | {row.codes} | {row.ranks_ended:.1f} s | {row.job_ended:.1f} s |", flush=True
        )


if __name__ == "__main__":
    main(sys.argv[1:])
