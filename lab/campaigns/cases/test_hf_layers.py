"""Layers of linear attention against fla's, with fla's names: parameters and outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.mixer_registry import MIXERS
from models.mixers.based import BasedConfig
from models.mixers.linear import LinearAttentionConfig, LinearFeatureMap
from models.mixers.rebased import RebasedConfig
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange

# tests/models/test_layers.py has formulas of these layers.
pytestmark = [pytest.mark.campaign, pytest.mark.numeric]

WIDTH, HEADS, TOKENS = 48, 4, 40
SHAPE: dict[str, Any] = {"hidden_size": WIDTH, "num_heads": HEADS, "vocab_size": 61, "num_layers": 2}
LINEAR = LinearAttentionConfig(**SHAPE, name="model", intermediate_size=40)
VARIANTS: list[dict[str, Any]] = [
    {},
    {"feature_map": LinearFeatureMap.relu, "normaliser": True},
    {"feature_map": LinearFeatureMap.identity, "expand_k": 0.5, "expand_v": 2.0},
]


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
