"""DeltaNet, Gated DeltaNet and KDA: layers against a plain reference in fp64, initial values."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.config import LanguageModelConfig
from models.decays import step_log_decays
from models.language_model import LanguageModel
from models.mixers.delta_net import DeltaMixer
from models.modules import l2_normalised
from models.spec import ModelSpec
from tests.models.test_fla_models import DELTA, GATED, KDA, SMALL
from zeco_train.errors import ConfigError
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

# Of `SMALL`: K 5, V 10, G 3, H 6.
TOKENS = 71
# fp64: sums of 71 tokens in another order.
TOLERANCE = 1e-11
# Kept alive here: operators get only a handle of their scan.
SCAN = local_exchange()


def build(config: LanguageModelConfig) -> LanguageModel:
    """A model in fp64 in which every path matters."""
    model = ModelSpec(config).build().double()
    model.init_weights(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 if parameter.ndim == 1 else 10
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def reference(layer: DeltaMixer, x: Tensor) -> Tensor:
    """The layer token by token and head by head, from its parameters."""
    config, heads, p = layer.config, layer.heads, dict(layer.named_parameters())

    def convolved(name: str) -> Tensor:
        inputs, weight = x @ p[f"{name}_proj.weight"].T, p[f"{name}_conv1d.weight"][:, 0]
        padded = F.pad(inputs, (0, 0, config.conv_size - 1, 0))
        y = sum(padded[:, i : i + TOKENS] * weight[:, i] for i in range(config.conv_size))
        return F.silu(y)  # type: ignore[arg-type]

    q, k, v = map(convolved, "qkv")
    strengths = torch.sigmoid(x @ p["b_proj.weight"].T) * (2 if config.allow_neg_eigval else 1)
    decays = x.new_ones(*x.shape[:2], heads.values, 1)
    if "a_proj.weight" in p:
        steps = torch.log1p(torch.exp(x @ p["a_proj.weight"].T + p["decay.dt_bias"]))
        decays = torch.exp(-torch.exp(p["decay.A_log"]) * steps)[..., None]
    elif "f_proj.0.weight" in p:
        logits = x @ p["f_proj.0.weight"].T @ p["f_proj.1.weight"].T + p["decay.dt_bias"]
        rates = torch.exp(p["decay.A_log"])[:, None]
        decays = torch.exp(-rates * torch.log1p(torch.exp(logits)).unflatten(-1, (heads.values, -1)))
    outputs = []
    for head in range(heads.values):
        at = head // (heads.values // heads.keys) * heads.key_dim
        own_q, own_k = (y[..., at : at + heads.key_dim] for y in (q, k))
        own_q, own_k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (own_q, own_k))
        own_v = v[..., head * heads.value_dim : (head + 1) * heads.value_dim]
        state, o = x.new_zeros(len(x), heads.key_dim, heads.value_dim), []
        for t in range(TOKENS):
            state = decays[:, t, head, :, None] * state
            held = (own_k[:, t, :, None] * state).sum(1)
            change = strengths[:, t, head, None] * (own_v[:, t] - held)
            state = state + own_k[:, t, :, None] * change[:, None]
            o.append((own_q[:, t, :, None] * state).sum(1) / heads.key_dim**0.5)
        found = torch.stack(o, 1)
        outputs.append(found / (found.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * p["o_norm.weight"])
    o = torch.cat(outputs, -1)
    if "g_proj.0.weight" in p:
        o = o * torch.sigmoid(x @ p["g_proj.0.weight"].T @ p["g_proj.1.weight"].T + p["g_proj.1.bias"])
    elif "g_proj.weight" in p:
        o = o * F.silu(x @ p["g_proj.weight"].T)
    return o @ p["o_proj.weight"].T


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [*SMALL][5:])
def test_layer_and_all_gradients_equal_the_reference(name: str) -> None:
    layer = build(SMALL[name]).model.blocks()[0].attn
    assert isinstance(layer, DeltaMixer)
    generator = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(2, TOKENS, 24, dtype=torch.float64, generator=generator) for _ in range(2))
    place, found = SequencePosition((0, TOKENS), exchange=SCAN).on(x), []
    for is_reference in (False, True):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        shared = layer.wide_parameters() if layer.wide_parameters is not None else None
        y = reference(layer, leaf) if is_reference else layer(leaf, place, (StateInput(),) * 2, shared)[0]
        y.backward(dy)
        grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
        found.append({"y": y.detach(), "x": leaf.grad, **grads})
    for what, expected in found[1].items():
        ours = found[0][what]
        assert ours is not None
        assert expected is not None
        assert (ours - expected).norm() <= TOLERANCE * expected.norm(), what


@pytest.mark.parametrize("channels", [1, 5])
def test_log_decays_and_gradients_equal_plain_operations(channels: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 7, 3 * channels, generator=generator, dtype=torch.float64, requires_grad=True)
    parameters = torch.randn(3 + 3 * channels, generator=generator, dtype=torch.float64, requires_grad=True)
    found = step_log_decays(logits, parameters, 3)
    steps = F.softplus(logits + parameters[3:])
    plain = -parameters[:3].exp().repeat_interleave(channels) * steps
    plain = plain if channels == 1 else plain.unflatten(-1, (3, channels))
    weights = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(found, plain, rtol=1e-13, atol=0)
    for ours, theirs in zip(
        *(torch.autograd.grad(g, (logits, parameters), weights) for g in (found, plain)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_normalised_vectors_and_their_gradients_equal_plain_operations() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, 5, generator=generator, dtype=torch.float64)
    x[0] *= 1e-3  # so that eps matters
    x.requires_grad_()
    found, plain = l2_normalised(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    weights = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(found, plain, rtol=1e-13, atol=0)
    (ours,), (theirs,) = (torch.autograd.grad(y, x, weights) for y in (found, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    bf16 = l2_normalised(x.detach().bfloat16())
    assert bf16.dtype is torch.bfloat16


# Parameters


@pytest.mark.parametrize(("config", "least"), [(GATED, 0.0), (KDA, 1.0)])
def test_initial_values_are_those_of_fla(config: LanguageModelConfig, least: float) -> None:
    # fla's model has 128 decays a layer, or 128 · 16.
    config = dataclasses.replace(config, hidden_size=64, num_heads=64, num_v_heads=128, head_dim=16, num_layers=1)  # type: ignore[call-arg]
    model = ModelSpec(config).build()
    model.init_weights(0)
    layer = model.model.blocks()[0].attn
    rates, steps = layer.decay.A_log.exp(), F.softplus(layer.decay.dt_bias)
    assert least <= rates.min() < least + 1
    assert 15 < rates.max() <= 16.001
    assert 0.00099 < steps.min() < 0.0015
    assert 0.07 < steps.max() < 0.1001
    # Logarithms are uniform: the median is the geometric mean of the ends.
    assert 0.005 < steps.median() < 0.02
    for convolution in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d):
        assert convolution.bias is None
        assert 0.018 < convolution.weight.std() < 0.022


@pytest.mark.parametrize(
    ("config", "key", "value", "problem"),
    [
        (GATED, "num_v_heads", 4, "must be a multiple of num_heads=3"),
        (KDA, "num_v_heads", 0, "must be a multiple of num_heads=3"),
        (GATED, "expand_v", 0.5, "times head_dim=5 must be a whole number; nearest: 0.4"),
        (KDA, "head_dim", 0, "must be a whole number ≥ 1"),
        (DELTA, "conv_size", 1, "must be a whole number ≥ 2"),
        (GATED, "conv_size", 1, "must be a whole number ≥ 2"),
        (DELTA, "num_heads", 7, "must divide"),
    ],
    ids=lambda value: f"{value!s:.20}",
)
def test_values_out_of_range_are_refused(config: Any, key: str, value: object, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(config, **{key: value})
    assert f"model.{key}=" in error.value.line
    assert problem in error.value.line
