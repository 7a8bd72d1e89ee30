"""`zeco_train.compare` and `launch/compare_backends.sh`: differences between curves of the same run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import REPOSITORY, SMALL, Outcome, check_line
from tests.support.waiting import ENOUGH
from zeco_train.compare import main


def write(folder: Path, losses: dict[int, float | None], rate: float = 100.0) -> Path:
    folder.mkdir()
    rows: list[dict[str, Any]] = [
        {"step": step, "loss": loss, "grad_norm": 2.0, "tokens_per_second": rate if step > 1 else 1.0}
        for step, loss in losses.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_largest_differences_are_reported_with_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        write(tmp_path / "dp", {1: 4.0, 2: 2.0, 3: 1.0}),
        write(tmp_path / "zeco", {1: 4.02, 2: 2.0, 3: 1.01, 4: 9.0}, rate=2500.0),
        write(tmp_path / "lasp2", {1: 4.0, 2: 2.0, 3: 1.0}),
    ]
    assert main([*map(str, runs)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[:2] == ["run", "steps"]
    assert out[2].startswith("zeco")
    assert "2.50k" in out[2]
    assert "2.0e-02, relative 1.0e-02 at step 3" in out[2]
    assert "0.0e+00, relative 0.0e+00 at step 1" in out[3]
    assert out[-1].startswith("largest relative difference of loss from dp: 1.00e-02, zeco at step 3")
    results = json.loads((tmp_path / "compare.json").read_text())
    zeco = results["runs"][1]
    assert (zeco["steps"], zeco["compared"]) == (4, 3)
    assert zeco["difference"]["loss"]["absolute_step"] == 1
    assert results["runs"][0]["difference"] == {"loss": None, "grad_norm": None}
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_difference_beyond_limit_gives_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write(tmp_path / "a", {1: 4.0})), str(write(tmp_path / "b", {1: 4.04}))]
    assert main([*runs, "--max-difference", "0.02"]) == 0
    assert "within 0.02" in capsys.readouterr().out
    assert main([*runs, "--max-difference", "0.005", "--out", str(tmp_path / "elsewhere")]) == 1
    assert "MORE than 0.005" in capsys.readouterr().out
    assert (tmp_path / "elsewhere" / "compare.json").exists()


def test_non_finite_loss_exceeds_every_limit(tmp_path: Path) -> None:
    runs = [str(write(tmp_path / "a", {1: 4.0, 2: 4.0})), str(write(tmp_path / "b", {1: 4.0, 2: None}))]
    assert main([*runs, "--max-difference", "1e9"]) == 1
    assert json.loads((tmp_path / "compare.json").read_text())["runs"][1]["difference"]["loss"]["absolute"] == "inf"


def test_invalid_arguments_give_one_line_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = str(write(tmp_path / "a", {1: 4.0})), str(write(tmp_path / "b", {2: 4.0}))
    for arguments, code, part in (
        ([], 2, "RUN_DIR"),
        ([run, str(tmp_path / "none")], 3, "has no rows"),
        ([run, run], 2, "names a folder twice"),
        ([run, other], 3, "has no step in common"),
        ([run, "--max-difference", "much"], 2, "--max-difference"),
        ([run, "--max-difference=-1"], 2, "must be ≥ 0"),
        ([run, "--out", f"{run}/metrics.jsonl"], 2, "cannot be written ("),
    ):
        outcome = main(arguments)
        captured = capsys.readouterr()
        check_line(Outcome(outcome, "", captured.err), code, part)


def compare_backends(folder: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    settings = {"VENV": "none", "RUN_DIR": str(folder), "NPROC": "2", "PATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(REPOSITORY / "launch" / "compare_backends.sh"), *SMALL, "train.device=cpu", *overrides],
        env={**os.environ, **settings, **environment},
        capture_output=True,
        text=True,
        timeout=ENOUGH,
    )


@pytest.mark.processes
def test_settings_owned_by_script_are_refused(tmp_path: Path) -> None:
    run = compare_backends(tmp_path, "sp=zeco")
    assert run.returncode != 0
    assert run.stderr.startswith("error: sp: set by this script")


@pytest.mark.processes
def test_missing_packages_are_reported(tmp_path: Path) -> None:
    # A stub of python without any packages.
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    run = compare_backends(tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert run.returncode != 0
    assert "VENV=none" in run.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.processes
def test_checkpoints_of_another_run_are_not_deleted(tmp_path: Path) -> None:
    kept = tmp_path / "dp" / "checkpoints" / "step_00000001"
    kept.mkdir(parents=True)
    run = compare_backends(tmp_path, BACKENDS="dp")
    assert run.returncode != 0
    assert "RUN_DIR:" in run.stderr
    assert kept.exists()
