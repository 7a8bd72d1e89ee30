"""Mistakes about softmax layers: one line each, which names field, value and what is allowed."""

from __future__ import annotations

import re

import pytest

from tests.support.commands import check_line, train_here
from zeco_train.config.schema import describe, load_config
from zeco_train.distributed.exchange import attention_method
from zeco_train.distributed.mesh import Launch
from zeco_train.errors import ConfigError
from zeco_train.sp.attention.registry import METHODS
from zeco_train.sp.registry import SPConfig
from zeco_train.training.build import init

HYBRID = "model.attn.every=2"
HUGE = "model.num_layers=1000000000000"
CONSTANT = "must be 1: segments need layers with a state of constant size, and the model has softmax attention at layer"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model.attn.every=5"], "model.attn.every=5: must be from 1 to model.num_layers = 4"),
        (["model.attn.every=0"], "model.attn.every=0: must be from 1 to model.num_layers = 4"),
        ([HYBRID, "model.attn.offset=2"], "model.attn.offset=2: must be from 0 to 1"),
        (["model.attn.offset=1"], "model.attn.offset=1: needs model.attn.every"),
        (["model.attn.layers=[1,4]"], "model.attn.layers=[1, 4]: must be ascending numbers of layers, from 0 to 3"),
        (["model.attn.layers=[-1]"], "model.attn.layers=[-1]: must be ascending numbers of layers, from 0 to 3"),
        (["model.attn.layers=[2,1]"], "model.attn.layers=[2, 1]: must be ascending numbers of layers, from 0 to 3"),
        ([HYBRID, "model.attn.layers=[1]"], "model.attn.layers=[1]: names layers in place of model.attn.every"),
        (
            [HYBRID, "model.attn.num_heads=3"],
            "model.attn.num_heads=3: must divide hidden_size = 128, or model.attn.head_dim be given",
        ),
        ([HYBRID, "model.attn.num_kv_heads=3"], "model.attn.num_kv_heads=3: must divide the 4 heads of queries"),
        ([HYBRID, "model.attn.window=0"], "model.attn.window=0: must be a whole number ≥ 1, or null"),
        ([HYBRID, "model.attn.window=-8"], "model.attn.window=-8: must be a whole number ≥ 1, or null"),
        ([HYBRID, "train.segments=2"], f"train.segments=2: {CONSTANT}s 1, 3"),
        (["model.attn.layers=[2]", "train.segments=4"], f"train.segments=4: {CONSTANT} 2"),
        ([HYBRID, "model.attn.window=4", "train.segments=2"], f"train.segments=2: {CONSTANT}s 1, 3"),
        ([HYBRID, "train.segments=2", HUGE], f"train.segments=2: {CONSTANT}s 1, 3, 5, 7, …"),
        (
            [HYBRID, "model.mixer=linear", "model.causal=false", "task=mlm"],
            "model.causal=false: softmax layers are causal for now, and the model has softmax attention at layers 1, 3",
        ),
        (
            [HYBRID, "sp.attention=ulysses", "sp.size=8"],
            "sp.attention=ulysses: needs ranks that divide the 4 heads of queries, not 8; here: auto, all_gather, ring",
        ),
        ([HYBRID, "sp.attention=rings"], "sp.attention=rings: must be one of auto, all_gather, ulysses, ring"),
        (["sp.attention=ring"], "sp.attention=ring: would be ignored; it needs model.attn.every"),
        (["model.attn.window=64"], "model.attn.window=64: would be ignored; it needs model.attn.every"),
        (["model.attn.gate=true"], "model.attn.gate=true: would be ignored; it needs model.attn.every"),
        (
            [HYBRID, "sp=dp", "sp.attention=ring"],
            "sp.attention=ring: would be ignored; it needs sp=lasp1 or sp=lasp2 or sp=zeco",
        ),
    ],
)
def test_mistakes_name_field_value_and_allowed(overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        load_config(overrides)


@pytest.mark.parametrize("layers", [HYBRID, "model.attn.layers=[0,3]"])
def test_settings_of_softmax_layers_are_taken_with_such_layers(layers: str) -> None:
    config = load_config([layers, "sp.attention=ring", "model.attn.window=64", "model.attn.gate=true"])
    method = attention_method(config.sp, config.model, 8)
    assert method is METHODS["ring"]
    assert config.model.attn.window == 64


def test_ulysses_with_more_ranks_than_heads_is_refused_before_ranks_join() -> None:
    config = load_config([HYBRID, "sp.attention=ulysses", "data.seq_len=64"])
    with pytest.raises(ConfigError, match=r"^sp.attention=ulysses: needs ranks that divide the 4 heads of queries"):
        init(config, Launch(0, 8, 0))


def test_auto_takes_a_balanced_method_that_fits_the_heads() -> None:
    model = load_config([HYBRID]).model
    found = {ranks: attention_method(SPConfig(), model, ranks) for ranks in (2, 4, 8)}
    assert {ranks: spec.name for ranks, spec in found.items() if spec is not None} == {
        2: "ulysses",
        4: "ulysses",
        8: "all_gather",
    }
    assert attention_method(SPConfig(), load_config([]).model, 2) is None


@pytest.mark.parametrize("pattern", [HYBRID, "model.attn.layers=[1]"])
def test_mistyped_number_of_layers_does_not_hang(pattern: str) -> None:
    check_line(train_here(HUGE, pattern), ConfigError.exit_code, "model=gla_tiny: ", "this machine has")


def test_help_lists_the_methods() -> None:
    text = describe([])
    assert all(f"  sp.attention={name}" in text for name in ("auto", *METHODS))
