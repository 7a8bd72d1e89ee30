"""`launch/length_extension.sh` with tiny lengths: each stage loads the previous weights; finished ones are skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.commands import REPOSITORY, SMALL
from tests.support.waiting import ENOUGH
from zeco_train.tracking.metrics import read_metrics

pytestmark = pytest.mark.campaign

SETTINGS = [s for s in SMALL if not s.startswith(("data.seq_len", "data.global_batch"))]


def extend(run_dir: Path, stages: str, *settings: str) -> subprocess.CompletedProcess[str]:
    names = {"STAGES": stages, "RUN_DIR": str(run_dir), "NPROC": "2", "VENV": "none", "PYTHON": sys.executable}
    command = [str(REPOSITORY / "launch" / "length_extension.sh"), *SETTINGS, *settings]
    return subprocess.run(command, env={**os.environ, **names}, capture_output=True, text=True, timeout=2 * ENOUGH)


def weights(run: Path, whole: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(run / "checkpoints" / "latest", whole)
    return torch.load(whole)["model"]


@pytest.mark.processes
def test_each_stage_starts_from_previous_weights(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    first, second = runs / "stage_1_64", runs / "stage_2_256"
    # One stage, then both: the finished one is skipped. The learning rate of the second stage is too small to change
    # the weights of the first.
    one = extend(runs, "64:8:3", "sp=dp")
    assert one.returncode == 0, one.stderr
    before = weights(first, tmp_path / "first.pt")
    both = extend(runs, "64:8:3 256:2:2:2:2", "optim.lr=1e-20", "optim.weight_decay=0")
    assert both.returncode == 0, both.stderr
    assert f"the run in {first} has finished its 3 steps; nothing to do" in both.stdout
    assert f"== stage 2: 256 tokens, 2 steps of 2 sequences, from the weights of {first}" in both.stdout
    assert [row["tokens"] for row in read_metrics(second / "metrics.jsonl")] == [512, 1024]
    after = weights(second, tmp_path / "second.pt")
    assert all(torch.equal(value, after[name]) for name, value in before.items())
