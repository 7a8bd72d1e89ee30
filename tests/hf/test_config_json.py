"""config.json of every format: read with the defaults of the library, written, and refused by key and value."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models.attn import AttnConfig
from models.config import LanguageModelConfig
from models.formats.format import ModelFormat
from models.formats.format_registry import FORMATS as ALL_FORMATS
from models.mixer_registry import MIXERS
from models.mixers.gated_deltanet import GatedDeltaNetConfig
from models.mixers.gla import FeatureMap, GLAConfig
from models.mixers.linear import LinearAttentionConfig, LinearFeatureMap
from models.mixers.mamba1 import Mamba1Config
from models.mixers.mamba2 import Mamba2Config
from models.mixers.retnet import RetNetConfig
from models.spec import spec_of
from zeco_train.config.schema import load_config
from zeco_train.errors import ConfigError
from zeco_train.export import _memory, _softmax
from zeco_train.hf.config_json import from_config_json, to_config_json

pytestmark = pytest.mark.numeric

HERE = Path("model")
TOKENIZER: Any = SimpleNamespace(eos_id=2)
FORMATS = {one.model_type: one for one in ALL_FORMATS}
OF_FLA = {name: one for name, one in FORMATS.items() if one.library == "fla"}
# What each format needs besides its type: we do not support the default feature map of fla's linear attention.
NEEDED: dict[str, dict[str, Any]] = {"linear_attn": {"feature_map": "elu"}}
# config.json of fla-hub's 1.3B models of 2024, without keys of later versions.
PUBLISHED: dict[str, Any] = {
    "architectures": ["GLAForCausalLM"], "attn_mode": "chunk", "bos_token_id": 1, "clamp_min": None, "conv_size": 4,
    "elementwise_affine": True, "eos_token_id": 2, "expand_k": 0.5, "expand_v": 1, "feature_map": None,
    "fuse_cross_entropy": True, "fuse_norm": True, "hidden_act": "swish", "hidden_ratio": 4, "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": None, "max_position_embeddings": 2048, "model_type": "gla",
    "norm_eps": 1e-06, "num_heads": 4, "num_hidden_layers": 24, "num_kv_heads": None, "share_conv_kernel": True,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.38.2", "use_cache": True,
    "use_gk": True, "use_gv": False, "use_output_gate": True, "use_short_conv": False, "vocab_size": 32000,
}  # fmt: skip
# A file of configs/model, its published config.json where it differs from the class's defaults, published parameters.
OF_FILES: list[tuple[str, dict[str, Any], float]] = [
    ("gla_1.3b", {**PUBLISHED, "num_kv_heads": 4}, 1_365_514_240),
    ("retnet_1.3b", {"model_type": "retnet"}, 1.35e9),
    # No weights of this shape are published; the count is that of fla's class.
    ("gated_deltanet_1.3b", {"model_type": "gated_deltanet"}, 1_387_348_732),
    ("gsa_1.3b", {"model_type": "gsa"}, 1_376_929_792),
    ("mamba2_1.3b", {"model_type": "mamba2", "hidden_size": 2048, "initializer_range": 0.02, "n_groups": 1,
     "num_heads": 64, "num_hidden_layers": 48, "tie_word_embeddings": True, "vocab_size": 50288}, 2.69e9 / 2),
    ("mamba1_1.4b", {"model_type": "mamba", "hidden_size": 2048, "initializer_range": 0.02, "num_hidden_layers": 48,
     "time_step_rank": 128}, 1_372_178_432),
    ("gated_deltanet_7b", {"model_type": "olmo_hybrid", "linear_key_head_dim": 96, "linear_num_key_heads": 30,
     "linear_value_head_dim": 192, "linear_num_value_heads": 30, "rope_parameters": {"rope_theta": None},
     "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8}, 7_430_870_688),
]  # fmt: skip


def written(model: LanguageModelConfig, model_type: str | None = None) -> dict[str, Any]:
    return to_config_json(model, TOKENIZER, None, 128, "float32", model_type)


def small(kind: str, **change: Any) -> GatedDeltaNetConfig:
    """A hybrid of one of transformers' classes."""
    common: dict[str, Any] = {"hidden_size": 32, "num_heads": 2, "num_v_heads": 4, "head_dim": 8, "expand_v": 1.5}
    attn: dict[str, Any] = {"every": 4, "num_heads": 4, "qk_norm": True}
    if kind == "olmo_hybrid":
        own: dict[str, Any] = {"o_norm_eps": 1e-5}
        attn |= {"qk_norm_all_heads": True, "norm_after": True}
    else:
        own = {"zero_centred_norms": True}
        attn |= {"gate": True, "num_kv_heads": 2, "head_dim": 10, "rotary_dim": 6}
    attn |= change.pop("attn", {})
    return GatedDeltaNetConfig(**{**common, **own, "attn": AttnConfig(**attn), **change})


