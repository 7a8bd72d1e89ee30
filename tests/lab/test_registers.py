"""The stored table of registers is still what the kernels compile to."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.commands import REPOSITORY


@pytest.mark.slow
def test_registers_are_those_of_the_table() -> None:
    command = [sys.executable, "-m", "lab.campaigns.registers", "--only", "gla_1b"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    stored = (REPOSITORY / "lab/results/registers_sm90.txt").read_text().splitlines()
    rows = [line for line in stored if line.startswith(("shape ", "gla_1b: "))]
    assert len(rows) > 5
    assert done.stdout.splitlines() == rows
