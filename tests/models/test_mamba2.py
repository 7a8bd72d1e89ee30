"""Mamba-2's layer against a reference that goes token by token, its initial values, and blocks without an MLP."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.config import LanguageModelConfig
from models.language_model import LanguageModel
from models.mixers.gla import GLAConfig
from models.mixers.mamba2 import Mamba2, Mamba2Config
from models.modules import RMSNormOfGated
from models.parameters import cast, parameter_rules
from models.spec import ModelSpec, spec_of
from tests.models.test_fla_models import GATED, KDA
from zeco_train.errors import ConfigError
from zeco_train.ops.layer_states import LayerStates, StateInput
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

# No dimension equals another, so that a wrong transposition or reshape cannot pass: H 6, V 8, K 5, G 2.
SMALL = Mamba2Config(
    vocab_size=29,
    hidden_size=24,
    num_layers=2,
    num_heads=6,
    head_dim=8,
    state_size=5,
    n_groups=2,
    conv_kernel=3,
)
TOKENS = 71
# fp64: sums of 71 tokens in another order.
TOLERANCE = 1e-11
# Kept alive here: operators get only a handle of their scan.
SCAN = local_exchange()


def build(config: Mamba2Config = SMALL) -> LanguageModel:
    """A model in fp64 in which every path matters."""
    model = ModelSpec(config).build().double()
    model.init_weights(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 if parameter.ndim == 1 else 10
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def reference(layer: Mamba2, x: Tensor) -> Tensor:
    """The layer token by token and head by head, from its parameters."""
    config, p = layer.config, dict(layer.named_parameters())
    inner, group = config.inner_dim, config.n_groups * config.state_size
    z, u, logits = (x @ p["in_proj.weight"].T).split((inner, config.conv_dim, config.num_heads), dim=-1)
    state = x.new_zeros(len(x), config.num_heads, config.state_size, config.head_dim)
    found = []
    for t in range(x.shape[1]):
        y = p.get("conv1d.bias", x.new_zeros(config.conv_dim))
        for lag in range(min(config.conv_kernel, t + 1)):
            y = y + p["conv1d.weight"][:, 0, config.conv_kernel - 1 - lag] * u[:, t - lag]
        values, keys, queries = F.silu(y).split((inner, group, group), dim=-1)
        steps = F.softplus(logits[:, t] + p["decay.dt_bias"]).clamp(*config.time_step_limit)
        heads, states = [], []
        for head in range(config.num_heads):
            first = head // (config.num_heads // config.n_groups) * config.state_size
            k, q = (tensor[:, first : first + config.state_size] for tensor in (keys, queries))
            v = values[:, head * config.head_dim : (head + 1) * config.head_dim]
            step = steps[:, head, None]
            decay = torch.exp(-torch.exp(p["decay.A_log"][head]) * step)[..., None]
            states.append(decay * state[:, head] + k[..., None] * (step * v)[:, None])
            heads.append((q[..., None] * states[-1]).sum(1) + p["decay.D"][head] * v)
        state = torch.stack(states, 1)
        gated = (torch.cat(heads, -1) * F.silu(z[:, t])).unflatten(-1, (config.n_groups, -1))
        normed = gated / (gated.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
        found.append((normed.flatten(-2) * p["norm.weight"]) @ p["out_proj.weight"].T)
    return torch.stack(found, 1)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "changes",
    [{}, {"time_step_limit": (0.3, 0.9), "use_conv_bias": False}, {"n_groups": 1}, {"n_groups": 6}],
    ids=["two groups", "clamped, no bias", "one group", "a group a head"],
)
def test_layer_and_all_gradients_equal_the_reference(changes: dict[str, object]) -> None:
    layer = build(dataclasses.replace(SMALL, **changes)).model.blocks()[0].attn  # type: ignore[arg-type]
    assert isinstance(layer, Mamba2)
    generator = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(2, TOKENS, SMALL.hidden_size, dtype=torch.float64, generator=generator) for _ in range(2))
    place, found = SequencePosition((0, TOKENS), exchange=SCAN).on(x), []
    for is_reference in (False, True):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = reference(layer, leaf) if is_reference else layer(leaf, place, (StateInput(),) * 2, layer.decay())[0]
        y.backward(dy)
        grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
        found.append({"y": y.detach(), "x": leaf.grad, **grads})
    for name, expected in found[1].items():
        ours = found[0][name]
        assert ours is not None
        assert expected is not None
        assert (ours - expected).norm() <= TOLERANCE * expected.norm(), name


def test_documents_are_separate_sequences() -> None:
    model = build()
    ids = torch.randint(SMALL.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(3))
    borders = [0, 1, 3, 40, TOKENS]
    together = model(ids, SequencePosition((0, TOKENS), documents=[torch.tensor(borders)], exchange=SCAN))
    alone = [model(ids[:, a:b], SequencePosition((0, b - a), exchange=SCAN)) for a, b in itertools.pairwise(borders)]
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [1, 2, 64])
def test_steps_continue_a_prompt_of_any_length(prompt: int) -> None:
    """Including a prompt shorter than the convolution."""
    model = build(dataclasses.replace(SMALL, time_step_limit=(0.1, 2.0)))
    ids = torch.randint(SMALL.vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(ids, SequencePosition((0, TOKENS), exchange=SCAN))
        states = LayerStates(carry_in=model.zero_states(2, ids.device), want_carry=True)
        logits = [model(ids[:, :prompt], SequencePosition((0, prompt), exchange=SCAN), states=states)]
        for position in range(prompt, TOKENS):
            positions = torch.full((2,), position)
            logits.append(model.step(ids[:, position], states.carry_out, positions)[:, None])
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-10, atol=1e-10)


def test_norm_in_bf16_is_the_exact_one_rounded_once() -> None:
    norm, generator = RMSNormOfGated(12, 3, 1e-5), torch.Generator().manual_seed(0)
    x, gate = (torch.randn(5, 12, generator=generator) for _ in range(2))
    with torch.no_grad():
        norm.weight += 0.1 * torch.randn(12, generator=generator)
    x, gate, weight = x.bfloat16(), gate.bfloat16(), norm.weight.bfloat16()
    u = (x.double() * F.silu(gate.double())).unflatten(-1, (3, 4))
    exact = (u / (u.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2) * weight.double()
    error = (norm.bfloat16()(x, gate).double() - exact).abs() / exact.abs()
    # Half a unit in the last of 8 bits, and fp32's errors.
    assert error.max() <= 2**-8 * 1.001


def test_initial_values_are_those_of_the_paper() -> None:
    config = dataclasses.replace(SMALL, hidden_size=512, num_heads=128, num_layers=1, n_groups=1)
    model = ModelSpec(config).build()
    model.init_weights(0)
    layer = model.model.blocks()[0].attn
    assert isinstance(layer, Mamba2)
    a, steps = layer.decay.A_log.exp(), F.softplus(layer.decay.dt_bias)
    assert 1 <= a.min() < 2
    assert 15 < a.max() <= 16.001
    assert 0.00099 < steps.min() < 0.0015
    assert 0.07 < steps.max() < 0.1001
    # Logarithms are uniform: the median is the geometric mean of the ends.
    assert 0.005 < steps.median() < 0.02
    assert (layer.decay.D == 1).all()
    for parameter in (layer.conv1d.weight, layer.conv1d.bias):
        assert parameter is not None
        assert 0.95 < parameter.abs().max() * math.sqrt(config.conv_kernel) <= 1
    again = ModelSpec(config).build().double()
    again.init_weights(0)
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name).float(), parameter), name


@pytest.mark.parametrize(("config", "own"), [(SMALL, {"D"}), (GATED, set()), (KDA, set())])
def test_wide_parameters_have_no_weight_decay_and_stay_fp32(config: LanguageModelConfig, own: set[str]) -> None:
    model = ModelSpec(config).build()
    rules = {name: rule for name, _, rule in parameter_rules(model)}
    wide = {name for name, rule in rules.items() if rule.wide}
    assert wide == {f"model.layers.{n}.attn.decay.{name}" for n in range(2) for name in ("A_log", "dt_bias", *own)}
    assert not any(rules[name].decays for name in wide)
    for dtype, of_wide in ((torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2):
        cast(model, dtype)
        assert all(p.dtype is (of_wide if name in wide else dtype) for name, p in model.named_parameters())


@pytest.mark.parametrize("wide", [False, True])
def test_residual_stream_is_fp32_if_configured(wide: bool) -> None:
    model = build(dataclasses.replace(SMALL, residual_in_fp32=wide))
    cast(model, torch.bfloat16)
    seen = []
    for layer in model.model.blocks():
        layer.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0].dtype, output[0].dtype)))
    logits = model(torch.zeros(1, 9, dtype=torch.int64), SequencePosition((0, 9), exchange=SCAN))
    residual = torch.float32 if wide else torch.bfloat16
    assert seen == [(residual, residual)] * 2
    assert logits.dtype is torch.bfloat16


def test_block_without_mlp_has_no_parameters_and_no_flops_of_one() -> None:
    (with_mlp,), (without,) = (
        spec_of(dataclasses.replace(SMALL, intermediate_size=size)).blocks.values() for size in (40, 0)
    )
    assert without.mlp_products == []
    assert without.mixer_products == with_mlp.mixer_products == [[(24, 48), (24, 68), (24, 6)], [(48, 24)]]
    assert sum(map(math.prod, with_mlp.parameters)) - sum(map(math.prod, without.parameters)) == 24 * (3 * 40 + 1)
    with pytest.raises(ConfigError, match="intermediate_size=0"):
        GLAConfig(intermediate_size=0)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("head_dim", 7, "times num_heads=6 must equal expand · hidden_size = 48"),
        ("n_groups", 4, "must divide num_heads=6: 1, 2, 3, 6"),
        ("conv_kernel", 1, "must be a whole number ≥ 2"),
        ("time_step_min", 0.5, "must be ≤ time_step_max=0.1"),
        ("time_step_limit", (0.5, 0.5), "0 ≤ least < most"),
        ("time_step_limit", (-1.0, 1.0), "0 ≤ least < most"),
        ("time_step_limit", (0.0, math.nan), "0 ≤ least < most"),
        ("time_step_limit", (0.0, 1.0, 2.0), "must be [least, most]"),
        ("intermediate_size", -1, "must be a whole number ≥ 1"),
    ],
    ids=lambda value: f"{value!s:.20}",
)
def test_values_out_of_range_are_refused(key: str, value: object, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(SMALL, **{key: value})  # type: ignore[arg-type]
    assert f"model.{key}=" in error.value.line
    assert problem in error.value.line
