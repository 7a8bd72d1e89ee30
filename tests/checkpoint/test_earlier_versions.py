"""A checkpoint and an export written by commit 4117173 still load and continue with the same losses.

`fixtures/commit_4117173.tar.gz` holds a run of four steps (fp64, two ranks, zeco as a chain, zero3, two segments), its
export, and that commit's losses and gradient norms: of steps 5 to 7, and of a new run from the export.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from tests.support.commands import Outcome, run_here
from zeco_train import cli
from zeco_train.tracking.metrics import read_metrics

FIXTURE = Path(__file__).parents[1] / "fixtures" / "commit_4117173.tar.gz"
SETTINGS = [
    "data=synthetic",
    "data.seq_len=64",
    "data.global_batch=2",
    "model.num_layers=1",
    "model.hidden_size=8",
    "model.num_heads=2",
    "model.intermediate_size=16",
    "train.dtype=fp64",
    "train.log_every=1",
    "train.eval_sequences=2",
    "sched=constant",
    "sched.warmup_steps=2",
]


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    with tarfile.open(FIXTURE) as archive:
        # Python 3.11.2, which is Debian's, has no filters; the file is the project's own.
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return tmp_path


def check(outcome: Outcome, run: Path, expected: dict[str, list[float]]) -> None:
    assert outcome.code == 0, outcome.err
    rows = {row["step"]: row for row in read_metrics(run / "metrics.jsonl")}
    for step, (loss, norm) in expected.items():
        # One rank and another machine: the tolerance between splits. On two ranks of one machine it is bit-identical.
        assert rows[int(step)]["loss"] == pytest.approx(loss, rel=1e-9)
        assert rows[int(step)]["grad_norm"] == pytest.approx(norm, rel=1e-9)


def test_run_of_earlier_version_resumes(earlier: Path) -> None:
    run, expected = earlier / "run", json.loads((earlier / "expected.json").read_text())["resumed"]
    outcome = run_here(cli.main, *SETTINGS, f"run_dir={run}", "name=run", "train.steps=7", "train.segments=2")
    check(outcome, run, expected)
    assert "from step 4" in outcome.out + outcome.err + (run / "logs" / "rank_0.log").read_text()


def test_export_of_earlier_version_starts_new_run(earlier: Path) -> None:
    run, expected = earlier / "new", json.loads((earlier / "expected.json").read_text())["continued"]
    load = [f"run_dir={run}", "name=on", "train.steps=3", f"checkpoint.load=hf:{earlier / 'export'}"]
    check(run_here(cli.main, *SETTINGS, *load), run, expected)
