"""Shell scripts: `--help` prints the header comment and installs nothing, and no run of a user is deleted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", ["lab/check_export", "launch/compare_backends", "launch/length_extension", "lab/recall"]
)
def test_help_prints_usage_without_installing(name: str, tmp_path: Path) -> None:
    script = REPOSITORY / f"{name}.sh"
    for arguments in (["--help"], ["train.steps=2", "-h"]):
        ended = subprocess.run(
            [script, *arguments], env={**os.environ, "VENV": str(tmp_path / "venv")}, capture_output=True, text=True
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        first, _, rest = ended.stdout.partition(f"usage: {name}.sh [KEY=VALUE ...]")
        assert first.strip()
        assert "VENV=none" in rest
        assert "set -e" not in rest
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
@pytest.mark.parametrize("argument", ["--help", "train.stepz=2", "train.steps=2"])
def test_quickstart_keeps_an_earlier_run(argument: str, tmp_path: Path) -> None:
    """Also when train.py, here a stand-in, refuses the arguments."""
    shutil.copytree(REPOSITORY / "launch", tmp_path / "launch")
    weights = tmp_path / "runs" / "quickstart" / "checkpoints" / "weights"
    weights.parent.mkdir(parents=True)
    weights.write_text("a day's work")
    (tmp_path / "runs" / "quickstart" / "identity.json").touch()
    for name, script in (("torchrun", f'[ "{argument}" = --help ]'), ("python", "echo 2")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    env = {"VENV": "none", "PYTHON": sys.executable, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run([tmp_path / "launch" / "quickstart.sh", argument], env=env, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0 if argument == "--help" else 1, "")
    assert weights.read_text() == "a day's work"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "setting", "line"),
    [
        ("64:8", "seed=1", "STAGES: 64:8: must be SEQ_LEN:GLOBAL_BATCH:STEPS"),
        ("64:8:3:1:1:1", "seed=1", "STAGES: 64:8:3:1:1:1: must be"),
        ("64:8:3", "train.steps=5", "train.steps: set by this script"),
    ],
)
def test_invalid_stages_and_settings_are_refused(stages: str, setting: str, line: str, tmp_path: Path) -> None:
    names = {
        "STAGES": stages,
        "RUN_DIR": str(tmp_path / "runs"),
        "NPROC": "1",
        "VENV": "none",
        "PYTHON": sys.executable,
    }
    script = REPOSITORY / "launch" / "length_extension.sh"
    ended = subprocess.run([script, setting], env={**os.environ, **names}, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"error: {line}"), ended.stderr
    assert not (tmp_path / "runs").exists()
