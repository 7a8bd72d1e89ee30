"""`lab/many_ranks.py`: counts of a start, and a lost rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lab.many_ranks import main
from tests.support.bench_settings import error_line

pytestmark = pytest.mark.processes


@pytest.mark.campaign
def test_four_ranks_start_lose_one_and_resume(tmp_path: Path) -> None:
    sizes = ["--counts", "2", "4", "--ranks", "4", "--timeout", "30", "--limit", "200"]
    more = ["--", "model.num_layers=2"]
    command = [sys.executable, "-m", "lab.many_ranks", *sizes, "--folder", tmp_path / "new", *more]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=400)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    lines = ended.stdout.splitlines()
    names = lines[0].split()
    two, four = (dict(zip(names, map(float, line.split()), strict=False)) for line in lines[1:3])
    # A set and a read of the addresses of each group: the mesh's two, two of scans, shards, checkpoints; and the world.
    assert two["requests"] == four["requests"] == 2 * (four["groups"] + 1)
    assert two["groups"] == four["groups"] >= 6
    assert (two["checks"], two["sockets"] < four["sockets"]) == (four["checks"], True)
    assert "of a rank, grow with the ranks: keys, created, sockets" in lines
    assert any(line.startswith("256 ranks, estimated: ") for line in lines)
    (error,) = [line for line in lines if line.startswith("error: ")]
    assert "rank 2 no longer answers" in error
    assert any(line.startswith("resumed by the same command: ") and line.endswith("step 6") for line in lines)


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--folder", str(tmp_path)], f"{tmp_path}: exists; name a new folder"),
        (["--folder", str(tmp_path / "new"), "--counts", "100000"], "ranks=100000: take up to 15,000,000 MB, and "),
        (["--ranks", "x"], "argument="),
    ):
        assert error_line(arguments, capsys, main).startswith(f"error: {message}")
