"""`launch/*.sh --help` prints the script's header comment and installs nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY


@pytest.mark.processes
@pytest.mark.parametrize("name", ["check_export", "compare_backends", "length_extension", "recall"])
def test_help_prints_usage_without_installing(name: str, tmp_path: Path) -> None:
    script = REPOSITORY / "launch" / f"{name}.sh"
    for arguments in (["--help"], ["train.steps=2", "-h"]):
        ended = subprocess.run(
            [script, *arguments], env={**os.environ, "VENV": str(tmp_path / "venv")}, capture_output=True, text=True
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        first, _, rest = ended.stdout.partition(f"usage: launch/{name}.sh [KEY=VALUE ...]")
        assert first.strip()
        assert "VENV=none" in rest
        assert "set -e" not in rest
    assert not list(tmp_path.iterdir())