@pytest.mark.parametrize(("name", "record", "count"), OF_FILES)
def test_published_config_is_the_file_of_its_shape(name: str, record: dict[str, Any], count: float) -> None:
    model = load_config([f"model={name}"]).model
    assert dataclasses.replace(from_config_json(record, HERE).model, name=name).canonical() == model.canonical()
    assert spec_of(model).num_parameters == pytest.approx(count, rel=0.003)


def test_published_fla_config_is_read() -> None:
    model = from_config_json(PUBLISHED, HERE).model
    assert from_config_json({"model_type": "gla"}, HERE).model == model
    assert from_config_json({**PUBLISHED, "feature_map": "swish"}, HERE).model.feature_map is FeatureMap.silu


def test_config_of_transformers_is_read_with_its_defaults() -> None:
    model = from_config_json({"model_type": "mamba2"}, HERE).model
    assert isinstance(model, Mamba2Config)
    assert (model.num_heads, model.head_dim, model.hidden_size, model.num_layers) == (128, 64, 4096, 64)
    assert (model.n_groups, model.norm_eps, model.initializer_range, model.intermediate_size) == (8, 1e-5, 0.1, 0)
    assert model.time_step_limit == (0.0, float("inf"))
    for limit in ([0.0, {"__float__": "Infinity"}], [0, float("inf")]):
        assert from_config_json({"model_type": "mamba2", "time_step_limit": limit}, HERE).model == model
    of_mamba1 = from_config_json({"model_type": "mamba", "time_step_rank": "auto"}, HERE).model
    assert isinstance(of_mamba1, Mamba1Config)
    assert (of_mamba1.hidden_size, of_mamba1.num_layers, of_mamba1.state_size, of_mamba1.rank) == (768, 32, 16, 48)
    assert of_mamba1 == from_config_json({"model_type": "mamba", "intermediate_size": 1536}, HERE).model
    # fla's model of the same name has other names for these.
    assert from_config_json({"model_type": "mamba2", "norm_eps": 1e-3}, HERE).model.norm_eps == 1e-3


def test_largest_numbers_of_fla_config_make_a_model() -> None:
    """Sizes of tensors stay below 2^63 bytes, beyond which torch raises."""
    largest = dict.fromkeys(["hidden_size", "vocab_size", "expand_k", "expand_v", "hidden_ratio"], 1 << 20)
    shapes = spec_of(from_config_json({**PUBLISHED, **largest, "num_hidden_layers": 1}, HERE).model).parameter_shapes
    assert max(map(max, shapes.values())) == 1 << 40


