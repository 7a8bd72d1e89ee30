"""Layers of linear attention against fla's, with fla's names: configuration, parameters, outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.mixer_registry import MIXERS
from models.mixers.based import BasedConfig
from models.mixers.linear import LinearAttentionConfig, LinearFeatureMap
from models.mixers.rebased import RebasedConfig
from zeco_train.errors import ConfigError
from zeco_train.hf.config_json import from_config_json, to_config_json
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

HERE = Path("model")
WIDTH, HEADS, TOKENS = 48, 4, 40
SHAPE: dict[str, Any] = {"hidden_size": WIDTH, "num_heads": HEADS, "vocab_size": 61, "num_layers": 2}
LINEAR = LinearAttentionConfig(**SHAPE, name="model", intermediate_size=40)
TOKENIZER: Any = SimpleNamespace(eos_id=2)
VARIANTS: list[dict[str, Any]] = [
    {},
    {"feature_map": LinearFeatureMap.relu, "normaliser": True},
    {"feature_map": LinearFeatureMap.identity, "expand_k": 0.5, "expand_v": 2.0},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: ",".join(variant) or "plain")
def test_configuration_survives_the_round_trip(variant: dict[str, Any]) -> None:
    model = dataclasses.replace(LINEAR, **variant)
    record = to_config_json(model, TOKENIZER, None, 128, "float32")
    assert (record["model_type"], record["norm_feature_map"]) == ("linear_attn", model.normaliser)
    assert "normaliser" not in record
    assert from_config_json(record, HERE).model == model


def test_fla_reads_every_key_that_an_export_writes() -> None:
    from fla.models import LinearAttentionConfig as FlaConfig

    record = to_config_json(LINEAR, TOKENIZER, None, 128, "float32")
    theirs = FlaConfig().to_dict()
    assert set(record) - {"architectures", "dtype", "hidden_ratio"} <= theirs.keys()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"feature_map": "dpfp"}, "feature_map=dpfp: not supported, only elu, relu, identity"),
        ({"feature_map": None}, "feature_map=None: not supported, only elu, relu, identity"),
        ({"norm_q": True}, "norm_q=True: queries divided by their sum"),
        ({"norm_k": True}, "norm_k=True: keys divided by their sum"),
        ({"num_kv_heads": 2}, "num_kv_heads=2: shared heads of keys and values"),
        ({"norm_feature_map": 1}, "norm_feature_map=1: must be true or false"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_other_settings_of_fla_are_refused_by_name(change: dict[str, Any], problem: str) -> None:
    record = to_config_json(LINEAR, TOKENIZER, None, 128, "float32") | change
    with pytest.raises(ConfigError) as error:
        from_config_json(record, HERE)
    assert problem in error.value.line


def test_missing_feature_map_means_that_of_fla_and_is_refused() -> None:
    record = to_config_json(LINEAR, TOKENIZER, None, 128, "float32")
    del record["feature_map"]
    with pytest.raises(ConfigError, match="feature_map=elementwise_product: not supported"):
        from_config_json(record, HERE)


@pytest.mark.parametrize("name", ["based", "rebased", "cosformer"])
def test_models_that_fla_lacks_are_not_exported(name: str) -> None:
    with pytest.raises(ConfigError, match=f"fla has no model with {name}"):
        to_config_json(MIXERS[name].config_class(), TOKENIZER, None, 128, "float32")


def _compare(config: Any, theirs: nn.Module, call: Callable[[Tensor], Tensor]) -> float:
    """Relative difference of our layer, with the parameters of `theirs` by name, from `call`, in fp64."""
    theirs = theirs.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    ours = MIXERS[config.mixer](config, 0).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    scan = local_exchange()
    with torch.no_grad():
        y, _ = ours(x, SequencePosition((0, TOKENS), exchange=scan).on(x), (StateInput(),), None)
        expected = call(x)
    return ((y - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: ",".join(variant) or "plain")
def test_linear_attention_equals_the_layer_of_fla(variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are replaced by its recurrence, which is fp32."""
    import fla.layers.linear_attn as fla_layer
    import fla.modules.norm.layernorm as fla_norm
    from fla.ops.linear_attn.naive import naive_recurrent_linear_attn

    def operator(q: Tensor, k: Tensor, v: Tensor, normalize: bool, **_: Any) -> Any:
        return naive_recurrent_linear_attn(q, k, v, normalize=normalize)

    def norm(x: Tensor, weight: Tensor, bias: None, eps: float, **_: Any) -> Tensor:
        return fla_norm.rms_norm_ref(x, weight, bias, eps=eps).to(x.dtype)

    monkeypatch.setattr(fla_layer, "fused_recurrent_linear_attn", operator)
    monkeypatch.setattr(fla_norm, "rms_norm", norm)
    config = dataclasses.replace(LINEAR, **variant)
    theirs = fla_layer.LinearAttention(
        hidden_size=WIDTH,
        expand_k=config.expand_k,
        expand_v=config.expand_v,
        num_heads=HEADS,
        feature_map=config.feature_map.value,
        do_feature_map_norm=config.normaliser,
        norm_eps=config.norm_eps,
    )
    # fla's recurrence and norm compute in fp32.
    assert _compare(config, theirs, lambda x: theirs(x)[0]) < 1e-5


@pytest.mark.parametrize("symmetric", [False, True])
def test_based_equals_the_layer_of_fla(symmetric: bool) -> None:
    from fla.layers.based import BasedLinearAttention

    config = BasedConfig(**SHAPE, feature_dim=6, symmetric=symmetric)
    theirs = BasedLinearAttention(WIDTH, feature_dim=6, num_key_value_heads=HEADS, num_heads=HEADS)
    # fla adds 1e-12 to the normaliser here.
    assert _compare(config, theirs, theirs.forward_reference) < 1e-10


@pytest.mark.parametrize("symmetric", [False, True])
def test_rebased_equals_the_layer_of_fla(symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import fla.modules.feature_map as fla_maps
    from fla.layers.rebased import ReBasedLinearAttention

    monkeypatch.setattr(fla_maps, "layer_norm", lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5))
    config = RebasedConfig(**SHAPE, feature_dim=6, symmetric=symmetric)
    theirs = ReBasedLinearAttention(WIDTH, feature_dim=6, num_key_value_heads=HEADS, num_heads=HEADS, eps=0.0)
    assert _compare(config, theirs, theirs.forward_reference) < 1e-10
