"""Pictures where MPLBACKEND names what is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.report.test_report import DP, RESULTS, ZECO, report, three_runs, write_run
from tests.support.commands import REPOSITORY
from tests.support.stores import write_store
from tests.support.waiting import ENOUGH
from tests.tracking.test_metrics import metrics, write_rows
from zeco_train.report import panels
from zeco_train.report.__main__ import main
from zeco_train.report.measurements import read
from zeco_train.system.figures import new_figure
from zeco_train.tracking.charts import plot_run

pytestmark = pytest.mark.campaign

# Each figure in a process without matplotlib, forked from one with all other imports.
_DRAW = """
import os, sys
from data import inspect
from zeco_train import compare
from zeco_train.tracking import charts
from zeco_train.bench import figures
from zeco_train.evaluate.synthetic import heat_map
from zeco_train.report import panels

run, other, store = sys.argv[1:]
decode = {"model": "m", "batch": 1, "variant": "zeco", "context": 64, "tokens_per_second": 2.0, "memory_gb": 1.0}
pictures = {
    "run": lambda: charts.plot_run(run),
    "compare": lambda: compare.main([run, other, "--out", run]),
    "heat map": lambda: heat_map("t", [64], [0.5], [[0.5]], train_len=64, chance=0.1, caption="c"),
    "panel": lambda: panels.panel_png(panels.Panel("t", "c", lambda axes: None)),
    "decode": lambda: list(figures._decode([decode], "here")),
    "inspect": lambda: inspect.main([store, "--png", run + "/lengths.png"]),
}
assert "matplotlib" not in sys.modules
for name, draw in pictures.items():
    if os.fork() == 0:
        draw()
        import matplotlib
        assert os.environ["MPLBACKEND"].startswith("module://")
        os.write(1, f"{name}: {matplotlib.get_backend()}\\n".encode())
        os._exit(0)
    os.wait()
"""


def test_missing_matplotlib_backend_falls_back_to_agg(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("run", "other", "store")]
    row = {"step": 1, "loss": 5.0, "grad_norm": 1.0, "tokens_per_second": 10.0, "tokens": 64}
    for run in folders[:2]:
        run.mkdir()
        (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    write_store(folders[2])
    environment = {**os.environ, "MPLBACKEND": "module://of_a_notebook.backend_inline", "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        [sys.executable, "-c", _DRAW, *map(str, folders)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=ENOUGH,
    )
    drawn = [line for line in result.stdout.splitlines() if line.endswith(": agg")]
    assert drawn == [f"{name}: agg" for name in ("run", "compare", "heat map", "panel", "decode", "inspect")], result
    assert "Error" not in result.stderr, result.stderr


def test_all_stored_results_are_reported_or_left_out_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As README and docs name them: lab/results/*.json."""
    files = sorted(RESULTS.glob("*.json"))
    assert main([*map(str, files), "--out", str(tmp_path / "page")]) == 0
    told = capsys.readouterr()
    left = [line for line in told.err.splitlines() if line.startswith("left out: ")]
    assert sorted(Path(line.split(": ")[1]).name for line in left) == [
        "convergence_1xh200_fp8.json",
        "delays_2xh200.json",
    ]
    assert f"{len(files) - 2} benchmarks" in told.out


def test_many_runs_leave_room_for_their_curves(tmp_path: Path) -> None:
    """14 runs of two layouts: legends beside the axes, names at the bars, one point for all runs of a layout."""
    for number in range(14):
        rates = dict.fromkeys(range(1, 4), 100.0 + number)
        write_run(tmp_path / f"run-{number:02}", rates, [(0, DP if number % 2 else ZECO)])
    drawn = {panel.title.partition(" (")[0]: panel for panel in panels.panels(read([tmp_path]))}
    assert {"Loss of 14 runs", "Difference of the losses from run-00"} <= drawn.keys()
    for title, panel in drawn.items():
        figure = new_figure("", panels.PANEL_INCHES, dpi=60, title_size=8)
        axes = figure.subplots()
        panel.draw(axes)
        figure.canvas.draw()
        place = axes.get_position()
        assert min(place.width, place.height) > 0.55, (title, place)
        if title == "Exposed communication":
            assert {label.get_text() for label in axes.get_yticklabels()} >= {"run-00", "run-13"}
        if title == "Throughput by length":
            # Odd runs are of dp, even ones of zeco: the medians of 101, 103, … and of 100, 102, …
            assert {107.0, 106.0} <= {float(np.ravel(line.get_ydata())[0]) for line in axes.lines}


@pytest.mark.usefixtures("rendered")
def test_plot_is_redrawn_with_new_rows(tmp_path: Path) -> None:
    from matplotlib.image import imread

    assert plot_run(tmp_path) is None
    path = write_rows(tmp_path / "metrics.jsonl", metrics(1))
    sizes = []
    more = [metrics(step, 5 - step / 100, val_loss=4.0 if step % 50 == 0 else None) for step in range(1, 401)]
    for rows in ([], [metrics(2, float("nan"))], [metrics(2, 4.0), metrics(1, 4.9)], more):
        write_rows(path, *rows)
        picture = plot_run(tmp_path)
        assert picture == tmp_path / "loss.png"
        assert imread(picture).std() > 0.01
        sizes.append(picture.read_bytes())
    assert len(set(sizes)) == len(sizes)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


@pytest.mark.usefixtures("rendered")
def test_hostile_names_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "PANEL_DPI", 60)
    report(tmp_path, three_runs(tmp_path)[1])
