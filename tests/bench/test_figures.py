"""Figures of benchmarks: the papers' numbers, results of several runs, ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zeco_train.bench import figures
from zeco_train.errors import ConfigError, DataError


def test_reference_figures_of_the_papers_load() -> None:
    operator = figures.reference("zeco_operator_ms")
    assert operator[0] == {
        "seq_len_per_gpu": 16384,
        "gpus": 8,
        "lasp1": 22.59,
        "lasp2": 19.39,
        "zeco": 7.32,
        "dp": 6.39,
    }
    assert len(figures.reference("zeco_collectives_ms")) == 6
    # Empty cells of the paper's tables have no entry.
    assert "lasp1" not in figures.reference("zeco_model_tokens_per_second_per_gpu")[5]


def test_plot_combines_results_of_several_runs(tmp_path: Path) -> None:
    files = []
    for gpus in (1, 2):
        rows = [
            {"variant": name, "mode": "eager", "pass": "forward_backward", "tokens": tokens, "median_ms": 1.0 * gpus}
            | {"heads": 16, "key_dim": 64, "value_dim": 128}
            for name in ("dp", "zeco:chain:p2p")
            for tokens in (16_384, 65_536)
        ]
        result = {"case": "operator", "world_size": gpus, "environment": {"device": "cpu"}, "rows": rows}
        files.append(tmp_path / f"{gpus}.json")
        files[-1].write_text(json.dumps(result))
    out = tmp_path / "figures"
    paths = figures.plot_files([*map(str, files), f"out={out}"])
    assert [path.name for path in paths] == ["operator.png", "operator_tokens.png"]
    assert all(path.parent == out and path.read_bytes().startswith(b"\x89PNG") for path in paths)
    files[0].write_text(json.dumps(result | {"case": "collectives", "rows": []}))
    with pytest.raises(ConfigError, match="one case at a time"):
        figures.plot_files([str(file) for file in files])
    files[0].write_text("{}")
    with pytest.raises(DataError, match=r"is no results\.json"):
        figures.plot_files([str(files[0])])


def test_operator_figure_shows_each_time_relative_to_dp() -> None:
    times = {"dp": 2.0, "zeco": 2.01, "fla": 3.5}
    rows = [
        {"variant": name, "mode": "eager", "pass": "forward_backward", "tokens": 16_384, "gpus": gpus}
        | {"heads": 16, "key_dim": 64, "value_dim": 128}
        | {"median_ms": gpus * ms, "p10_ms": gpus * ms - 0.1, "p90_ms": gpus * ms + 0.1}
        for name, ms in times.items()
        for gpus in (2, 1)
    ]
    figure = figures._operator(rows, "here")
    assert figure is not None
    lower = figure.axes[1]
    assert [text.get_text() for text in lower.texts] == ["1.000", "1.005", "1.750"]
    assert [label.get_text() for label in lower.get_yticklabels()] == list(times)
    assert "2 GPUs" in lower.get_xlabel()
