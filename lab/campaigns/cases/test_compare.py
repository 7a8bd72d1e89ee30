"""`launch/compare_backends.sh` on real runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.report.test_compare import (
    compare_backends,
)

pytestmark = pytest.mark.campaign


@pytest.mark.processes
def test_backends_give_same_curve(tmp_path: Path) -> None:
    environment = {"BACKENDS": "dp zeco:two_shot:p2p", "MAX_DIFFERENCE": "1e-9"}
    run = compare_backends(tmp_path, "train.steps=2", "train.dtype=fp64", **environment)
    assert run.returncode == 0, run.stderr
    assert "zeco_two_shot_p2p" in run.stdout.splitlines()[-1]
    rows = json.loads((tmp_path / "compare.json").read_text())["runs"]
    assert [row["compared"] for row in rows] == [2, 2]
    assert not (tmp_path / "dp" / "checkpoints").exists()
