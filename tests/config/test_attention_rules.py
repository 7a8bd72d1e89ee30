"""Mistakes about softmax layers: one line each, which names field, value and what is allowed."""

from __future__ import annotations

import re

import pytest

from tests.support.commands import check_line, train_here
from tests.support.planning import make_case
from zeco_train.config.schema import load_config
from zeco_train.errors import ConfigError
from zeco_train.lifecycle.join import Launch
from zeco_train.plan.attention_costs import method_of
from zeco_train.sp.attention.method_registry import choose_method
from zeco_train.sp.exchange import softmax_load
from zeco_train.training.checks import join_ranks

HYBRID = "model.attn.every=2"
HUGE = "model.num_layers=1000000000000"
CONSTANT = "must be 1: segments need layers with a state of constant size, and the model has softmax attention at layer"


def _chosen(overrides: list[str], ranks: int, seq_len: int = 4096) -> str | None:
    """The method of a run's configuration on these ranks."""
    config = load_config(overrides)
    load = softmax_load(config.model, ranks, seq_len, config.train.dtype.compute)
    return None if load is None else choose_method(config.sp.attention, load).name


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model.attn.every=5"], "model.attn.every=5: must be from 1 to model.num_layers = 4"),
        ([HYBRID, "model.attn.offset=2"], "model.attn.offset=2: must be from 0 to 1"),
        (["model.attn.layers=[1,4]"], "model.attn.layers=[1, 4]: must be ascending numbers of layers, from 0 to 3"),
        (
            [HYBRID, "model.attn.num_heads=3"],
            "model.attn.num_heads=3: must divide hidden_size = 128, or model.attn.head_dim be given",
        ),
        ([HYBRID, "model.attn.window=0"], "model.attn.window=0: must be a whole number ≥ 1, or null"),
        ([HYBRID, "train.segments=2", HUGE], f"train.segments=2: {CONSTANT}s 1, 3, 5, 7, …"),
        (
            [HYBRID, "sp.attention=ulysses", "sp.size=8"],
            "sp.attention=ulysses: needs ranks that divide the 4 heads of queries, not 8; here: auto, all_gather, ring",
        ),
        (["sp.attention=ring"], "sp.attention=ring: would be ignored; it needs model.attn.every"),
    ],
)
def test_mistakes_name_field_value_and_allowed(overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        load_config(overrides)


@pytest.mark.parametrize("layers", [HYBRID, "model.attn.layers=[0,3]"])
def test_settings_of_softmax_layers_are_taken_with_such_layers(layers: str) -> None:
    overrides = [layers, "sp.attention=ring", "model.attn.window=64", "model.attn.gate=true"]
    assert _chosen(overrides, 8) == "ring"
    assert load_config(overrides).model.attn.window == 64


def test_ulysses_with_more_ranks_than_heads_is_refused_before_ranks_join() -> None:
    config = load_config([HYBRID, "sp.attention=ulysses", "data.seq_len=64"])
    with pytest.raises(ConfigError, match=r"^sp.attention=ulysses: needs ranks that divide the 4 heads of queries"):
        join_ranks(config, Launch(0, 8, 0))


def test_auto_takes_a_balanced_method_that_fits_the_heads() -> None:
    found = {ranks: _chosen([HYBRID], ranks) for ranks in (2, 4, 8)}
    assert found == {2: "ulysses", 4: "ulysses", 8: "all_gather"}
    assert _chosen([], 2) is None


def test_auto_counts_both_passes_and_what_a_window_leaves_out() -> None:
    """Of 4 heads of 32 on 4 ranks: `ulysses` sends as much with a window, `all_gather` the keys of the window only."""
    window = [HYBRID, "model.attn.window=512"]
    assert {length: _chosen(window, 4, length) for length in (1024, 16384)} == {1024: "ulysses", 16384: "all_gather"}
    # One head of keys, which `ulysses` repeats: it sends less all the same, since log-sum-exps stay where they are.
    shared = [HYBRID, "model.attn.num_heads=8", "model.attn.num_kv_heads=1"]
    assert [_chosen(shared, ranks, 4096) for ranks in (2, 8)] == ["ulysses", "ulysses"]


def test_plan_and_run_choose_alike() -> None:
    arguments = [HYBRID, "model.attn.window=512", "data.seq_len=16384"]
    assert method_of(make_case(*arguments, "world_size=4")).name == _chosen(arguments, 4, 16384)


def test_mistyped_number_of_layers_does_not_hang() -> None:
    check_line(train_here(HUGE, HYBRID), ConfigError.exit_code, "model=gla_tiny: ", "this machine has")
