"""A run on a synthetic task goes on on another split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import SMALL
from tests.support.distributed import run_distributed
from tests.support.training import train

pytestmark = pytest.mark.campaign


def _train_on_recall(rank: int, world_size: int, run_dir: str, steps: int) -> list[dict[str, Any]]:
    settings = ["data=synthetic", "data.synthetic.facts=2", "train.dtype=fp64", "parallel=ddp", "checkpoint.every=2"]
    small = [setting for setting in SMALL if not setting.startswith("sched.")]
    return train(rank, world_size, run_dir, *small, *settings, f"train.steps={steps}", "sched=constant")["rows"]


def test_synthetic_run_resumes_on_another_split(tmp_path: Path) -> None:
    unbroken = run_distributed(_train_on_recall, 1, str(tmp_path / "unbroken"), 4)[0]
    run_distributed(_train_on_recall, 1, str(tmp_path / "run"), 2)
    rows = run_distributed(_train_on_recall, 2, str(tmp_path / "run"), 4)[0]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row, expected in zip(rows, unbroken, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-9)
