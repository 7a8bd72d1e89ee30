"""`lab/family.py`: which runs it starts, what it makes of them, and its error lines."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from lab.family import Case, main
from lab.family_report import Pair, Verdict, family_csv, family_table
from zeco_train.compare import Run

pytestmark = pytest.mark.campaign

# Those of models that all mixers share.
SETTINGS = ["model.num_layers=1", "data.seq_len=64", "train.eval_sequences=0", "sched.warmup_steps=2"]


def _losses(folder: Path, losses: list[float]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, start=1)]
    (folder / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))


def _pair(shared: list[float], alone: tuple[float, ...] = (5.0, 4.0)) -> Pair:
    runs = [Run("gla", Path(), {s: {"loss": x} for s, x in enumerate(losses, 1)}) for losses in (alone, shared)]
    return Pair("gla", 1234, *runs)


def test_verdict_is_the_largest_relative_difference() -> None:
    verdict = Verdict.of(_pair([5.0, 4.0 + 4e-9]), 1e-9)
    assert verdict.difference == pytest.approx(1e-9)
    assert (verdict.at_step, verdict.steps, verdict.last_loss, math.isnan(verdict.val_loss)) == (2, 2, 4.0, True)
    assert not Verdict.of(_pair([5.0, 4.0 + 5e-9]), 1e-9).same
    assert Verdict.of(_pair([5.0, 4.0 + 3e-9]), 1e-9).same
    # Equal, but not losses.
    assert not Verdict.of(_pair([5.0, math.nan], (5.0, math.nan)), 1e-9).same
    verdicts = [Verdict.of(_pair([5.0, 4.0]), 1e-9), Verdict.of(_pair([5.0, 6.0]), 1e-9)]
    assert [line.rpartition(" | ")[2] for line in family_table(verdicts).splitlines()[2:]] == [
        "within 1e-09 |",
        "MORE than 1e-09 |",
    ]
    rows = list(csv.DictReader(family_csv(verdicts).splitlines()))
    assert [(row["model"], row["difference"], row["same"]) for row in rows] == [
        ("gla", "0.0", "True"),
        ("gla", "0.5", "False"),
    ]


def _family(folder: Path, train: Callable[[Case, float], str], *more: str) -> int:
    options = ["--mixers", "gla", "mamba2", "--steps", "3", "--folder", str(folder), *more, "--", *SETTINGS]
    with mock.patch.object(Case, "train", train):
        return main(options)


def test_finished_runs_are_skipped_and_results_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started: list[tuple[str, int]] = []

    def train(case: Case, seconds: float) -> str:
        assert 0 < seconds <= 3600
        started.append((case.name, case.ranks))
        last = 4.5 if case.name == "mamba2-zeco" and len(started) > 4 else 4.0
        _losses(case.run_dir, [5.0, 4.2, last])
        return ""

    assert _family(tmp_path, train) == 0
    assert started == [("gla-dp", 1), ("gla-zeco", 2), ("mamba2-dp", 1), ("mamba2-zeco", 2)]
    assert {"family.png", "family.md", "family.csv"} <= {path.name for path in tmp_path.iterdir()}
    assert "| gla | " in capsys.readouterr().out
    _losses(tmp_path / "mamba2-zeco", [5.0])
    # The one unfinished run goes on, now with another loss.
    assert _family(tmp_path, train) == 1
    assert started[4:] == [("mamba2-zeco", 2)]
    assert "MORE than 1e-09" in (tmp_path / "family.md").read_text()
    assert _family(tmp_path, train, "--limit", "0.2") == 0
    assert len(started) == 5
