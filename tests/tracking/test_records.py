"""Invalid metrics.jsonl, validation.jsonl and starts.jsonl: reported by line and field before training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Outcome, check_line, run_here, snapshot, train_here
from tests.support.few import one_of
from zeco_train import compare, export
from zeco_train.bench import __main__ as bench
from zeco_train.errors import DataError
from zeco_train.report import __main__ as report
from zeco_train.system.files import METRICS_FILE
from zeco_train.tracking.charts import PLOT_FILE, VALIDATION_FILE, plot_validations
from zeco_train.tracking.metrics import STARTS_FILE, read_metrics
from zeco_train.training import trainer

DATA = DataError.exit_code
HUGE = 10**399


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with three validations."""
    folder = tmp_path_factory.mktemp("records") / "run"
    settings = "train.steps=3", "train.eval_sequences=2", "train.eval_every=1"
    outcome = train_here(f"run_dir={folder}", *settings, draws=True)
    assert outcome.code == 0, outcome.err
    assert (folder / PLOT_FILE).exists()
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run", symlinks=True)


def change(path: Path, number: int, **values: object) -> None:
    """Change fields of a line."""
    lines = path.read_text().splitlines()
    lines[number - 1] = json.dumps(json.loads(lines[number - 1]) | values)
    path.write_text("\n".join(lines) + "\n")


def replace(path: Path, number: int, line: str) -> None:
    lines = path.read_text().splitlines()
    lines[number - 1] = line
    path.write_text("\n".join(lines) + "\n")


def go_on(run: Path) -> Outcome:
    """Resume the run for one more step."""
    return train_here(f"run_dir={run}", "train.steps=4", "train.eval_sequences=2", "train.eval_every=1")


def compared_run(run: Path) -> dict[str, Any]:
    """What `compare` has written of the run beside it."""
    rows: list[dict[str, Any]] = json.loads((run.parent / "compare.json").read_text())["runs"]
    (row,) = [row for row in rows if row["path"] == str(run)]
    return row


READERS: list[Callable[[Path], Outcome]] = [
    lambda run: run_here(compare.main, str(run)),
    lambda run: run_here(report.main, str(run), "--out", str(run.parent / "report")),
    lambda run: run_here(export.main, str(run), str(run.parent / "export")),
    go_on,
]


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        pytest.param("loss", "abc", "'abc', not a number or null", marks=pytest.mark.slow),
        ("val_loss", "x" * 10_000, "'xxxx"),
    ],
)
def test_metric_of_wrong_type_is_refused(field: str, value: object, shown: str, run: Path) -> None:
    path = run / METRICS_FILE
    change(path, 2, **{field: value})
    before = snapshot(run)
    # All readers for one value only, since they share the parser.
    for read in READERS if value == "abc" else (READERS[0], go_on):
        outcome = read(run)
        check_line(outcome, DATA, f"{path}: line 2: {field} is ", shown, "; correct or remove the line")
        assert len(outcome.err) < 400
    assert snapshot(run) == before


@pytest.mark.few(2)
@pytest.mark.parametrize("line", ["", "[1, 2]", "null", "3", "{", '"text"', "\x00" * 20, "[" * 100_000, "\xff"])
def test_malformed_metrics_line_is_refused(line: str, run: Path) -> None:
    path = run / METRICS_FILE
    replace(path, 2, line)
    before = snapshot(run)
    for read in READERS if line == "null" else (READERS[0], go_on):
        check_line(read(run), DATA, f"{path}: line 2 is not a row of metrics; correct or remove the line")
    assert snapshot(run) == before


@pytest.mark.parametrize(
    "value", [pytest.param("NaN", marks=pytest.mark.slow), "-Infinity", *one_of(["1e999", "Infinity", "null"], "null")]
)
def test_non_finite_losses_are_accepted(value: str, run: Path) -> None:
    path = run / METRICS_FILE
    lines = path.read_text().splitlines()
    row = json.loads(lines[2]) | {"loss": "HERE", "tokens_per_second": "HERE"}
    replace(path, 3, json.dumps(row).replace('"HERE"', value))
    rows = read_metrics(path)
    for name in ("loss", "tokens_per_second"):
        assert [row[name] is None for row in rows] == [False, False, True]
    for read in READERS if value == "NaN" else READERS[:1]:
        outcome = read(run)
        assert outcome.code == 0, outcome.err
    compared = compared_run(run)
    assert (compared["steps"], compared["first_loss"], compared["last_loss"]) == (3, rows[0]["loss"], "nan")
    assert read_metrics(path)[:3] == rows


def test_readers_accept_extreme_numbers(run: Path) -> None:
    """Limits of floats and large integers: figures and tables are still written."""
    change(run / METRICS_FILE, 1, loss=1e308, grad_norm=-1e308, tokens=10**100, tokens_per_second=1e-308)
    change(run / METRICS_FILE, 2, loss=-1e308, step=10**15, tokens_per_second_per_device=0)
    first, _, last = read_metrics(run / METRICS_FILE)
    assert [first[name] for name in ("loss", "grad_norm", "tokens", "tokens_per_second")] == [None, None, 10**100, 0.0]
    assert (last["loss"], last["step"], last["tokens_per_second_per_device"]) == (None, 10**15, 0)
    for read in READERS[:3]:
        outcome = read(run)
        assert outcome.code == 0, outcome.err
    compared = compared_run(run)
    assert (compared["steps"], compared["first_loss"], compared["last_loss"]) == (10**15, "nan", "nan")
    for name in ("compare.png", "report/report.html", "export/README.md"):
        assert (run.parent / name).stat().st_size > 0


