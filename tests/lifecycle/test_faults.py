"""Ranks that die or hang, signals, non-finite losses: the job ends in bounded time and saves only valid states."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.commands import Command, Outcome, is_running, torchrun, train_here
from tests.support.replays import REPLAYABLE, SEQ_LEN, can_replay, replayed_steps
from zeco_train.errors import NonFiniteError
from zeco_train.lifecycle.logs import DUMP_SECONDS
from zeco_train.lifecycle.watch import REPORT_SECONDS
from zeco_train.training.graphs import WARM_UP

# Bound of a wait for a peer in these runs.
TIMEOUT = 10.0
# Before a report, to dump the flight records of a device that hangs in a replay.
DUMPS = 2 * DUMP_SECONDS
# No fault; ranks synchronise before they join, see tests/support/faulty_train.py.
NONE = "none:0"

UNSTABLE = ["optim.grad_clip=0", "sched.warmup_steps=0", "checkpoint.every=1"]
ENDLESS = ["train.steps=1000000", f"parallel.timeout_seconds={TIMEOUT}", "checkpoint.keep=0", "run_dir=run"]


@dataclass(frozen=True)
class Way:
    """How the steps of a job run that loses a rank.

    Attributes:
        settings: beside `ENDLESS`.
        timeout: bound of a wait for a peer.
        every: steps between two checkpoints; 0: none.
        replays: as CUDA graphs.
    """

    ranks: int
    settings: list[str]
    timeout: float
    every: int
    replays: bool = False

    def start(self, folder: Path) -> Command:
        if self.replays and not can_replay():
            pytest.skip("needs 2 GPUs")
        wait = [f"parallel.timeout_seconds={self.timeout}", f"checkpoint.every={self.every}"]
        return torchrun(self.ranks, folder, *ENDLESS, *wait, *self.settings, fault=NONE)

    def wait_for_steps(self, job: Command, folder: Path, count: int) -> float:
        """Wait for steps of the job's first start, and that they are replayed; see `wait_for_steps` for the result."""
        bound = wait_for_steps(job, folder, count, self.timeout)
        logs = [path.read_text() for path in (folder / "run" / "logs").glob("rank_*.log")]
        assert len(logs) == self.ranks
        assert not self.replays or min(map(replayed_steps, logs)) >= count - WARM_UP - 2
        return bound

    def check_goes_on(self, folder: Path) -> None:
        """Only steps that were due have been saved, and the same command goes on from the newest of them."""
        done, complete = steps_done(folder), saved_steps(folder)
        assert complete <= {step for step in range(1, done + 1) if self.every and step % self.every == 0}
        saved = max(complete, default=0)
        with self.start(folder) as job:
            job.wait_until(lambda: steps_done(folder) >= done + WARM_UP + 3, "steps after the loss")
            assert re.search(rf"from step {saved}$" if saved else "from the start$", job.out, re.MULTILINE), job.out


def ways(ranks: int, every: int, *settings: str) -> pytest.MarkDecorator:
    """Parametrize: launched steps with these settings on CPUs, and steps replayed as CUDA graphs on 2 GPUs."""
    replayed = Way(2, [*REPLAYABLE, f"data.seq_len={SEQ_LEN}"], 20.0, every=3, replays=True)
    return pytest.mark.parametrize(
        "way",
        [
            pytest.param(Way(ranks, ["train.device=cpu", *settings], TIMEOUT, every), id="launched"),
            pytest.param(replayed, id="replayed", marks=pytest.mark.gpu),
        ],
    )


