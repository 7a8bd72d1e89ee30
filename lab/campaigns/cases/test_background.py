"""Exits of the interpreter while a thread is inside torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from lab.campaigns.cases.ends import ENDS
from tests.support.commands import REPOSITORY
from tests.support.waiting import ENOUGH

pytestmark = pytest.mark.campaign

_CODES = {"regular": 3, "mistake": 2, "interrupt": 130, "bug": 1, "help": 0}


def test_process_ends_while_thread_is_inside_torch() -> None:
    """Every kind of exit keeps its exit code and message; a stuck thread is not waited for."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", "import sys; from lab.campaigns.cases import ends; sys.exit(ends.main())"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        timeout=ENOUGH,
    )
    assert result.returncode == 0, result.stderr.decode()
    assert time.monotonic() - began < 55, "a stuck thread was waited for"
    ended = json.loads(result.stdout)
    assert {name: code for name, (code, _) in ended.items()} == {name: _CODES[name.split(",")[0]] for name in ENDS}
    for name, (_, err) in ended.items():
        if name.startswith("bug"):
            assert err.startswith("Traceback"), err
            assert err.endswith("KeyError: 'ours'\n"), err
        else:
            assert err == ("error: field=1: must be 2\n" if name.startswith("mistake") else ""), name
