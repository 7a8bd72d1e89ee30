"""What Kineto would print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY
from tests.training.test_profiler import files

pytestmark = pytest.mark.campaign


@pytest.mark.processes
def test_profiler_prints_nothing(tmp_path: Path) -> None:
    script = (
        "import sys; from tests.training.test_profiler import *\n"
        "run_steps(StepProfiler('2:3', [0], Path(sys.argv[1]), 0, CPU), 1, 2, 3, 4)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert files(tmp_path) == ["rank_0_steps_2_3.json.gz"]
