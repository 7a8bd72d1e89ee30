"""Whole commands with names and paths of any characters."""

from __future__ import annotations

from pathlib import Path

import pytest

from data import inspect, prepare
from tests.config.test_mistakes_paths import LOAD, ODD
from tests.support.commands import Outcome, run_here, train_here
from zeco_train import export
from zeco_train.evaluate import __main__ as evaluate
from zeco_train.generate import __main__ as generate

pytestmark = pytest.mark.campaign


def test_commands_take_names_with_any_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (folder := Path(ODD)).mkdir()
    (folder / "a.txt").write_text("some text\n" * 100)
    model, store, run = f"./{ODD}/-model", f"{ODD}/-store", f"{ODD}/,run"
    data = ["data=tokens", f"data.path={store}", "train.steps=1"]

    def check(outcome: Outcome) -> None:
        assert outcome.code == 0, outcome

    check(run_here(prepare.main, f"{ODD}/a.txt", f"--out={store}"))
    check(run_here(inspect.main, store))
    check(train_here(*data, f"name={ODD}"))
    check(train_here(*data, f"run_dir={run}", f"{LOAD}=runs/{ODD}", f"name=-{ODD}"))
    check(run_here(evaluate.main, run, f"--out={ODD}/results", f"data.validation_path={store}"))
    check(run_here(export.main, run, model))
    check(run_here(generate.main, model, "--prompt", "a", "--max-tokens", "1"))
    assert {"-model", "-store", ",run", "results"} <= {path.name for path in folder.iterdir()}
    assert Path("runs", ODD, "checkpoints").is_dir()
