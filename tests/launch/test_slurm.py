"""`launch/slurm_256gpu.sh` under a real Slurm of two nodes on this machine: requeue, lost ranks, faulty nodes."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.slurm_cluster import SlurmCluster, why_not
from lab.slurm_job import SlurmJob, resumed_at
from tests.support.commands import REPOSITORY, SMALL, torchrun
from tests.support.waiting import ENOUGH
from zeco_train.system.files import METRICS_FILE
from zeco_train.tracking.metrics import read_metrics

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=f"needs Slurm: {why_not()}"),
]

STEPS = 32
# One row per step and a checkpoint every 4: the whole curve is compared with an uninterrupted run.
SETTINGS = [*SMALL, "train.device=cpu", f"train.steps={STEPS}", "checkpoint.every=4", "checkpoint.keep=0"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=2) as cluster:
        cluster.environment |= {"PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        yield cluster
        # Found by environment variables, so that every process of a job counts.
        cluster.wait(lambda: not cluster.processes_of_jobs(), "end of all processes of jobs", 20)
    assert not cluster.processes()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of the same run without Slurm and without interruption."""
    folder = tmp_path_factory.mktemp("unbroken")
    with torchrun(2, folder, *SETTINGS, "name=unbroken") as command:
        assert command.wait(2 * ENOUGH).code == 0
    return read_metrics(folder / "runs" / "unbroken" / METRICS_FILE)


def check_curve(job: SlurmJob, unbroken: list[dict[str, Any]]) -> None:
    """No step is missing, and all are bit-identical to the uninterrupted run."""
    rows = read_metrics(job.run_dir / METRICS_FILE)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert [row[key] for row in rows] == [row[key] for row in unbroken], key


def test_curve_is_unchanged_after_lost_rank_and_requeue(
    cluster: SlurmCluster, unbroken: list[dict[str, Any]], tmp_path: Path
) -> None:
    job = SlurmJob(cluster, tmp_path, "--nodes=2", settings=SETTINGS)
    job.wait_for_step(6, "0.0")
    # Saves run beside the training, and may be slower than two of its steps.
    job.wait(lambda: any((job.run_dir / "checkpoints").glob("step_????????")), "the first checkpoint")
    os.kill(cluster.ranks(job.number)[1], signal.SIGKILL)

    # Restarts in the same allocation from the newest checkpoint.
    job.wait_for_step(10, "0.1")
    # The signal that Slurm sends shortly before the time limit.
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)

    output = job.finish()
    print(output)
    assert job.state == "COMPLETED"
    assert cluster.job(job.number)["Restarts"] == "1"
    assert re.search(r"^check: 2 nodes with \d+ CPUs, no GPUs, torch .* 0 nodes at fault$", output, re.M)
    assert "was ended by SIGKILL" in output
    assert "ranks failed (code 70): starting again from step_" in output
    assert re.search(r"^error: rank \d: step \d+.*: rank 1 no longer answers", output, re.M)
    assert "SIGUSR1 after step" in output
    assert "requeue: saved" in output
    assert "Traceback" not in output
    first, second, third = resumed_at(output)
    assert (first, second % 4) == (0, 0)
    # The signalled ranks saved first: none of their steps is repeated.
    done = [row["step"] for row in job.lines()]
    assert third >= 10
    assert done[done.index(second + 1, second + 1) :] == list(range(second + 1, STEPS + 1))
    check_curve(job, unbroken)
    check_folder(job)


def test_permanent_failure_ends_job_without_restart(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SlurmJob(cluster, tmp_path, "--nodes=2", settings=[*SETTINGS, "data.global_batch=3", "sp=dp"], CHECKS="off")
    output = job.finish()
    print(output)
    assert job.state == "FAILED"
    assert cluster.job(job.number)["ExitCode"] == "2:0"
    (line,) = re.findall("^error: .*", output, re.M)
    assert line.startswith("error: data.global_batch=3: must be a multiple of dp × data.micro_batch = 2 × 1 = 2")
    assert output.count(", start ") == 1


def test_failed_node_checks_end_job_before_training(cluster: SlurmCluster, tmp_path: Path) -> None:
    # Slurm is configured with two GPUs per node, but there are none.
    job = SlurmJob(cluster, tmp_path, "--nodes=2", "--gpus-per-node=2", settings=SETTINGS)
    output = job.finish()
    assert job.state == "FAILED"
    for node in ("n0", "n1"):
        assert f"check: {node}: error: 0 GPUs, 1 needed" in output
    assert "error: the checks above found faults (CHECKS=warn starts all the same)" in output
    assert "step " not in output
    assert not (job.run_dir / "logs").exists()


def check_folder(job: SlurmJob) -> None:
    """All starts share one run folder, with the output of each rank of each start; caches lie elsewhere."""
    starts = sorted(path.name for path in (job.run_dir / "slurm").iterdir())
    assert starts == [f"{job.number}.{start}" for start in ("0.0", "0.1", "1.0")]
    for start in starts:
        printed = {path.name for path in (job.run_dir / "slurm" / start).glob("rank_*")}
        # Rank 0 prints to the job's output file.
        assert printed == {f"rank_0001.{kind}" for kind in ("out", "err")}
    logs = {path.name for path in (job.run_dir / "logs").iterdir()}
    # The ranks that survived the kill have dumped their pending collectives.
    evidence = {name for name in logs if re.fullmatch(r"\w+_gloo_rank_0\.json", name)}
    assert evidence
    assert logs - evidence == {f"rank_{rank}.log" for rank in range(2)}
    assert {path.name for path in (job.folder / "cache").iterdir()} == {"triton", "inductor", "cuda"}
