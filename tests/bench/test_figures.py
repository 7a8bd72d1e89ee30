"""Figures of benchmarks: the papers' numbers, results of several runs, ratios."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from zeco_train.bench import figures
from zeco_train.bench.figures import mixer_rows, mixer_table
from zeco_train.errors import ConfigError, DataError


def written(folder: Path, case: str, rows: dict[int, list[dict[str, Any]]]) -> list[str]:
    """Results of a case, by number of GPUs."""
    for gpus, own in rows.items():
        config = {"strategy": "zero2", "segments": 1, "dtype": "bf16"}
        result = {"case": case, "world_size": gpus, "environment": {"device": "cuda"}, "rows": own, "config": config}
        (folder / f"{gpus}.json").write_text(json.dumps(result))
    return [str(folder / f"{gpus}.json") for gpus in rows]


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
    operators: tuple[dict[str, Any], ...] = (
        {},
        {"operator": "scalar_decay", "groups": 2},
        {"operator": "fixed_decay", "decay": "none"},
    )
    rows = [
        {"variant": name, "mode": "eager", "pass": "forward_backward", "tokens": tokens, "median_ms": 1.0}
        | {"heads": 16, "key_dim": 64, "value_dim": 128, **operator}
        for name in ("dp", "zeco:chain:p2p")
        for tokens in (16_384, 65_536)
        for operator in operators
    ]
    files, out = written(tmp_path, "operator", {1: rows, 2: rows}), tmp_path / "figures"
    paths = figures.plot_files([*files, f"out={out}"])
    names = ["operator", "operator_scalar_decay_g2", "operator_fixed_decay_none"]
    assert [path.name for path in paths] == [f"{name}{of}.png" for name in names for of in ("", "_tokens")]
    assert all(path.parent == out and path.read_bytes().startswith(b"\x89PNG") for path in paths)
    written(tmp_path, "collectives", {1: []})
    with pytest.raises(ConfigError, match="one case at a time"):
        figures.plot_files(files)
    Path(files[0]).write_text("{}")
    with pytest.raises(DataError, match=r"is no results\.json"):
        figures.plot_files(files[:1])


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


def test_figure_shows_times_and_balance() -> None:
    row = {"heads": 4, "key_heads": 2, "head_dim": 8, "window": None, "pass": "forward_backward", "gpus": 2}
    rows = [
        {**row, "variant": name, "tokens": tokens, "median_ms": 3.0, "exposed_us": 400.0, "slowest": 1.02}
        for name in ("all_gather", "gla:zeco")
        for tokens in (16, 64)
    ]
    figure = dict(figures._attention(rows, "here"))["attention"]
    assert figure is not None
    assert [len(axes.patches) for axes in figure.axes] == [4, 0, 4, 0]
    assert [line.get_xdata()[0] for line in figure.axes[1].lines] == [1.02, 1.02, 1.0]
    assert figure.axes[2].yaxis_inverted(), "the first variant is on top"
    for each in rows:
        del each["slowest"]
    assert len(dict(figures._attention(rows, "here"))["attention"].axes) == 2
    assert not [*figures._attention([{**row, "pass": "forward"}], "here")]


def _row(mixer: str, variant: str, rate: float, ratio: float | None, **more: Any) -> dict[str, Any]:
    row = {"mixer": mixer, "model": f"{mixer}_1b", "heads": 16, "tokens": 16384, "variant": variant, "median_ms": 1.0}
    row |= {"p10_ms": 1.0, "p90_ms": 1.0, "runs": 1, "tokens_per_second_per_gpu": rate, "ratio": ratio}
    return row | more


def test_table_sets_rates_and_ratios_of_mixers_beside_each_other(tmp_path: Path) -> None:
    rows = [_row("gla", "dp", 70000.4, 1.0), _row("gla", "zeco", 69000.0, 0.9857), _row("retnet", "dp", 80000.0, 1.0)]
    assert mixer_table(mixer_rows(rows)).splitlines() == [
        "| mixer | model | tokens a rank | dp, tokens/s | zeco, tokens/s | zeco / dp |",
        "|---|---|---|---|---|---|",
        "| gla | gla_1b, H 16 | 16,384 | 70,000 | 69,000 | 0.986 |",
        "| retnet | retnet_1b, H 16 | 16,384 | 80,000 |  |  |",
    ]
    assert mixer_rows(rows[:2]) == {}, "one model needs no such table"
    assert len(mixer_rows([rows[0], rows[0] | {"model": "gla_1b_hybrid_4"}])) == 2
    # Rows of before mixers.
    assert mixer_rows([{key: value for key, value in row.items() if key != "mixer"} for row in rows]) == {}
    paths = figures.plot_files(written(tmp_path, "model", {2: rows}))
    assert [path.name for path in paths] == ["gla_1b_h16.png", "retnet_1b_h16.png", "mixers.png"]


def test_figure_shows_ratios_of_scans() -> None:
    rows = [_row(m, v, 1e4, r) for m in ("gla", "linear") for v, r in (("dp", 1.0), ("products", 1.4), ("zeco", 0.98))]
    left, right = figures.draw_mixers(mixer_rows(rows), "here").axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["gla_1b, H 16", "linear_1b, H 16"]
    assert len(left.patches) == 6
    assert [text.get_text() for text in right.texts] == ["0.980", "0.980"]


def test_plot_writes_figures_over_gpus_and_tokens_per_model_and_heads(tmp_path: Path) -> None:
    rows = [
        _row("gla", name, 8e4, ratio, tokens=tokens, heads=heads)
        for name, ratio in (("dp", 1.0), ("zeco", 0.99), ("fla", 0.8), ("fla:no_optimizer", None))
        for tokens in (16_384, 65_536)
        for heads in (16, 32)
    ]
    with mock.patch.object(figures, "_draw_paper") as draw_paper:
        paths = figures.plot_files([*written(tmp_path, "model", {1: rows, 4: rows}), f"out={tmp_path}"])
    names = ["gla_1b_h16.png", "gla_1b_h32.png", "gla_1b_h16_tokens.png", "gla_1b_h32_tokens.png"]
    assert [path.name for path in paths] == names
    drawn = {(call.args[2], call.args[1][0]) for call in draw_paper.call_args_list}
    assert ("dp", (8.0, 47594.0)) in drawn
    assert ("zeco", (8.0, 44497 / 47594)) in drawn