def _torn(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"step": 4, "lo')


def test_torn_last_line_is_dropped_before_training(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a kill during a write; each file is repaired once, with a warning."""
    names = (METRICS_FILE, VALIDATION_FILE, STARTS_FILE)
    whole = {name: (run / name).read_bytes() for name in names}
    for name in names:
        _torn(run / name)
    seen: list[dict[str, bytes]] = []
    train = trainer.Trainer.train

    def watched(self: trainer.Trainer) -> Any:
        seen.append({name: (run / name).read_bytes() for name in names})
        return train(self)

    monkeypatch.setattr(trainer.Trainer, "train", watched)
    outcome = go_on(run)
    assert outcome.code == 0, outcome.err
    assert outcome.err.count("warning: ") == 3
    for name in names:
        line = f"warning: {run / name}: dropped its last line of 15 bytes, which a kill has left torn\n"
        assert outcome.err.count(line) == 1
        assert seen[0][name].startswith(whole[name])
        assert seen[0][name].endswith(b"}\n")
        assert [json.loads(row)["step"] for row in (run / name).read_text().splitlines()] in ([1, 2, 3, 4], [0, 3])
    again = go_on(run)
    assert (again.code, again.err) == (0, "")


@pytest.mark.parametrize(
    ("file", "values", "problem"),
    [
        (STARTS_FILE, {"backend": 3}, "line 1: backend is 3, not text"),
        (VALIDATION_FILE, {"by_position": None}, "line 1: by_position: not an object"),
    ],
)
def test_invalid_starts_and_validation_records_are_refused(
    file: str, values: dict[str, object], problem: str, run: Path
) -> None:
    change(run / file, 1, **values)
    before = snapshot(run)
    check_line(go_on(run), DATA, f"{run / file}: {problem}", "; correct or remove the line")
    assert snapshot(run) == before
    if file == STARTS_FILE:
        outcome = run_here(report.main, str(run), "--out", str(run.parent / "report"))
        check_line(outcome, DATA, f"{run / file}: {problem}")
    else:
        with pytest.raises(DataError, match="line 1"):
            plot_validations(run)


ROW = {"model": "gla_1b", "heads": 16, "tokens": 64, "variant": "dp", "median_ms": 1.0, "p10_ms": 1.0, "p90_ms": 1.0}
ROW |= {"runs": 3, "tokens_per_second_per_gpu": 1e4}
RESULTS = {"case": "model", "rows": [ROW, ROW], "world_size": 1, "environment": {}}
RESULTS |= {"config": {"strategy": "zero2", "segments": 1, "dtype": "bf16"}}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"format": 2}, "format is 2, not 1: another version of zeco-train wrote it"),
        ({"case": []}, "case is [], not one of collectives, "),
        ({"rows": 3}, "rows is 3, not a list"),
        ({"rows": [3]}, "row 1: 3 is not an object"),
        ({"world_size": "4"}, "world_size is '4', not a whole number"),
        ({"environment": None}, "environment is None, not an object"),
        ({"config": {}}, "config has no strategy"),
        ({"rows": [ROW, ROW | {"median_ms": "fast"}]}, "row 2: median_ms is 'fast', not a number"),
        ({"rows": [ROW, ROW | {"tokens": 0}]}, "row 2: tokens is 0, not a whole number ≥ 1"),
        ({"rows": [ROW, ROW | {"runs": HUGE}]}, "row 2: runs is 1000000"),
        ({"rows": [ROW, ROW | {"variant": 3}]}, "row 2: variant is 3, not text"),
        ({"rows": [ROW, ROW | {"p90_ms": None}]}, "row 2: lacks p90_ms"),
    ],
)
def test_invalid_benchmark_results_are_refused(values: dict[str, object], problem: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(RESULTS | values))
    for main, arguments in (
        (report.main, [str(path), "--out", str(tmp_path / "report")]),
        (bench.main, ["plot", str(path)]),
    ):
        check_line(run_here(main, *arguments), DATA, f"{path}: {problem}")


def test_rows_with_missing_columns_are_read(run: Path) -> None:
    """Rows of other programs: present columns are compared."""
    other = shutil.copytree(run, run.with_name("other"), symlinks=True)
    (other / METRICS_FILE).write_text('{"step": 1}\n{"step": 2, "loss": 3.0}\n')
    (run / METRICS_FILE).write_text('{"step": 1}\n{"step": 2, "loss": 3.5}\n')
    for read in READERS[1:3]:
        outcome = read(run)
        assert outcome.code == 0, outcome.err
    outcome = run_here(compare.main, str(other), str(run))
    assert outcome.code == 0, outcome.err
    compared = compared_run(run)
    assert (compared["steps"], compared["first_loss"], compared["last_loss"]) == (2, "nan", 3.5)
    loss, norm = (compared["difference"][column] for column in ("loss", "grad_norm"))
    assert (loss["absolute"], loss["absolute_step"], norm["absolute"]) == (0.5, 2, 0.0)