def steps_done(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def checkpoints(folder: Path) -> set[str]:
    return {path.name for path in (folder / "run" / "checkpoints").glob("step_*")}


def saved_steps(folder: Path) -> set[int]:
    """Steps of complete checkpoints: an interrupted save leaves a folder *.tmp, which is never loaded."""
    return {int(name.removeprefix("step_")) for name in checkpoints(folder) if not name.endswith(".tmp")}


def wait_for_steps(job: Command, folder: Path, count: int, timeout: float = TIMEOUT) -> float:
    """Returns the seconds within which the ranks have to end after a fault.

    The bounds of the product plus the duration of the start, since a busy machine slows down both. The default of
    `parallel.timeout_seconds`, 300, is larger.
    """
    started = job.wait_until(lambda: steps_done(folder) >= count, f"step {count}")
    # Looked up while they are alive, for `check_gone`.
    job.ranks()
    return timeout + REPORT_SECONDS + max(10.0, started)


def check_named(outcome: Outcome, *parts: str) -> None:
    """One rank has reported one line with all `parts`, without a traceback."""
    assert outcome.code != 0
    assert len(outcome.errors) == 1, outcome.err
    for part in parts:
        assert part in outcome.errors[0]
    assert "zeco_train/" not in outcome.err, outcome.err


def check_line_within(job: Command, limit: float) -> None:
    """An error line comes within `limit` seconds."""
    began = time.monotonic()
    while not re.search(r"^error: .*\n", job.err, re.MULTILINE):
        assert time.monotonic() - began < limit, f"no error within {limit:g} s\n{job.out}\n{job.err}"
        time.sleep(0.05)
    print(f"after {time.monotonic() - began:.1f} s of at most {limit:g}: {Outcome(1, job.out, job.err).errors}")


def check_gone(job: Command) -> None:
    assert job.ranks()
    assert not [rank for rank, process in job.ranks().items() if is_running(process)]


@pytest.mark.processes
@pytest.mark.slow
@ways(2, 3, "data.seq_len=96")
def test_killed_rank_ends_job(way: Way, tmp_path: Path) -> None:
    with way.start(tmp_path) as job:
        # The save of step 9 begins once that of step 6 is complete.
        bound = way.wait_for_steps(job, tmp_path, 10)
        os.kill(job.ranks()[1], signal.SIGKILL)
        last = steps_done(tmp_path)
        # A replay that waits for the rank does not delay it: the launcher tells the survivors.
        check_line_within(job, way.timeout if way.replays else bound)
        check_named(job.wait(bound), "rank 1 no longer answers", "step ")
        check_gone(job)
    # At most the step in progress was finished.
    assert steps_done(tmp_path) <= last + 2
    assert {3, 6} <= saved_steps(tmp_path)
    way.check_goes_on(tmp_path)


@pytest.mark.processes
@pytest.mark.slow
def test_torchrun_restarts_killed_ranks(tmp_path: Path) -> None:
    """The next attempt goes on from the last checkpoint, with the default time-out of communication."""
    settings = ["train.steps=1000000", "checkpoint.every=1", "run_dir=run"]
    restarts = ("--standalone", "--max-restarts", "1")
    with torchrun(2, tmp_path, *settings, fault=NONE, launcher_options=restarts) as job:
        wait_for_steps(job, tmp_path, 2)
        job.wait_until(lambda: saved_steps(tmp_path), "checkpoint")
        os.kill(job.ranks()[0], signal.SIGKILL)
        job.wait_until(lambda: "from step " in job.out, "restart")
        done = steps_done(tmp_path)
        job.wait_until(lambda: steps_done(tmp_path) >= done + 2, "steps after a restart")


@pytest.mark.processes
@pytest.mark.slow
@ways(2, 0, "data.seq_len=96")
def test_stopped_rank_is_reported_and_nothing_is_saved(way: Way, tmp_path: Path) -> None:
    with way.start(tmp_path) as job:
        bound = way.wait_for_steps(job, tmp_path, 7 if way.replays else 3)
        ranks = dict(job.ranks())
        # Rank 0 holds the lock of the folder and the progress bar, and reports first.
        stopped = ranks.pop(0)
        os.kill(stopped, signal.SIGSTOP)
        check_line_within(job, way.timeout + REPORT_SECONDS + DUMPS if way.replays else bound)
        job.wait_until(lambda: not any(map(is_running, ranks.values())), "end of the others", bound)
        assert is_running(stopped)
        # torchrun does this 30 s after its SIGTERM.
        os.kill(stopped, signal.SIGKILL)
        check_named(job.wait(), "rank 0 no longer answers", "stopped")
        check_gone(job)
    assert way.every or checkpoints(tmp_path) == set()
    way.check_goes_on(tmp_path)


def test_non_finite_loss_stops_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = train_here(*ENDLESS, *UNSTABLE, "optim.lr=1e5")
    step = steps_done(tmp_path) + 1
    check_named(outcome, f"step {step}: the loss is ", "is the output of gla in model.layers.0.attn (gla), on rank 0: ")
    assert outcome.code == NonFiniteError.exit_code
    check_checkpoints(tmp_path, step - 1)


def check_checkpoints(folder: Path, count: int) -> None:
    """There is one checkpoint per step up to `count`, and all tensors are finite."""
    assert checkpoints(folder) == {f"step_{step:08d}" for step in range(1, count + 1)}
    for name in checkpoints(folder):
        dcp_to_torch_save(folder / "run" / "checkpoints" / name, folder / "whole.pt")
        state = torch.load(folder / "whole.pt")
        tensors = {key: value for key, value in {**state["model"], **state["optim"]}.items() if torch.is_tensor(value)}
        assert len(tensors) > 3 * len(state["model"])
        assert [f"{name}: {key}" for key, value in tensors.items() if not value.isfinite().all()] == []


@pytest.mark.processes
@pytest.mark.slow
def test_rank_out_of_memory_reports_it_itself(tmp_path: Path) -> None:
    """A bug is one of the ends in test_last_line.py."""
    # Activations of 2 MB; what is left are pieces below 1 MB.
    large = ["data.seq_len=8192", "model.hidden_size=128", "data.global_batch=1", "model.num_layers=1"]
    with torchrun(2, tmp_path, *ENDLESS, "checkpoint.every=0", *large, fault="memory:1:4") as job:
        outcome = job.wait()
    check_named(outcome, ": out of memory ([enforce fail")
    assert outcome.errors[0].startswith("rank ")
    assert (steps_done(tmp_path), checkpoints(tmp_path)) == (3, set())


@pytest.mark.processes
@pytest.mark.slow
def test_hanging_rank_is_reported_with_dumps_of_all_ranks(tmp_path: Path) -> None:
    """A rank that is alive but makes no progress learns from its peers that the job has failed."""
    with torchrun(2, tmp_path, *ENDLESS, "data.seq_len=96", fault="hang:1:3") as job:
        started = job.wait_until((tmp_path / "fault").exists, "fault")
        job.ranks()
        check_named(
            job.wait(TIMEOUT + REPORT_SECONDS + max(10.0, started)),
            "step 3, micro-batch 1 of 4, all_reduce of ",
            "every rank is alive",
            "rank 1 in step 3, micro-batch 1 of 4, waiting for its data",
        )
        check_gone(job)
    logs = tmp_path / "run" / "logs"
    assert "in never" in (logs / "rank_1.log").read_text()
    assert {path.name.partition("_")[2] for path in logs.glob("2*")} == {f"gloo_rank_{rank}.json" for rank in range(2)}
    entries = json.loads(next(logs.glob("*_gloo_rank_0.json")).read_text())["entries"]
    assert entries[-1]["profiling_name"] == "gloo:all_reduce"
    assert "_agreed_signal" in [frame["name"] for frame in entries[-1]["frames"]]
    assert {"scan forward", "scan reverse"} <= {entry["process_group"][1] for entry in entries}


@pytest.mark.processes
@pytest.mark.slow
def test_ranks_end_when_launcher_is_killed(tmp_path: Path) -> None:
    with torchrun(2, tmp_path, *ENDLESS, fault=NONE) as job:
        job.wait_until(lambda: len(job.ranks()) == 2, "two ranks")
        deadline = time.monotonic() + wait_for_steps(job, tmp_path, 1)
        job.signal(signal.SIGKILL)
        job.wait()
        while any(is_running(process) for process in job.ranks().values()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