TYPE, LIST, INFINITY = "model_type", "layer_types", {"__float__": "Infinity"}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
# Format, a changed key and its value, and a part of the line.
REFUSED: list[tuple[str, str, Any, str]] = [
    ("gla", TYPE, "rwkv7", "only 'gla', "),
    ("gla", "architectures", ["GLAForSequenceClassification"], "only GLAForCausalLM can be read"),
    ("gla", "use_short_conv", True, "short convolutions before the operator: not supported"),
    ("gla", "feature_map", "gelu", "not supported, only relu, sqrelu, silu, sigmoid, swish"),
    ("gla", "hidden_size", "2048", "must be a whole number"),
    ("gla", "expand_k", True, "must be a number"),
    ("gla", "num_kv_heads", 3, "must divide num_heads=4: 1, 2, 4"),
    ("gla", "clamp_min", 0.5, "must be finite and < 0"),
    ("gla", "use_output_gate", 1, "must be true or false"),
    # Of a hostile file.
    ("gla", TYPE, ["gla"], "only 'gla', "),
    ("gla", "feature_map", "x" * 10**6, "not supported, only relu"),
    ("gla", "norm_eps", 10**350, "must be a number from −1,048,576 to 1,048,576"),
    ("gla", "hidden_ratio", 10**350, "must be a whole number from −1,048,576 to 1,048,576"),
    # Keys of all models of fla.
    ("retnet", "quantization_config", {"bits": 4}, "quantised weights: not supported, only None"),
    ("retnet", "norm_eps", 0, "must be finite and > 0"),
    ("retnet", "intermediate_size", 0, "must be a whole number ≥ 1"),
    ("retnet", "num_kv_heads", 2, "that serve several heads of queries: not supported, only None or num_heads"),
    ("retnet", "rope_theta", 500000.0, "another one than fla's layer has: not supported, only 10000.0"),
    ("retnet", "expand_k", 0.3, "times it must be a multiple of num_heads"),
    ("hgrn", "use_lower_bound", False, "no lower bounds of the forget gates: not supported, only True"),
    ("hgrn", "expand_ratio", 0, "must be a whole number ≥ 1"),
    ("hgrn2", "expand_ratio", 100, "must divide hidden_size, or be null beside num_heads"),
    # Of HGRN2's heads no key says how many.
    *(("hgrn2", "expand_ratio", ratio, "must divide hidden_size") for ratio in (None, 0, -128, 4096)),
    ("gsa", "feature_map", "t2r", "not supported, only swish, relu"),
    ("gsa", "num_slots", 0, "must be a whole number ≥ 1"),
    ("gsa", "num_heads", 0, "must be a whole number ≥ 1"),
    ("gsa", "expand_v", 2, "must be 1: the output's norm is as wide as the model"),
    ("delta_net", "qk_norm", "sum", "keys of another norm, with which the state may grow without bound"),
    ("kda", "lower_bound", -5.0, "decays with a lower bound: not supported, only None"),
    ("linear_attn", "feature_map", None, "not supported, only elu, relu, identity"),
    ("mamba", "use_bias", True, "biases of the projections: not supported"),
    ("mamba", "intermediate_size", 64, "must be expand · hidden_size"),
    ("mamba", "time_step_rank", 0, "must be a whole number ≥ 1"),
    ("mamba", "norm_eps", 1e-3, "another key than transformers' layer_norm_epsilon: not supported"),
    ("mamba2", "use_bias", True, "biases of the projections: not supported"),
    ("mamba2", "n_groups", 3, "must divide num_heads=128"),
    ("mamba2", "head_dim", 32, "must equal expand · hidden_size"),
    ("mamba2", "conv_kernel", 1, "must be a whole number ≥ 2"),
    ("mamba2", "time_step_limit", [0.0], "must be a list of two numbers"),
    ("mamba2", "time_step_limit", [INFINITY, 1.0], "must be a number"),
    ("mamba2", "time_step_limit", [1.0, 0.5], "0 ≤ least < most"),
    ("mamba2", "intermediate_size", 64, "another one than transformers' layer has"),
    ("mamba2", "norm_eps", 1e-3, "differs from layer_norm_epsilon=1e-05"),
    ("mamba2", "attn", {"layers": [1], "num_heads": 4}, "layers of softmax attention: not supported, only None"),
    ("olmo_hybrid", LIST, None, "layer_types=None: must be a list of linear_attention and full_att"),
    ("olmo_hybrid", LIST, ["full_attention"], "one a layer and both among them"),
    ("qwen3_5_text", LIST, [[], "full_attention", "a", "b"], "layer_types=[]: must be a list of"),
    ("olmo_hybrid", "linear_num_key_heads", None, "must be a whole number"),
    ("olmo_hybrid", "linear_key_head_dim", 0, "is of no model that can be built: model.head_dim=0: must be"),
    ("olmo_hybrid", "rope_parameters", None, "must be a mapping with rope_theta"),
    ("olmo_hybrid", "rope_parameters", {"rope_theta": 1e9, "factor": 2}, "rope_parameters.factor=2: not supp"),
    ("olmo_hybrid", "rope_parameters", {**ROPE, "partial_rotary_factor": 0.5}, "factor=0.5: not supported, only 1"),
    ("qwen3_5_text", "rope_parameters", {**ROPE, "rope_type": "yarn"}, "rope_type=yarn: another rotation: not"),
    ("qwen3_5_text", "rope_parameters", ROPE, "partial_rotary_factor=None: must be above 0 and at most 1"),
    (
        "qwen3_5_text",
        "rope_parameters",
        {**ROPE, "partial_rotary_factor": 0.3},
        "model.attn.rotary_dim=3: must be even",
    ),
    (
        "qwen3_5_text",
        "rope_parameters",
        {"rope_theta": None, "partial_rotary_factor": 0.5},
        "rope_parameters.rope_theta=None: must be finite and > 1",
    ),
    ("qwen3_5_text", "partial_rotary_factor", 0.5, "not supported beside rope_param"),
    ("qwen3_5_text", "rope_scaling", {"factor": 2}, "={'factor': 2}: not supported beside rope_param"),
    ("qwen3_5_text", "architectures", ["Qwen3_5ForConditionalGeneration"], "only Qwen3_5ForCausalLM can be read"),
    ("qwen3_5_text", TYPE, "qwen3_5", "=qwen3_5: only 'gla'"),
]
# Keys of fla's `attn`, beside its layers and heads.
REFUSED += [
    ("gla", "attn", {"layers": [1], "num_heads": 4, **change}, problem)
    for change, problem in [
        ({"qk_norm": True}, "attn.qk_norm=True: not supported, only layers, num_heads, "),
        ({"qkv_bias": True}, "attn.qkv_bias=True: biases of queries, keys and values: not supported, only False"),
        ({"layers": [1, 1]}, "must be ascending numbers of layers, from 0 to 23"),
        ({"layers": [24]}, "must be ascending numbers of layers, from 0 to 23"),
        ({"num_kv_heads": 3}, "must divide the 4 heads of queries"),
        ({"rope_theta": float("nan")}, "attn.rope_theta=nan: must be finite and > 1"),
        # Of a hostile file.
        ({"window_size": 10**400}, "must be a whole number ≥ 1"),
        ({"x" * 10**6: 1}, "not supported, only layers"),
        ({"a\nb\x1b[2J": 1}, "not supported, only layers"),
    ]
]
ONE_SHAPE = "must be null or one mapping: all softmax layers have one shape"
REFUSED += [("gla", "attn", value, ONE_SHAPE) for value in ([{"layers": [1]}, {"layers": [2]}], "all", 3)]


