"""Copies of checkpoints under higher steps."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

import pytest

from tests.checkpoint.test_hostile_checkpoint import DATA, finished
from tests.support.commands import train_here
from zeco_train.checkpoint.files import complete_checkpoints

# Fixtures.
__all__ = ["finished"]
pytestmark = pytest.mark.campaign


def test_copy_with_higher_step_does_not_delete_new_checkpoints(finished: Path, tmp_path: Path) -> None:
    """With checkpoint.keep=1, each new checkpoint was deleted as older than the copy."""
    run = shutil.copytree(finished, tmp_path / "run", symlinks=True)
    folder = run / "checkpoints"
    keep = ["train.steps=6", "checkpoint.every=1", "checkpoint.keep=1"]
    shutil.copytree(folder / "step_00000002", folder / "step_00000099")
    outcome = train_here(*DATA, f"run_dir={run}", *keep)
    assert outcome.code == 0, outcome.err
    assert "damaged: run.json is that of step 2; it is step_00000099.damaged now" in outcome.err
    names = {path.name for path in folder.iterdir()}
    assert names == {"step_00000006", "step_00000099.damaged", "latest", "lock"}
    # Likewise a copy that appears during a run at lower steps.
    shutil.copytree(folder / "step_00000006", folder / "step_00000098")
    with mock.patch(
        "zeco_train.checkpoint.checkpointer.damage_of", lambda path, mesh: None if path.name[-1] == "6" else "copy"
    ):
        assert train_here(*DATA, f"run_dir={run}", "train.steps=7", *keep[1:]).code == 0
    assert [path.name for path in complete_checkpoints(run)] == ["step_00000007"]
