"""`lab.loader` on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import TORCHRUN, Command

pytestmark = pytest.mark.campaign


def test_loader_benchmark_runs_on_two_ranks(tmp_path: Path) -> None:
    case = ["-m", "lab.loader", "tokens=65536", "device=cpu", f"out={tmp_path / 'out'}"]
    with Command([*TORCHRUN, "--standalone", "--nproc-per-node", "2", *case], tmp_path) as command:
        outcome = command.wait()
    assert outcome.code == 0, outcome
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    # Its own tokens, and the label of the last one.
    assert [(row["rank"], row["tokens"], row["bytes_requested"]) for row in rows] == [
        (rank, 32_768, 2 * 32_769) for rank in range(2)
    ]
    assert all(row["cold_ms"] > 0 and row["warm_ms"] > 0 for row in rows)
