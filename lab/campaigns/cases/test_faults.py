"""A rank that never joins, a closed terminal, an interrupted validation, a non-finite gradient on two ranks."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.lifecycle.test_faults import (
    ENDLESS,
    NONE,
    UNSTABLE,
    check_checkpoints,
    check_gone,
    check_named,
    checkpoints,
    steps_done,
    wait_for_steps,
)
from tests.support.commands import REPOSITORY, SMALL, TORCHRUN, is_running, torchrun, train_here
from tests.support.loaded import python_path
from tests.support.waiting import ENOUGH
from zeco_train.errors import NonFiniteError
from zeco_train.tracking.metrics import read_metrics
from zeco_train.tracking.positions import ValidationLoss
from zeco_train.training.forward import Validation

pytestmark = pytest.mark.campaign


@pytest.mark.processes
def test_rank_that_never_joins_is_reported(tmp_path: Path) -> None:
    # Forked ranks have imported everything, and could have joined.
    with torchrun(2, tmp_path, *ENDLESS, fresh=True) as job:
        job.wait_until(lambda: len(job.ranks()) == 2, "two ranks")
        ranks = dict(job.ranks())
        # Rank 1 is still importing, which takes seconds.
        os.kill(ranks[1], signal.SIGSTOP)
        job.wait_until(lambda: not is_running(ranks[0]), "end of rank 0")
        os.kill(ranks[1], signal.SIGKILL)
        ended = job.wait()
        first, *again = ended.errors
        # torchrun itself prints a report, below which the line comes again.
        assert again == [first]
        once = replace(ended, err=ended.err.replace(f"error: {first}\n", "", 1))
        check_named(once, "joining the other ranks: rank 1 no longer answers")
    assert not (tmp_path / "run").exists()


@pytest.mark.processes
@pytest.mark.parametrize(
    "launcher",
    [[], pytest.param([*TORCHRUN, "--standalone", "--nproc-per-node=2"], marks=pytest.mark.campaign)],
    ids=["alone", "torchrun"],
)
def test_run_saves_when_its_terminal_is_closed(launcher: list[str], tmp_path: Path) -> None:
    """With a bar and a log on the terminal, whose writes fail from then on."""
    command = [*(launcher or [sys.executable]), str(REPOSITORY / "train.py"), *SMALL, *ENDLESS, "checkpoint.every=0"]
    terminal, its_end = pty.openpty()
    os.set_blocking(terminal, False)
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        start_new_session=True,
        preexec_fn=partial(_take_terminal, its_end),
    ) as process:
        os.close(its_end)
        began = time.monotonic()
        while steps_done(tmp_path) < 3:
            assert time.monotonic() - began < ENOUGH
            assert process.poll() is None
            # What nobody reads would stop the run.
            with contextlib.suppress(BlockingIOError):
                os.read(terminal, 1 << 16)
            time.sleep(0.05)
        os.close(terminal)
        code = process.wait(ENOUGH)
    # torchrun's own code is 1.
    assert code == (1 if launcher else 75)
    assert checkpoints(tmp_path) == {f"step_{steps_done(tmp_path):08d}"}


def _take_terminal(terminal: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    # nohup may have the tests ignore it.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_interrupted_validation_runs_after_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of the run and after the last step; the final metrics equal those of an uninterrupted run."""
    monkeypatch.chdir(tmp_path)
    settings = ["train.steps=4", "train.eval_every=2", "train.eval_sequences=2", "checkpoint.every=0"]
    assert train_here(*settings, "run_dir=unbroken").code == 0
    # Validations: step 2; step 2 after the restart, step 4; step 4 after the restart.
    whole, stops = Validation.loss, iter([True, False, True, False])

    def loss(self: Validation, *arguments: Any, **options: Any) -> ValidationLoss | None:
        if next(stops):
            os.kill(os.getpid(), signal.SIGUSR1)
        return whole(self, *arguments, **options)

    with mock.patch.object(Validation, "loss", loss):
        for step, end in ((2, "saved"), (4, "saved, but not validated")):
            outcome = train_here(*settings, "run_dir=run")
            assert (outcome.code, outcome.errors) == (75, [])
            assert outcome.out.endswith(f"SIGUSR1 after step {step}: {end}; the same command goes on from there\n")
        assert "val_loss" not in read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
        assert train_here(*settings, "run_dir=run").code == 0
    rows, unbroken = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("run", "unbroken"))
    for key in ("step", "loss", "val_loss", "val_perplexity"):
        assert [row.get(key) for row in rows] == [row.get(key) for row in unbroken], key
    outcome = train_here(*settings, "run_dir=run")
    assert (outcome.code, outcome.out) == (0, "the run in run has finished its 4 steps; nothing to do\n")


@pytest.mark.processes
def test_non_finite_gradient_stops_run(tmp_path: Path) -> None:
    with torchrun(2, tmp_path, *ENDLESS, *UNSTABLE, "optim.lr=1e30", fault=NONE) as job:
        outcome = job.wait()
    step = steps_done(tmp_path) + 1
    check_named(
        outcome, f"step {step}: the gradient norm is ", "is the gradient of the output of model.layers.0, on rank "
    )
    assert f"(exitcode: {NonFiniteError.exit_code})" in outcome.err
    check_checkpoints(tmp_path, step - 1)


@pytest.mark.processes
@pytest.mark.parametrize(
    "numbers",
    [[signal.SIGTERM], [signal.SIGUSR1, signal.SIGINT, signal.SIGHUP]],
    ids=["SIGTERM", "others"],
)
def test_job_stopped_by_signal_resumes_with_same_command(numbers: list[signal.Signals], tmp_path: Path) -> None:
    before = 0
    for number in numbers:
        # With the shell's `trap '' USR1`, and to the end of the ranks' interpreters.
        fresh = number is signal.SIGUSR1
        with torchrun(2, tmp_path, *ENDLESS, "checkpoint.every=0", fault=NONE, fresh=fresh) as job:
            wait_for_steps(job, tmp_path, before + 3)
            assert (f"from step {before}" if before else "from the start") in job.out
            if number is signal.SIGUSR1:
                job.warn()
            else:
                job.signal(number)
            # The job saves and draws its plot.
            outcome = job.wait()
            check_gone(job)
        step = steps_done(tmp_path)
        assert f"{number.name} after step {step}: saved; the same command goes on from there" in outcome.out
        assert outcome.errors == []
        assert "zeco_train/" not in outcome.err
        # torchrun prints the exit codes of its ranks only if it was not signalled itself.
        assert number is not signal.SIGUSR1 or "(exitcode: 75)" in outcome.err
        assert f"step_{step:08d}" in checkpoints(tmp_path)
        before = step
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, before + 1))
