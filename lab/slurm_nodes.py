"""Question: do `launch/slurm_256gpu.sh` and its checks work on 32 nodes, of which one has a wrong version?
Command: python -m lab.slurm_nodes [--nodes 32] [--folder FOLDER]
Date: 2026-11-24, 1dcc3a9, each node a slurmd with one rank, 2 CPU cores
Answer: 32 nodes take four minutes; their output is not kept. Checked: the wrong node is named and the job stops, or a
    spare takes its place; a killed rank is named and all go on; losses are one rank's. Needs slurm-wlm and munge.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.slurm_cluster import SlurmCluster, why_not
from lab.slurm_job import SlurmJob, resumed_at
from tests.support.commands import REPOSITORY, SMALL, train_here
from tests.support.comparison import largest, relative
from zeco_train.system.files import METRICS_FILE
from zeco_train.tracking.metrics import read_metrics

TOLERANCE = 1e-9
_STEPS, _EVERY = 12, 3
_WRONG_VERSION = "0.0.1"
# Ample for many nodes on two cores: reached only by failures.
_PATIENCE_SECONDS = 1800.0


def settings(nodes: int) -> list[str]:
    """Of a run with its sequences over all nodes; eight tokens each."""
    common = [*SMALL, "train.device=cpu", "train.dtype=fp64", f"data.seq_len={8 * nodes}", "data.global_batch=2"]
    return [*common, f"train.steps={_STEPS}", f"checkpoint.every={_EVERY}", "checkpoint.keep=0"]


def python_with_wrong_node(folder: Path, node: str) -> Path:
    """An interpreter that finds another version of Triton on one node."""
    stale = folder / "stale" / f"triton-{_WRONG_VERSION}.dist-info"
    stale.mkdir(parents=True)
    (stale / "METADATA").write_text(f"Metadata-Version: 2.1\nName: triton\nVersion: {_WRONG_VERSION}\n")
    script = folder / "python"
    script.write_text(
        f'#!/bin/sh\n[ "$SLURMD_NODENAME" != {node} ] || export PYTHONPATH="{stale.parent}:$PYTHONPATH"\n'
        f'exec "{sys.executable}" "$@"\n'
    )
    script.chmod(0o755)
    return script


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Print how a stage ended, and how long it took."""
    began = time.monotonic()
    try:
        yield
    except AssertionError as error:
        print(f"{name}: FAILED after {time.monotonic() - began:.0f} s\n{error}", flush=True)
        raise SystemExit(1) from None
    print(f"{name}: passed, {time.monotonic() - began:.0f} s", flush=True)


def named(output: str, wrong: str, nodes: int) -> None:
    """The checks name the wrong node, and no other."""
    findings = re.findall(r"^check: (\S+): error: (.*)$", output, re.M)
    assert [node for node, _ in findings] == [wrong], output
    assert re.fullmatch(rf"triton {_WRONG_VERSION}, {nodes - 1} nodes have \S+", findings[0][1]), output
    print(f"  check: {wrong}: error: {findings[0][1]}")


def check_stop(cluster: SlurmCluster, folder: Path, nodes: int, wrong: str) -> None:
    """A job without a node to spare ends before training."""
    listed = [f"--nodes={nodes}", f"--nodelist={','.join(cluster.nodes[:nodes])}"]
    job = SlurmJob(cluster, folder, *listed, settings=settings(nodes), patience=_PATIENCE_SECONDS)
    output = job.finish()
    assert job.state == "FAILED", output
    named(output, wrong, nodes)
    assert "the checks above found faults" in output, output
    assert not (job.run_dir / "logs").exists(), "it has started to train"


def check_spare(cluster: SlurmCluster, folder: Path, nodes: int, wrong: str) -> Path:
    """A job with one more node trains on the others, and goes on after a rank is killed; returns the run's folder."""
    split = ["sp=zeco", f"sp.size={nodes}", "parallel.timeout_seconds=120"]
    allocated, lost = [f"--nodes={nodes + 1}"], nodes // 2
    job = SlurmJob(
        cluster,
        folder,
        *allocated,
        settings=[*settings(nodes), *split],
        patience=_PATIENCE_SECONDS,
        TRAIN_NODES=str(nodes),
    )
    job.wait_for_step(_EVERY + 1, "0.0")
    os.kill(cluster.ranks(job.number)[lost], signal.SIGKILL)
    output = job.finish()
    assert job.state == "COMPLETED", output
    named(output.partition("start 0.1:")[0], wrong, nodes + 1)
    lines = re.findall(rf"^error: rank \d+: .*rank {lost} no longer answers.*$", output, re.M)
    assert lines, output
    print(f"  {lines[0]}")
    starts = resumed_at(output)
    assert (len(starts), starts[0]) == (2, 0), output
    assert starts[1] >= _EVERY, output
    print(f"  started again from step {starts[1]}")
    return job.run_dir


def check_losses(run_dir: Path, folder: Path, nodes: int) -> None:
    """The losses and norms are those of one rank."""
    alone = folder / "alone"
    outcome = train_here(*settings(nodes), "sp=dp", f"run_dir='{alone}'")
    assert outcome.code == 0, outcome
    rows, expected = (read_metrics(path / METRICS_FILE) for path in (run_dir, alone))
    assert [row["step"] for row in rows] == list(range(1, _STEPS + 1))
    pairs = [(row[key], other[key]) for row, other in zip(rows, expected, strict=True) for key in ("loss", "grad_norm")]
    difference = largest(relative(*pair) for pair in pairs)
    print(f"  losses and norms of {_STEPS} steps differ by {difference:.1e} from one rank's")
    assert difference <= TOLERANCE


def main() -> int:
    """Run all stages; returns 1 if one failed, 2 if this machine has no Slurm."""
    parser = argparse.ArgumentParser(description="launch/slurm_256gpu.sh on many nodes of one machine")
    parser.add_argument("--nodes", type=int, default=32, help="that train, one rank each (default: 32)")
    parser.add_argument("--folder", type=Path, help="for the runs; default: a temporary one")
    options = parser.parse_args()
    if (problem := why_not()) is not None:
        print(f"needs Slurm: {problem}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="zeco-nodes-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        nodes, wrong = options.nodes, f"n{min(5, options.nodes - 1)}"
        python = python_with_wrong_node(Path(temporary), wrong)
        with SlurmCluster(nodes + 1, cpus=1, gpus=1) as cluster:
            cluster.environment |= {"PYTHON": str(python), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
            with stage(f"{nodes} nodes, {wrong} among them is wrong: stop"):
                check_stop(cluster, folder, nodes, wrong)
            with stage(f"{nodes} of {nodes + 1} nodes train, a rank is killed: spare"):
                run_dir = check_spare(cluster, folder, nodes, wrong)
        with stage("losses"):
            check_losses(run_dir, folder, nodes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