@pytest.mark.parametrize(("name", "key", "value", "problem"), REFUSED, ids=lambda value: f"{value!s:.20}")
def test_unsupported_settings_are_refused_by_name(name: str, key: str, value: Any, problem: str) -> None:
    record = {"model_type": name, **NEEDED.get(name, {})}
    if FORMATS[name].softmax_names is not None:
        record = written(small(name))
    elif name == "mamba2":
        record["layer_norm_epsilon"] = 1e-5
    with pytest.raises(ConfigError) as caught:
        from_config_json({**record, key: value}, HERE)
    line = caught.value.line
    assert problem in line
    assert "config.json" in line
    assert any(f"{key}{sign}" in line for sign in "=.") or "is of no model that can be built" in line
    assert "\n" not in line
    assert len(line) < 500


def test_defaults_that_are_not_supported_are_refused() -> None:
    for keys, problem in (
        ({"model_type": "linear_attn"}, "feature_map=elementwise_product: not supported"),
        ({"model_type": "hgrn2", "hidden_size": 96, "num_heads": 8}, "expand_ratio=128: must divide"),
        ({"model_type": "hgrn2", "expand_ratio": None, "num_heads": 7}, "must divide"),
    ):
        with pytest.raises(ConfigError) as caught:
            from_config_json(keys, HERE)
        assert problem in caught.value.line


