"""Pictures where MPLBACKEND names what is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY
from tests.support.stores import write_store
from tests.support.waiting import ENOUGH

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
    "panel": lambda: panels.panel_png(panels.Panel("t", "c", lambda axes, colors: None), True),
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
