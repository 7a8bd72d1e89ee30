"""One run for all tests of trained models and imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import train_here
from zeco_train.export import ExportSettings, export


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps, with a checkpoint of each. Tests change copies only."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert train_here(f"run_dir={folder}", "train.steps=2", "checkpoint.every=1", "sp=lasp2").code == 0
    return folder


@pytest.fixture(scope="session")
def export_of_run(run: Path) -> Path:
    """Tests change copies only."""
    export(str(run), run.with_name("out"), ExportSettings())
    return run.with_name("out")
