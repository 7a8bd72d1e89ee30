"""Case `model` with several models: configurations, table and figure, the case on two ranks, fla's models of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models.formats.format_registry import formats_of
from models.spec import ModelSpec
from tests.support.distributed import run_distributed
from zeco_train.bench import figures, model, peer
from zeco_train.bench.config import ModelConfig
from zeco_train.bench.figures import mixer_rows, mixer_table
from zeco_train.bench.session import Session
from zeco_train.config.schema import load_config
from zeco_train.errors import ConfigError
from zeco_train.lifecycle.join import Launch
from zeco_train.sp.attention.method_registry import AttentionChoice

pytestmark = pytest.mark.numeric

SMALL = ["model=gla_tiny", "model.num_layers=2", "mixers=[gla,mamba2]"]
FAST = ["device=cpu", "tokens=[32]", "steps=2", "warmup=1", "check_tokens=32", "timeout_seconds=60", "dtype=fp64"]


def test_each_mixer_has_the_file_of_the_size() -> None:
    # Not loaded: that composes each model to check it.
    config = ModelConfig(model="gla_tiny", mixers=["gla", "retnet"], overrides=["model.num_layers=2"])
    runs = [config.run_config(settings) for settings in config.models]
    assert [run.model.name for run in runs] == ["gla_tiny", "retnet_tiny"]
    assert {run.model.num_layers for run in runs} == {2}
    alone = ModelConfig(model="retnet_tiny")
    assert [alone.run_config(settings).model.name for settings in alone.models] == ["retnet_tiny"]


def test_patterns_of_hybrids_are_told_apart_by_name() -> None:
    ring, two_layers = AttentionChoice["ring"], ["model.num_layers=2"]
    config = ModelConfig(model="gla_tiny", overrides=two_layers, every=[0, 2], attention=ring, heads=[2, 1])
    runs = [config.run_config(settings) for settings in config.models]
    assert [(run.model.name, run.model.num_heads, list(run.model.attn.chosen(2))) for run in runs] == [
        ("gla_tiny", 2, []),
        ("gla_tiny", 1, []),
        ("gla_tiny_hybrid_2", 2, [1]),
        ("gla_tiny_hybrid_2", 1, [1]),
    ]
    assert [run.sp.attention.name for run in runs] == ["auto", "auto", "ring", "ring"]


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
    result = {"case": "model", "world_size": 2, "environment": {"device": "cuda"}, "rows": rows}
    result["config"] = {"strategy": "zero2", "segments": 1, "dtype": "bf16"}
    (tmp_path / "results.json").write_text(json.dumps(result))
    paths = figures.plot_files([str(tmp_path / "results.json")])
    assert [path.name for path in paths] == ["gla_1b_h16.png", "retnet_1b_h16.png", "mixers.png"]


def test_figure_shows_ratios_of_scans() -> None:
    rows = [_row(m, v, 1e4, r) for m in ("gla", "linear") for v, r in (("dp", 1.0), ("products", 1.4), ("zeco", 0.98))]
    left, right = figures.draw_mixers(mixer_rows(rows), "here").axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["gla_1b, H 16", "linear_1b, H 16"]
    assert len(left.patches) == 6
    assert [text.get_text() for text in right.texts] == ["0.980", "0.980"]


def _case(rank: int, world_size: int, folder: str) -> None:
    config = ModelConfig.load([*SMALL, *FAST, "variants=[dp,zeco:chain,fla]", f"out={folder}"])
    session = Session.open(config, Launch(rank, world_size, rank, world_size))
    model.CASE.measure(config, session)
    session.drain()


@pytest.mark.campaign
def test_mixers_are_measured_one_after_the_other_on_two_ranks(tmp_path: Path) -> None:
    run_distributed(_case, 2, str(tmp_path))
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(row["mixer"], row["variant"]) for row in results["rows"]] == [
        (mixer, variant) for mixer in ("gla", "mamba2") for variant in ("dp", "zeco:chain")
    ]
    # Mamba-2's convolutions exchange a state with a matrix as its transition.
    assert all(row["relative_error"] < 1e-10 for row in results["rows"] if row["variant"] != "dp")
    assert sum(": fla is not measured: " in note for note in results["notes"]) == 2
    assert (tmp_path / "mixers.md").read_text().count("\n") == 2 + 2
    assert (tmp_path / "mixers.png").exists()


def _hybrids(rank: int, world_size: int, folder: str) -> str:
    # With one length of sequences `dp` must have the backends' first loss, or nothing is timed.
    arguments = ["model=gla_tiny", "model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=32"]
    arguments += ["every=[2]", "attention=ring", *FAST, "variants=[dp,products,zeco:chain]", f"out={folder}"]
    config = ModelConfig.load([*arguments, "seq_len=16"])
    session = Session.open(config, Launch(rank, world_size, rank, world_size))
    model.CASE.measure(config, session)
    with pytest.raises(ConfigError) as refused:
        model.CASE.run(ModelConfig.load([*arguments, "tokens=[30]", "seq_len=15"]), session)
    session.drain()
    return str(refused.value)


@pytest.mark.slow
def test_hybrids_are_checked_and_measured_at_equal_work_on_two_ranks(tmp_path: Path) -> None:
    assert run_distributed(_hybrids, 2, str(tmp_path)) == ["seq_len=15: must divide by 2 ranks"] * 2
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [(row["model"], row["variant"], row["tokens"], row["seq_len"]) for row in rows] == [
        ("gla_tiny_hybrid_2", variant, 32, None if variant == "products" else 16)
        for variant in ("dp", "products", "zeco:chain")
    ]
    assert rows[2]["relative_error"] < 1e-10


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["gla", "linear", "retnet", "hgrn", "hgrn2"])
def test_peer_of_a_mixer_has_our_parameters_and_set_buffers(mixer: str) -> None:
    config = load_config(["model=gla_tiny", f"model.mixer={mixer}", "model.num_layers=1"]).model
    assert formats_of(config)[0].library == "fla"
    ours = {name: p.detach() for name, p in ModelSpec(config).build().named_parameters()}
    theirs = peer._build(config, ours, torch.device("cpu"))
    assert all(torch.equal(p, ours[name]) for name, p in theirs.named_parameters())
    buffers = dict(theirs.named_buffers())
    assert [*buffers] == (["model.layers.0.attn.rotary.inv_freq"] if mixer == "retnet" else [])
    for frequencies in buffers.values():
        half = torch.arange(len(frequencies)) / len(frequencies)
        assert torch.allclose(frequencies, 1e4**-half)