LINEAR = LinearAttentionConfig(hidden_size=48, num_heads=4, vocab_size=61, num_layers=2, intermediate_size=40)
HYBRID = AttnConfig(every=2, offset=0, num_heads=4, num_kv_heads=4, head_dim=32, window=1 << 30, rope_theta=1e7)
ROUND_TRIPS: list[LanguageModelConfig] = [
    *(one.mixer.config_class(num_layers=5, attn=HYBRID) for one in OF_FLA.values()),
    Mamba1Config(state_size=5, time_step_rank=7, use_conv_bias=False),
    LINEAR,
    dataclasses.replace(LINEAR, feature_map=LinearFeatureMap.relu, normaliser=True),
    dataclasses.replace(LINEAR, feature_map=LinearFeatureMap.identity, expand_k=0.5, expand_v=2.0),
    *(
        small(kind, **change)
        for kind in ("olmo_hybrid", "qwen3_5_text")
        for change in ({}, {"num_v_heads": None, "attn": {"layers": [0, 2], "every": None}}, {"expand_v": 0.375})
    ),
]


@pytest.mark.parametrize("model", ROUND_TRIPS, ids=lambda model: model.mixer)
def test_configuration_survives_the_round_trip(model: LanguageModelConfig) -> None:
    model = dataclasses.replace(model, name="model")
    record = json.loads(json.dumps(written(model)))
    assert from_config_json(record, HERE).model == model.canonical() == model.canonical().canonical()
    if model.attn is HYBRID:
        own = {"layers": [0, 2, 4], "num_heads": 4, "rope_theta": 1e7}
        assert record["attn"] == {**own, "num_kv_heads": 4, "qkv_bias": False, "window_size": 1 << 30}
        assert model.canonical().attn == AttnConfig(**own, window=1 << 30)


def test_rotated_channels_are_those_of_the_written_factor() -> None:
    for rotated in range(2, 50, 2):
        record = written(small("qwen3_5_text", attn={"head_dim": 49, "rotary_dim": rotated}))
        assert int(49 * record["rope_parameters"]["partial_rotary_factor"]) == rotated


@pytest.mark.slow  # imports fla
def test_fla_reads_every_key_that_an_export_writes() -> None:
    from fla.models import LinearAttentionConfig as FlaConfig

    record = written(dataclasses.replace(LINEAR, normaliser=True))
    assert set(record) - {"architectures", "dtype", "hidden_ratio"} <= FlaConfig().to_dict().keys()
    assert record["norm_feature_map"] is True


def test_no_layers_are_no_hybrid() -> None:
    plain = GLAConfig(name="model")
    record = written(plain)
    assert record["attn"] is None
    assert from_config_json({**record, "attn": {"layers": [], "num_heads": 4}}, HERE).model == plain
    assert dataclasses.replace(plain, attn=AttnConfig(gate=True)).canonical() == plain
    assert _softmax(plain) == {}
    assert "state of one size: no sequence is too long for it" in _memory(plain)


