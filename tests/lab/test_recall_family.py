"""`lab/recall_family.py`: which runs it starts, what it makes of their results, and its error lines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from lab import recall_family
from lab.recall_family import MODELS, SHARED, main
from lab.recall_report import Model, Result, recall_table
from models.spec import spec_of
from tests.support.bench_settings import error_line
from tests.support.waiting import ENOUGH
from zeco_train import cli
from zeco_train.config.schema import load_config


def _result(model: str, seed: int, length: int, whole: float, zeroed: float | None = 1 / 64) -> Result:
    return Result(model, seed, length, length // 8, whole, zeroed, 1 / 64, 30.0)


def test_table_has_mean_and_range_over_seeds_with_control_and_chance() -> None:
    models = [Model("gla", 1234, (2, 32, 32)), Model("softmax", 1200, (0, 0, 0))]
    results = [_result("gla", 0, 64, 0.5), _result("gla", 1, 64, 0.75), _result("gla", 0, 128, 0.25)]
    results.append(_result("softmax", 0, 64, 1.0, None))
    lines = recall_table(models, results).splitlines()
    # Of two seeds, one with two lengths of half a minute.
    gla = "| gla | 1,234 | 2 × 32 × 32 = 2,048 | 0.8 | 2"
    softmax = "| softmax | 1,200 | keys and values of all tokens | 0.5 | 1"
    assert lines[2:] == [
        f"{gla} | as they are | 62.5 (50.0–75.0) | 25.0 |",
        f"{gla} | zeroed | 1.6 | 1.6 |",
        f"{softmax} | as they are | 100.0 | – |",
        "| chance |  |  |  |  |  | 1.6 | 1.6 |",
    ]
    assert lines[0].endswith("| 64 tokens, 8 pairs | 128 tokens, 16 pairs |")


@pytest.mark.slow
def test_linear_models_have_states_of_equal_size() -> None:
    shapes = {name: spec_of(load_config([*own, *SHARED.split()]).model).state_shape for name, own in MODELS.items()}
    assert shapes.pop("softmax") == (0, 0, 0)
    assert shapes == dict.fromkeys(("gla", "gated_deltanet", "kda"), (2, 32, 32)) | {"mamba2": (4, 16, 32)}


def _family(folder: Path, on_ranks: Callable[..., str], *more: str) -> int:
    options = ["--models", "gla", "softmax", "--seeds", "3", "--lengths", "64", "128", "--out", str(folder), *more]
    with mock.patch.object(recall_family, "_on_ranks", on_ranks):
        return main(options)


@pytest.mark.slow
def test_stages_follow_each_other_and_finished_ones_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started, problems = list[str](), {"softmax-3 128": "out of memory"}

    def on_ranks(command: Callable[..., int], arguments: list[str], folder: Path, deadline: float) -> str:
        if command is cli.main:
            config = load_config(arguments)
            name, length = config.name, config.data.seq_len
            before = f"{tmp_path}/{name}/{length // 2}"
            assert (config.seed, config.checkpoint.load) == (3, None if length == 16 else before)
            started.append(f"{name} {length}")
            return problems.pop(started[-1], "")
        started.append(f"evaluation {Path(arguments[0]).relative_to(tmp_path)}")
        found = {"whole": {"accuracy": [[0.75]]}, "chance": 1 / 64}
        if "recall.zeroed=true" in arguments:
            found["zeroed"] = {"accuracy": [[0.02]]}
        out = Path(arguments[arguments.index("--out") + 1])
        out.mkdir(parents=True)
        (out / "results.json").write_text(json.dumps({"tasks": {"recall": found}}))
        return ""

    assert _family(tmp_path, on_ranks) == 1
    gla = ["gla-3 16", "gla-3 32", "gla-3 64", "evaluation gla-3/64", "gla-3 128", "evaluation gla-3/128"]
    softmax = [each.replace("gla", "softmax") for each in gla]
    assert started == gla + softmax[:5]
    out, err = capsys.readouterr()
    assert err == "error: softmax-3: 128 tokens: out of memory\n"
    assert "gla-3, 64 tokens: 75.0%, zeroed 2.0% (" in out
    assert "softmax-3, 64 tokens: 75.0% (" in out
    assert {"recall_family.md", "recall_family.png"} <= {path.name for path in tmp_path.iterdir()}
    started.clear()
    finished = mock.Mock(return_value="")
    assert _family(tmp_path, finished, "--minutes", "1e-9") == 1
    assert finished.call_count == 0
    assert capsys.readouterr().err.endswith("error: softmax-3: not started: the time of --minutes is over\n")
    assert _family(tmp_path, on_ranks) == 0
    # A finished run without an evaluation ends at once.
    assert started == [*softmax[:2], *softmax[4:]]
    assert "| softmax | " in (tmp_path / "recall_family.md").read_text()
    assert _family(tmp_path, finished, "--", "optim.lr=1e-3") == 2
    assert "error: settings=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ["--models", "gla", "ring"],
            "error: --models=ring: must be different ones of gla, mamba2, ",
        ),
        (["--models", "kda", "kda"], "error: --models=kda: must be different ones of"),
        (["--lengths", "96"], "error: --lengths=96: must be different ones of 64, 128, 256, 512"),
        (["--seeds", "-1"], "error: --seeds=-1: must be different numbers ≥ 0"),
        (["--minutes", "nan"], "error: --minutes=nan: must be > 0"),
        (["--out", "a${b}"], "must have no ${ in its path; name another folder"),
        (["--fast"], "error: argument="),
        (["--", "data.seq_len=64"], "error: data.seq_len=64: is set by lab/recall_family.py; see --help"),
        (["--", "train.stepz=5"], "error: gla-0: train.stepz"),
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
    assert line in error_line(options, capsys, main, 2)
    assert not any(tmp_path.iterdir())


@pytest.mark.processes
@pytest.mark.campaign
def test_runs_train_and_are_evaluated(tmp_path: Path) -> None:
    # In a process of its own, which forks its ranks.
    command = [sys.executable, "-m", "lab.recall_family", "--models", "kda", "--seeds", "1"]
    more = ["--lengths", "64", "--out", str(tmp_path / "out"), "--", "train.steps=2", "sched.warmup_steps=1"]
    ended = subprocess.run([*command, *more], capture_output=True, text=True, cwd=tmp_path, timeout=4 * ENOUGH)
    assert (ended.returncode, ended.stderr) == (0, "")
    result = json.loads((tmp_path / "out" / "kda-1" / "64" / "recall.json").read_text())
    assert (result["model"], result["seed"], result["length"], result["pairs"]) == ("kda", 1, 64, 8)
    # Chance is 1.6 %, of 1,600 answers.
    assert 0 < result["whole"] < 0.06
    assert 0 < result["zeroed"] < 0.06
