"""The file of slow-downs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.campaigns import slow_paths
from tests.ops.test_selection import LIMITED
from tests.support.commands import REPOSITORY
from zeco_train.ops.slow_paths import SlowDowns

pytestmark = pytest.mark.campaign


def test_campaign_writes_the_file_that_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = slow_paths.main([str(tmp_path / "table.json"), "--dry"])
    assert SlowDowns.read(tmp_path / "table.json") == table
    # Of those that kernels serve up to some width, in one dtype at least, and of those that GPUs may lack.
    assert {row.operator for row in table.rows} >= {*LIMITED, "gla", "hgrn", "softmax"}
    assert capsys.readouterr().out.count(" ms = ") == len(table.rows)
    stored = json.loads((REPOSITORY / "zeco_train/ops/slow_paths.json").read_text())
    assert stored.keys() == json.loads((tmp_path / "table.json").read_text()).keys()
