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
from tests.support.bench_settings import error_line
from zeco_train.report.comparison import Run

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_failed_runs_and_other_settings_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train(case: Case, seconds: float) -> str:
        if case.mixer == "gla":
            return "failed with exit code 2"
        _losses(case.run_dir, [5.0, 4.2, 4.0])
        return ""

    assert _family(tmp_path, train) == 1
    out, err = capsys.readouterr()
    assert err == "error: gla-dp: failed with exit code 2\nerror: gla-zeco: failed with exit code 2\n"
    assert "| mamba2 | " in out
    assert "| gla | " not in out
    assert _family(tmp_path, train, "--dtype", "fp32") == 2
    assert f"error: --dtype=fp32: the runs in {tmp_path} have fp64" in capsys.readouterr().err
    assert _family(tmp_path, train, "--minutes", "1e-9") == 1
    assert "error: gla-dp: not started: --minutes=1e-09 are over\n" in capsys.readouterr().err
    (tmp_path / "family.json").write_text("7")
    assert _family(tmp_path, train) == 3
    assert "name another --folder" in capsys.readouterr().err


@pytest.mark.few(quick=7)
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--mixers", "gla", "ring"], "error: --mixers=ring: must be different ones of gla, linear, "),
        (["--every", "2", "2"], "error: --every=2: must be different numbers ≥ 0"),
        (["--every", "9"], "error: gla_hybrid_9-dp: model.attn.every=9: must be from 1 to model.num_layers = 4"),
        (["--mixers", "gla", "gla"], "error: --mixers=gla: must be different ones of"),
        (["--ranks", "1"], "error: --ranks=1: must be ≥ 2"),
        (["--ranks", "3000"], "error: gla-zeco: data.seq_len=2048: must be ≥ 3000: "),
        (["--steps", "0"], "error: --steps=0: must be ≥ 1"),
        (["--minutes", "nan"], "error: --minutes=nan: must be > 0"),
        (["--limit", "nan"], "error: --limit=nan: must be ≥ 0"),
        (["--size", "2b"], "error: gla-dp: model=gla_2b: must be one of"),
        (["--folder", "a${b}"], "must have no ${ in its path; name another folder"),
        (["--fast"], "error: argument="),
        (["--", "sp=lasp2"], "error: sp=lasp2: is set by lab/family.py; see --help"),
        (["--", "train.stepz=5"], "error: gla-dp: train.stepz"),
    ],
)
def test_mistakes_end_in_one_line(
    options: list[str],
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [] if options[0] == "--mixers" else ["--mixers", "gla"]
    assert line in error_line([*given, *options], capsys, main, 2)
    assert not any(tmp_path.iterdir())


@pytest.mark.processes
@pytest.mark.campaign
def test_losses_of_mixers_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    options = ["--mixers", "retnet", "--every", "0", "1", "--steps", "2", "--folder", str(tmp_path), "--minutes", "15"]
    assert main([*options, "--", *SETTINGS]) == 0
    rows = list(csv.DictReader((tmp_path / "family.csv").read_text().splitlines()))
    assert [row["model"] for row in rows] == ["retnet", "retnet_hybrid_1"]
    assert all(float(row["difference"]) < 1e-12 for row in rows)
