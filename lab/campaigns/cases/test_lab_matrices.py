"""The table of the matrices: each file has a row as soon as it has ended, and the next call goes on with the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.campaigns import matrices
from lab.campaigns.matrices import Row

pytestmark = pytest.mark.campaign

CASES = """
import time
import pytest

pytestmark = pytest.mark.campaign

def test_passes(): pass
def test_fails(): assert 1 == 2, "a reason"
def test_skips(): pytest.skip("no GPU")
def test_lasts(): time.sleep(SECONDS)
"""
WHERE = ("abc", "2026-11-27", "2 × a processor, no GPU")


def run(folder: Path, seconds: int, limit: float) -> Row:
    folder.mkdir()
    file = folder / "test_cases.py"
    file.write_text(CASES.replace("SECONDS", str(seconds)))
    rows: list[Row] = []
    matrices.run_all([str(file)], 2, limit, folder, lambda done: rows.append(done.row(4, *WHERE)))
    return rows[0]


@pytest.mark.processes
@pytest.mark.slow
def test_row_of_a_file_and_of_one_that_lasts_too_long(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 0, 120.0)
    assert (whole.passed, whole.skipped, whole.failed, whole.missing) == (2, 1, 1, 0)
    (failure,) = whole.failures
    assert failure.startswith(f"{whole.file}::test_fails  AssertionError: a reason")
    interrupted = run(tmp_path / "interrupted", 3600, 6.0)
    assert interrupted.missing >= 1
    assert interrupted.seconds < 60


def test_table_is_read_again(tmp_path: Path) -> None:
    rows = {
        "tests/a/test_b.py": Row("tests/a/test_b.py", 3, 1, 1, 1, 7.5, *WHERE, ["tests/a/test_b.py::test_c  why"]),
        "tests/test_d.py": Row("tests/test_d.py", 9, 4, 0, 0, 60.0, *WHERE),
    }
    cases = {"tests/a/test_b.py": 3, "tests/test_d.py": 9, "tests/test_e.py": 2}
    text = matrices.written(rows, cases)
    assert matrices.read(text) == rows
    assert matrices.written(matrices.read(text), cases) == text
    missing = text.partition(matrices.MISSING)[2].split("\n")
    assert [line for line in missing if line] == ["tests/test_d.py: 5 of 9 cases", "tests/test_e.py: 2 of 2 cases"]
