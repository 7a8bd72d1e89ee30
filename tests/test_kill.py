"""A run that is killed with SIGKILL at random moments, saves included, ends as one that never was.

`ZECO_KILLS=10 launch/test.sh tests/test_kill.py` kills as often as the project promises; the default is quicker.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training import SMALL
from zeco_train.checkpoint_files import complete_checkpoints
from zeco_train.metrics import METRICS_FILE, read_metrics

ROOT = Path(__file__).parent.parent
KILLS = int(os.environ.get("ZECO_KILLS", "2"))
STEPS = 24


def _start(run_dir: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    overrides = [*SMALL, f"run_dir='{run_dir}'", f"train.steps={STEPS}", "train.eval_sequences=0", "checkpoint.every=1"]
    return subprocess.Popen(
        [*command, *overrides],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _last_step(run_dir: Path) -> int:
    rows = read_metrics(run_dir / METRICS_FILE)
    return rows[-1]["step"] if rows else 0


def _kill_everything(process: subprocess.Popen[bytes]) -> None:
    """Kill the launcher and, in the same instant, all ranks: nobody gets to clean anything up."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    assert _start(unbroken).wait(timeout=300) == 0

    rng = random.Random(time.time_ns())
    kills, interrupted_saves = 0, 0
    while kills < KILLS:
        process, before = _start(killed), _last_step(killed)
        # Some steps on, then anywhere within the time of a step and its checkpoint.
        goal = min(before + max(1, STEPS // (KILLS + 2)), STEPS - 1)
        deadline = time.monotonic() + 120
        while _last_step(killed) < goal and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.4))
        assert process.poll() is None, "the run ended before it could be killed"
        _kill_everything(process)
        kills += 1
        interrupted_saves += any((killed / "checkpoints").glob("*.tmp"))
        newest = int(complete_checkpoints(killed)[-1].name.removeprefix("step_"))
        # A row is written before its step's checkpoint: at most that one step is lost.
        assert newest >= _last_step(killed) - 1
    print(f"{kills} kills, {interrupted_saves} of them within a save")

    assert _start(killed).wait(timeout=300) == 0
    expected, result = (read_metrics(run / METRICS_FILE) for run in (unbroken, killed))
    assert [row["step"] for row in result] == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert [row[key] for row in result] == [row[key] for row in expected], key
