"""`lab/recall_family.py`: which runs it starts, what it makes of their results, and its error lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from lab import recall_family
from lab.recall_family import main
from lab.recall_report import Model, Result, recall_table
from zeco_train import cli
from zeco_train.config.schema import load_config

pytestmark = pytest.mark.campaign


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


def _family(folder: Path, on_ranks: Callable[..., str], *more: str) -> int:
    options = ["--models", "gla", "softmax", "--seeds", "3", "--lengths", "64", "128", "--out", str(folder), *more]
    with mock.patch.object(recall_family, "_on_ranks", on_ranks):
        return main(options)


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