OLMO, QWEN = "olmo_hybrid", "qwen3_5_text"
# A model, the class that is asked for, and the beginning of the line.
NOT_EXPORTED: list[tuple[LanguageModelConfig, str | None, str]] = [
    (GLAConfig(gate_logit_normalizer=8), None, "gate_logit_normalizer=8: fla's GLA has 16 only"),
    (RetNetConfig(hidden_size=1024, num_heads=2), None, "head_k_dim=512: fla's RetNet takes at most 256"),
    (Mamba2Config(intermediate_size=16), None, "intermediate_size=16: transformers' Mamba2 has 0 only"),
    (Mamba2Config(attn=AttnConfig(every=2, num_heads=4)), None, "attn.layers=[1, 3]: transformers' Mamba2 has null"),
    *(
        (GLAConfig(attn=AttnConfig(every=2, **change)), None, f"attn.{line}: ")
        for change, line in [
            ({"qk_norm": True}, "qk_norm=true"),
            ({"rope_theta": None}, "rope_theta=null"),
        ]
    ),
    (small(OLMO, o_norm_eps=None), OLMO, "o_norm_eps=null: "),
    (small(OLMO, zero_centred_norms=True), OLMO, "zero_centred_norms=true: "),
    (small(OLMO, attn={"norm_after": False}), OLMO, "attn.norm_after=false: "),
    (small(OLMO, attn={"every": None}), OLMO, "attn.layers=null: "),
    (small(QWEN, allow_neg_eigval=True), QWEN, "allow_neg_eigval=true: "),
    (small(QWEN, attn={"gate": False}), QWEN, "attn.gate=false: "),
    (small(QWEN, attn={"rope_theta": None, "rotary_dim": None}), QWEN, "attn.rope_theta=null: "),
]


@pytest.mark.parametrize(("model", "kind", "line"), NOT_EXPORTED, ids=[line[:30] for _, _, line in NOT_EXPORTED])
def test_what_a_class_cannot_say_is_not_exported(model: LanguageModelConfig, kind: str | None, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        written(model, kind)
    assert caught.value.line.startswith(f"error: model.{line}")
    assert caught.value.line.endswith("so this model cannot be exported")


def test_a_model_of_no_class_is_refused_with_every_reason() -> None:
    model = small(QWEN, allow_neg_eigval=True)
    with pytest.raises(ConfigError) as caught:
        written(model)
    for reason in ("gated_deltanet: model.zero_centred_norms", "olmo_hybrid: ", "qwen3_5_text: model.allow_neg"):
        assert f"as {reason}" in caught.value.line
    assert "\n" not in caught.value.line
    with pytest.raises(ConfigError, match="model_type=kda: a model with gated_deltanet can be: gated_deltanet, olmo_"):
        written(model, "kda")
    for name in ("based", "rebased", "cosformer"):
        with pytest.raises(ConfigError, match=f"fla has no model with {name}"):
            written(MIXERS[name].config_class())


# Keys that change neither the model's parameters nor its logits: how they are computed, the loss, and other tools'.
HARMLESS = {
    *("attn_mode", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp", "use_cache"),
    *("max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"),
    # Of short convolutions, which are refused.
    "conv_size",
    # Names of weights, of which both are read.
    "fuse_norm",
}
HARMLESS_IN: dict[str, set[str]] = {
    # fla's layer does not read them.
    "gla": {"use_gk", "use_gv"},
    "gsa": {"clamp_min", "clamp_max", "use_norm", "use_output_gate"},
    # Its layers do not read it beside expand_ratio.
    "hgrn2": {"num_heads"},
    # Without parameters in the feature maps that are supported.
    "linear_attn": {"tie_feature_map_qk"},
}


def another(value: Any) -> Any:
    if value is None:
        return 3
    return not value if isinstance(value, bool) else value + "x" if isinstance(value, str) else value * 2


def class_of(form: ModelFormat, suffix: str) -> Any:
    package = importlib.import_module("transformers" if form.library == "transformers" else "fla.models")
    return getattr(package, form.architecture.replace("ForCausalLM", suffix))


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FLA)
def test_every_key_of_fla_is_read_refused_or_known_to_change_nothing(name: str) -> None:
    kind = class_of(FORMATS[name], "Config")
    declared = inspect.signature(kind.__init__).parameters.keys() - {"self", "kwargs"}
    record = {**kind(**NEEDED.get(name, {})).to_dict(), "architectures": [FORMATS[name].architecture]}
    # Of GSA's class, which keeps them under their right names.
    declared -= {"exapnd_k", "exapnd_v"}
    assert declared <= record.keys()
    whole, unread = from_config_json(record, HERE), set()
    for key in sorted(declared):
        with contextlib.suppress(ConfigError):
            if from_config_json({**record, key: another(record[key])}, HERE) == whole:
                unread.add(key)
    assert unread <= HARMLESS | HARMLESS_IN.get(name, set())
