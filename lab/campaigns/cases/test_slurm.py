"""`launch/sweep.py` under a real Slurm."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from lab.slurm_cluster import SlurmCluster
from lab.slurm_job import ENDED
from tests.launch.test_slurm import cluster
from tests.support.commands import REPOSITORY, SMALL
from tests.support.waiting import ENOUGH

# Fixtures.
__all__ = ["cluster"]
pytestmark = pytest.mark.campaign


def test_sweep_submits_only_unfinished_runs(cluster: SlurmCluster, tmp_path: Path) -> None:
    def sweep(*options: str) -> list[str]:
        grid = ["--backends", "dp", "lasp2", "--lengths", "1k", "--ranks-per-node=1", "--cpu", "--folder=a sweep"]
        settings = [s for s in SMALL if not s.startswith("data.seq_len")]
        command = [sys.executable, str(REPOSITORY / "launch" / "sweep.py"), *grid, *options, "--", *settings]
        output = cluster.run(*command, "train.steps=2", "train.device=cpu", cwd=tmp_path)
        return [line.rpartition("-1n")[2].strip() for line in output.splitlines()[1:]]

    cluster.environment |= {"CHECKS": "off", "CACHE_DIR": str(tmp_path / "cache")}
    held = ["--sbatch=--hold"]
    first = sweep(*held)
    numbers = [re.fullmatch(r"submitted as job (\d+), from the start", state) for state in first]
    dp, lasp2 = (match[1] for match in numbers if match is not None)
    cluster.run("scontrol", "release", dp)
    cluster.wait(lambda: cluster.job(dp)["JobState"] in ENDED, "end of the job", ENOUGH)
    assert cluster.job(dp)["JobState"] == "COMPLETED", (tmp_path / "a sweep" / f"dp-1k-1n-{dp}.out").read_text()
    assert sweep(*held) == ["finished", f"pending as job {lasp2}"]
    cluster.run("scancel", lasp2)
    (again,) = sweep(*held)[1:]
    assert again.startswith("submitted as job ")
    assert again != first[1]
    cluster.run("scancel", "--state=PENDING", f"--user={os.getuid()}")
