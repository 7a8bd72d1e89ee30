"""The layer of every mixer against a plain reference in fp64: outputs, gradients, shards, steps, documents, bf16."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.config import LanguageModelConfig
from models.mixer_registry import MIXERS
from models.mixers.base import Mixer
from models.mixers.based import BasedConfig
from models.mixers.cosformer import CosformerConfig
from models.mixers.gla import FeatureMap, GLAConfig
from models.mixers.hgrn import HGRNConfig
from models.mixers.hgrn2 import HGRN2Config
from models.mixers.lightning import LightningConfig
from models.mixers.linear import LinearAttentionConfig, LinearFeatureMap
from models.mixers.mamba1 import Mamba1Config
from models.mixers.mamba2 import Mamba2Config
from models.mixers.rebased import RebasedConfig
from models.mixers.retnet import RetNetConfig
from models.parameters import cast
from tests.models.test_fla_models import SMALL as OF_FLA
from zeco_train.errors import ConfigError
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

BATCH, TOKENS, BORDER = 2, 71, 31
# Of three layers.
LAYER = 1
# fp64: sums of 71 tokens in another order, and divisions by sums of weights.
TOLERANCE = 1e-11
# Kept alive here: operators get only a handle of their scan.
SCAN = local_exchange()

# No width equals another, so that a wrong transposition or reshape cannot pass. Five heads: no power of two.
FIVE: dict[str, Any] = {"hidden_size": 20, "num_heads": 5, "num_layers": 3, "norm_eps": 1e-3}
RETNET = RetNetConfig(**FIVE, expand_k=1.5, expand_v=1.75)
LIGHTNING = LightningConfig(**FIVE, expand_k=1.5, expand_v=1.75)
THREE: dict[str, Any] = {"hidden_size": 24, "num_heads": 3, "num_layers": 3}
LINEAR = LinearAttentionConfig(**THREE, expand_k=0.5, expand_v=1.25)
GLA = GLAConfig(**THREE, norm_eps=1e-3, expand_v=1.25, gate_low_rank_dim=5, gate_logit_normalizer=2)
# Six query heads, two key heads; many decays lie below the clamp.
GROUPED = dataclasses.replace(GLA, num_heads=6, num_kv_heads=2)
# H 6, V 8, K 5, G 2.
MAMBA2 = Mamba2Config(hidden_size=24, num_layers=3, num_heads=6, head_dim=8, state_size=5, n_groups=2, conv_kernel=3)
# H 48, K 5, R 7.
MAMBA1 = Mamba1Config(hidden_size=24, num_layers=3, state_size=5, conv_kernel=3, time_step_rank=7)
CASES: dict[str, LanguageModelConfig] = {
    "gla": GLA,
    "gla, groups": GROUPED,
    "gla, clamped": dataclasses.replace(GLA, clamp_min=-0.3),
    "gla, no gate": dataclasses.replace(GLA, use_output_gate=False),
    **{f"gla, {map_.value}": dataclasses.replace(GLA, feature_map=map_) for map_ in FeatureMap},
    "gla, groups, clamped, no gate": dataclasses.replace(GROUPED, clamp_min=-0.3, use_output_gate=False),
    "retnet": RETNET,
    "retnet without positions": dataclasses.replace(RETNET, rope_theta=None),
    "lightning": LIGHTNING,
    "lightning with positions": dataclasses.replace(LIGHTNING, rope_theta=100.0),
    "hgrn": HGRNConfig(hidden_size=20, num_layers=3, expand_ratio=3, norm_eps=1e-3),
    "hgrn2": HGRN2Config(**FIVE),
    **{f"linear {map_.value}": dataclasses.replace(LINEAR, feature_map=map_) for map_ in LinearFeatureMap},
    "linear normalised": dataclasses.replace(LINEAR, normaliser=True),
    "linear relu normalised": dataclasses.replace(LINEAR, feature_map=LinearFeatureMap.relu, normaliser=True),
    "based": BasedConfig(**THREE, feature_dim=5, symmetric=False),
    "based symmetric": BasedConfig(**THREE, feature_dim=5),
    "rebased": RebasedConfig(**THREE, feature_dim=5, symmetric=False),
    "rebased symmetric": RebasedConfig(**THREE, feature_dim=5),
    "cosformer": CosformerConfig(**THREE, max_document=2000),
    **{key: each for key, each in OF_FLA.items() if each.mixer in ("delta_net", "gated_deltanet", "kda", "gsa")},
    "mamba1": MAMBA1,
    "mamba1, no bias": dataclasses.replace(MAMBA1, use_conv_bias=False, time_step_rank=None),
    "mamba2": MAMBA2,
    "mamba2, clamped, no bias": dataclasses.replace(MAMBA2, time_step_limit=(0.3, 0.9), use_conv_bias=False),
    "mamba2, one group": dataclasses.replace(MAMBA2, n_groups=1),
}
# Of the fast set; in turn of the slow one; the others are of a campaign.
QUICK = ["gla", "retnet", "lightning with positions", "hgrn", "hgrn2", "linear relu normalised", "rebased symmetric"]
QUICK += ["cosformer", "gated_deltanet, no gate, negative eigenvalues", "kda", "mamba1", "gsa, groups, relu"]
SLOW = ["gla, groups, clamped, no gate", "linear elu", "based symmetric", "delta_net, gate, negative eigenvalues"]
SLOW += ["mamba2, clamped, no bias"]


def cases(quick: Sequence[str] = QUICK, slow: Sequence[str] = SLOW) -> list[Any]:
    others = {name: pytest.mark.slow if name in slow else pytest.mark.campaign for name in CASES if name not in quick}
    return [name if name in quick else pytest.param(name, marks=others[name]) for name in CASES]


Parameters = Mapping[str, Tensor]


def build(config: LanguageModelConfig) -> tuple[Mixer, Tensor, Tensor | None]:
    """A layer in the middle of a model with large random weights, tokens, and the parameter that all layers share."""
    generator = torch.Generator().manual_seed(1)
    mixer = MIXERS[config.mixer](config, LAYER).double()

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(0.4 * random(*parameter.shape) + (1 if parameter.ndim == 1 else 0))
    x = random(BATCH, TOKENS, config.hidden_size).requires_grad_()
    return mixer, x, None if mixer.shared is None else random(*mixer.shared.shape(config)).requires_grad_()


def shared_part(mixer: Mixer, bounds: Tensor | None) -> Tensor | None:
    if mixer.shared is not None:
        assert bounds is not None
        return mixer.shared.parts(bounds)[LAYER]
    return None if mixer.wide_parameters is None else mixer.wide_parameters()


def run(
    mixer: Mixer,
    x: Tensor,
    bounds: Tensor | None = None,
    *,
    offset: int = 0,
    carries: Sequence[Tensor] | None = None,
    documents: Sequence[int] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Outputs of tokens from `offset` on, and the states after them."""
    borders = None if documents is None else [documents]
    position = SequencePosition((offset, offset + x.shape[1]), documents=borders, exchange=SCAN)
    position = position.on(x, with_positions=mixer.reads_positions)
    before = [None] * len(mixer.operators) if carries is None else carries
    inputs = tuple(StateInput(None, carry, True) for carry in before)
    shared = shared_part(mixer, bounds)
    narrow = None if shared is None or x.dtype == torch.float64 else shared.float()
    y, outputs = mixer(x, position, inputs, shared if narrow is None else narrow)
    return y, [output.carry_out for output in outputs]


def assert_close(found: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    error = (found - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"{what} is off by {error:.1e}"


# References


def heads_of(x: Tensor, config: LanguageModelConfig) -> Tensor:
    """[…, T, H · size] → […, H, T, size]."""
    return x.unflatten(-1, (config.num_heads, -1)).transpose(-3, -2)


def reference_norm(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) * weight


def reference_rotation(x: Tensor, theta: float | None) -> Tensor:
    """Rotate […, T, K]: channels j and j + K/2 are the real and the imaginary part of a complex number."""
    if theta is None:
        return x
    tokens, size = x.shape[-2:]
    channels = torch.arange(size // 2, dtype=torch.float64)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * theta ** (-2 * channels / size)
    turned = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * torch.exp(1j * angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def fixed_decays(x: Tensor, p: Parameters, config: Any, bound: Tensor | None) -> Tensor:
    """o_t = Σ_{s ≤ t} decay^(t − s) (q_t · k_s) v_s."""
    is_retnet = config.mixer == "retnet"
    q, k, v = (heads_of(x @ p[f"{name}_proj.weight"].T, config) for name in "qkv")
    if not is_retnet:
        q, k, v = map(F.silu, (q, k, v))
    decays = [1 - 2 ** (-5 - head) for head in range(config.num_heads)]
    if not is_retnet:
        # Five heads: the slopes of four, and the first of eight.
        decays = [math.exp(-(2**-e) * (1 - LAYER / 2 + 1e-5)) for e in (2, 4, 6, 8, 1)]
    q, k = (reference_rotation(tensor, config.rope_theta) for tensor in (q, k))
    distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    weights = torch.tensor(decays, dtype=torch.float64)[:, None, None] ** distance.clamp(min=0) * (distance >= 0)
    o = ((weights * (q @ k.mT)) @ v).transpose(1, 2) / (math.sqrt(config.head_k_dim) if is_retnet else 1)
    gate = x @ p["g_proj.weight"].T
    if is_retnet:
        normed = reference_norm(o, p["g_norm_swish_gate.weight"], config.norm_eps).flatten(2) * F.silu(gate)
    else:
        normed = reference_norm(o.flatten(2), p["g_norm.weight"], config.norm_eps) * gate.sigmoid()
    return normed @ p["o_proj.weight"].T


def gla(x: Tensor, p: Parameters, config: Any, bound: Tensor | None) -> Tensor:
    """Token by token, as the paper writes it."""
    maps = {None: lambda x: x, "relu": F.relu, "sqrelu": lambda x: F.relu(x) ** 2, "silu": F.silu, "sigmoid": F.sigmoid}
    logits = x @ p["gk_proj.0.weight"].T @ p["gk_proj.1.weight"].T + p["gk_proj.1.bias"]
    decay = (1 / (1 + torch.exp(-logits))) ** (1 / config.gate_logit_normalizer)
    decay = decay if config.clamp_min is None else decay.clamp(min=math.exp(config.clamp_min))
    q, k, v = (x @ p[f"{name}_proj.weight"].T for name in "qkv")
    q, k = map(maps[config.feature_map and config.feature_map.value], (q, k))
    heads = config.num_kv_heads or config.num_heads
    k, v, decay = (y.unflatten(-1, (heads, -1)).repeat_interleave(config.num_heads // heads, 2) for y in (k, v, decay))
    by_token = (y.unbind(1) for y in (q.unflatten(-1, (config.num_heads, -1)), k, v, decay))
    state, outputs = torch.zeros((), dtype=x.dtype), []
    for q_t, k_t, v_t, decay_t in zip(*by_token, strict=True):
        state = decay_t[..., None] * state + k_t[..., None] * v_t[..., None, :]
        outputs.append((q_t[..., None, :] @ state).squeeze(-2) / math.sqrt(config.head_k_dim))
    o, name = torch.stack(outputs, 1), "g_norm_swish_gate" if config.use_output_gate else "g_norm"
    o = reference_norm(o, p[f"{name}.weight"], config.norm_eps).flatten(2)
    return (o * F.silu(x @ p["g_proj.weight"].T) if config.use_output_gate else o) @ p["o_proj.weight"].T


def gsa(x: Tensor, p: Parameters, config: Any, bound: Tensor | None) -> Tensor:
    """Token by token, as the paper writes it: slots of keys and of values, both of which forget."""
    forget = (1 / (1 + torch.exp(-(x @ p["f_proj.weight"].T)))) ** (1 / config.gate_logit_normalizer)
    q, k, v = (x @ p[f"{name}_proj.weight"].T for name in "qkv")
    q, k = (F.relu(y) if config.feature_map is FeatureMap.relu else y * torch.sigmoid(y) for y in (q, k))
    heads = config.num_kv_heads or config.num_heads
    k, v, forget = (
        y.unflatten(-1, (heads, -1)).repeat_interleave(config.num_heads // heads, 2)
        for y in (k, v * torch.sigmoid(v), forget)
    )
    keys, values, outputs = torch.zeros((), dtype=x.dtype), torch.zeros((), dtype=x.dtype), []
    by_token = (y.unbind(1) for y in (q.unflatten(-1, (config.num_heads, -1)), k, v, forget[..., None]))
    for q_t, k_t, v_t, f_t in zip(*by_token, strict=True):
        keys, values = (f_t * slots + (1 - f_t) * y[..., None, :] for slots, y in ((keys, k_t), (values, v_t)))
        weights = torch.exp((keys * q_t[..., None, :]).sum(-1, keepdim=True))
        outputs.append((weights * values).sum(-2) / weights.sum(-2))
    o = torch.stack(outputs, 1).flatten(2)
    # The format's own eps, whatever the configuration's.
    return reference_norm(o * torch.sigmoid(o), p["g_norm.weight"], 1e-5) @ p["o_proj.weight"].T


def forget_gates(x: Tensor, p: Parameters, config: Any, bound: Tensor | None) -> Tensor:
    """HGRN and HGRN2, token by token."""
    assert bound is not None
    # The lower bound in layer 1: the second term of the softmax over layers.
    bound = torch.exp(bound[LAYER]) / torch.exp(bound).sum(0)
    forget = bound + (1 - bound) / (1 + torch.exp(-(x @ p["f_proj.weight"].T)))
    written = x @ p["i_proj.weight"].T
    state, outputs = x.new_zeros(()), []
    if config.mixer == "hgrn":
        written = F.silu(written) * (1 - forget)
        for f, w in zip(forget.unbind(1), written.unbind(1), strict=True):
            state = f * state + w
            outputs.append(state)
        normed = reference_norm(torch.stack(outputs, 1), p["g_norm.weight"], config.norm_eps)
        return (normed * F.silu(x @ p["g_proj.weight"].T)) @ p["o_proj.weight"].T
    q = F.silu(x @ p["q_proj.weight"].T)
    for q_t, f, w in zip(*(heads_of(tensor, config).unbind(2) for tensor in (q, forget, written)), strict=True):
        state = f[..., None] * state + (1 - f)[..., None] * w[..., None, :]
        outputs.append((q_t[..., None, :] @ state).flatten(1) / math.sqrt(config.head_dim))
    # The format's own eps, whatever the configuration's.
    return reference_norm(torch.stack(outputs, 1), p["g_norm.weight"], 1e-5) @ p["o_proj.weight"].T


def linear_weights(q: Tensor, k: Tensor, config: Any, p: Parameters) -> Tensor:
    maps: dict[LinearFeatureMap, Callable[[Tensor], Tensor]] = {
        LinearFeatureMap.elu: lambda x: nn.functional.elu(x) + 1,
        LinearFeatureMap.relu: lambda x: x * (x > 0),
        LinearFeatureMap.identity: lambda x: x,
    }
    q, k = (maps[config.feature_map](x) for x in (q, k))
    return q @ k.mT / math.sqrt(q.shape[-1])


def based_weights(q: Tensor, k: Tensor, config: Any, p: Parameters) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return 1 + scores + scores**2 / 2


def rebased_weights(q: Tensor, k: Tensor, config: Any, p: Parameters) -> Tensor:
    def mapped(x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + config.feature_norm_eps)
        return p["feature_map.gamma"] * scaled + p["feature_map.beta"]

    return (mapped(q) @ mapped(k).mT) ** 2 / q.shape[-1]


def cosformer_weights(q: Tensor, k: Tensor, config: Any, p: Parameters) -> Tensor:
    positions = torch.arange(q.shape[-2], dtype=torch.float64)
    distances = positions[:, None] - positions
    return (q * (q > 0)) @ (k * (k > 0)).mT * torch.cos(math.pi / 2 * distances / config.max_document)


WEIGHTS = {"linear": linear_weights, "based": based_weights, "rebased": rebased_weights, "cosformer": cosformer_weights}


def attention_matrix(x: Tensor, p: Parameters, config: Any, bound: Tensor | None) -> Tensor:
    """A feature map, as a masked matrix of attention weights."""
    q, k, v = (heads_of(x @ p[f"{name}_proj.weight"].T, config) for name in "qkv")
    weights = WEIGHTS[config.mixer](q, k, config, p).tril()
    if config.mixer != "linear" or config.normaliser:
        sums = weights.sum(-1, keepdim=True)
        weights = torch.where(sums == 0, 0.0, weights / torch.where(sums == 0, 1.0, sums))
    o = weights @ v
    o = reference_norm(o, p["norm.weight"], config.norm_eps) if config.mixer == "linear" else o
    return o.transpose(1, 2).flatten(2) @ p["o_proj.weight"].T


def convolved(inputs: Tensor, weight: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """silu of a causal convolution of each channel, by shifted copies."""
    size = weight.shape[-1]
    padded = F.pad(inputs, (0, 0, size - 1, 0))
    return F.silu(bias + sum(padded[:, i : i + inputs.shape[1]] * weight[:, 0, i] for i in range(size)))  # type: ignore[arg-type]


def delta_rules(x: Tensor, p: Parameters, config: Any, bound: Tensor | None) -> Tensor:
    """Token by token and head by head."""
    heads, size = config.heads, config.heads.key_dim
    q, k, v = (convolved(x @ p[f"{name}_proj.weight"].T, p[f"{name}_conv1d.weight"]) for name in "qkv")
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
        at = head // (heads.values // heads.keys) * size
        own_q, own_k = (y[..., at : at + size] for y in (q, k))
        own_q, own_k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (own_q, own_k))
        own_v = v[..., head * heads.value_dim : (head + 1) * heads.value_dim]
        state, o = x.new_zeros(len(x), size, heads.value_dim), []
        for t in range(x.shape[1]):
            state = decays[:, t, head, :, None] * state
            change = strengths[:, t, head, None] * (own_v[:, t] - (own_k[:, t, :, None] * state).sum(1))
            state = state + own_k[:, t, :, None] * change[:, None]
            o.append((own_q[:, t, :, None] * state).sum(1) / size**0.5)
        outputs.append(reference_norm(torch.stack(o, 1), p["o_norm.weight"], config.norm_eps))
    o = torch.cat(outputs, -1)
    if "g_proj.0.weight" in p:
        o = o * torch.sigmoid(x @ p["g_proj.0.weight"].T @ p["g_proj.1.weight"].T + p["g_proj.1.bias"])
    elif "g_proj.weight" in p:
        o = o * F.silu(x @ p["g_proj.weight"].T)
    return o @ p["o_proj.weight"].T


def mamba1(x: Tensor, p: Parameters, config: Any, bound: Tensor | None) -> Tensor:
    """Token by token and state by state."""
    u, z = (x @ p["in_proj.weight"].T).split(config.inner_dim, dim=-1)
    u = convolved(u, p["conv1d.weight"], p.get("conv1d.bias", 0.0))
    sizes = config.rank, config.state_size, config.state_size
    low, B, C = (u @ p["x_proj.weight"].T).split(sizes, dim=-1)
    steps = torch.log1p(torch.exp(low @ p["dt_proj.weight"].T + p["decay.dt_bias"]))
    y = p["decay.D"] * u
    for k in range(config.state_size):
        rates, state, o = -torch.exp(p["decay.A_log"][:, k]), torch.zeros((), dtype=x.dtype), []
        for t in range(x.shape[1]):
            state = torch.exp(rates * steps[:, t]) * state + steps[:, t] * u[:, t] * B[:, t, k, None]
            o.append(C[:, t, k, None] * state)
        y = y + torch.stack(o, 1)
    return (y * F.silu(z)) @ p["out_proj.weight"].T


def mamba2(x: Tensor, p: Parameters, config: Any, bound: Tensor | None) -> Tensor:
    """Token by token and head by head."""
    inner, group = config.inner_dim, config.n_groups * config.state_size
    z, u, logits = (x @ p["in_proj.weight"].T).split((inner, config.conv_dim, config.num_heads), dim=-1)
    u = convolved(u, p["conv1d.weight"], p.get("conv1d.bias", 0.0))
    values, keys, queries = u.split((inner, group, group), dim=-1)
    steps = F.softplus(logits + p["decay.dt_bias"]).clamp(*config.time_step_limit)
    heads = []
    for head in range(config.num_heads):
        first = head // (config.num_heads // config.n_groups) * config.state_size
        k, q = (tensor[..., first : first + config.state_size] for tensor in (keys, queries))
        v, step = values[..., head * config.head_dim : (head + 1) * config.head_dim], steps[..., head, None]
        state, o = x.new_zeros(len(x), config.state_size, config.head_dim), []
        for t in range(x.shape[1]):
            decay = torch.exp(-torch.exp(p["decay.A_log"][head]) * step[:, t])[..., None]
            state = decay * state + k[:, t, :, None] * (step[:, t] * v[:, t])[:, None]
            o.append((q[:, t, :, None] * state).sum(1) + p["decay.D"][head] * v[:, t])
        heads.append(torch.stack(o, 1))
    gated = (torch.cat(heads, -1) * F.silu(z)).unflatten(-1, (config.n_groups, -1))
    return (reference_norm(gated, 1.0, config.norm_eps).flatten(-2) * p["norm.weight"]) @ p["out_proj.weight"].T


REFERENCES: dict[str, Callable[..., Tensor]] = {
    "gla": gla,
    **dict.fromkeys(("retnet", "lightning"), fixed_decays),
    "gsa": gsa,
    **dict.fromkeys(("hgrn", "hgrn2"), forget_gates),
    **dict.fromkeys(WEIGHTS, attention_matrix),
    **dict.fromkeys(("delta_net", "gated_deltanet", "kda"), delta_rules),
    "mamba1": mamba1,
    "mamba2": mamba2,
}


# Every layer


@pytest.mark.parametrize("name", cases())
def test_outputs_and_gradients_equal_the_reference(name: str) -> None:
    config = CASES[name]
    mixer, x, bounds = build(config)
    parameters = dict(mixer.named_parameters())
    leaves = {"x": x, **parameters, **({} if bounds is None else {"bounds": bounds})}
    expected, (y, _) = REFERENCES[config.mixer](x, parameters, config, bounds), run(mixer, x, bounds)
    assert_close(y, expected, "y")
    dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(3))
    found, wanted = (torch.autograd.grad(out, [*leaves.values()], dy) for out in (y, expected))
    for leaf, ours, theirs in zip(leaves, found, wanted, strict=True):
        assert theirs.abs().max() > 1e-6, f"{leaf}: the reference does not exercise it"
        assert_close(ours, theirs, f"gradient of {leaf}")


@pytest.mark.parametrize("name", cases(("retnet", "hgrn2", "cosformer", "gsa"), (*SLOW, "hgrn", "kda")))
def test_second_shard_and_steps_continue_the_first(name: str) -> None:
    """The states handed over by hand, gradients through them; then token by token from the same states."""
    mixer, x, bounds = build(CASES[name])
    whole, _ = run(mixer, x, bounds)
    (wanted,) = torch.autograd.grad(whole.square().sum(), x, retain_graph=True)
    first, states = run(mixer, x[:, :BORDER], bounds)
    assert [tuple(state.shape[1:]) for state in states] == [*mixer.state_shapes]
    second, _ = run(mixer, x[:, BORDER:], bounds, offset=BORDER, carries=states)
    joined = torch.cat([first, second], 1)
    assert_close(joined, whole, "y")
    assert_close(torch.autograd.grad(joined.square().sum(), x)[0], wanted, "gradient of x")
    with torch.no_grad():
        states, shared = [state.detach().clone() for state in states], shared_part(mixer, bounds)
        for t in range(BORDER, TOKENS):
            y = mixer.step(x[:, t : t + 1], states, torch.full((BATCH,), t), shared)
            assert_close(y, whole[:, t : t + 1], f"step {t}")


@pytest.mark.parametrize("name", cases(("retnet", "cosformer", "kda"), ("mamba2", "hgrn2", "linear normalised")))
def test_documents_are_independent(name: str) -> None:
    """Positions count from the start of the sequence: only their differences matter."""
    mixer, x, bounds = build(CASES[name])
    borders = [0, 1, 3, 40, TOKENS]
    packed, _ = run(mixer, x[:1], bounds, documents=borders)
    for start, stop in itertools.pairwise(borders):
        assert_close(packed[:, start:stop], run(mixer, x[:1, start:stop], bounds)[0], f"document at {start}")


@pytest.mark.parametrize(
    "name", cases(("retnet", "hgrn2", "linear relu normalised", "based symmetric"), ("hgrn", "gsa"))
)
def test_bf16_stays_close_to_fp64(name: str) -> None:
    """Decays are neither parameters nor buffers, so casting the model does not round them."""
    rounded, x, bounds = build(CASES[name])
    exact, _, _ = build(CASES[name])
    cast(rounded, torch.bfloat16)
    exact.load_state_dict(rounded.state_dict())
    x = x.detach().bfloat16()
    with torch.no_grad():
        (y, states), (expected, _) = run(rounded, x, bounds), run(exact, x.double(), bounds)
    assert (y.dtype, {state.dtype for state in states}) == (torch.bfloat16, {torch.float32})
    # Measured at most 0.85 eps.
    assert (y.double() - expected).norm() <= 2 * torch.finfo(torch.bfloat16).eps * expected.norm()


@pytest.mark.parametrize("feature_map", [*FeatureMap, *LinearFeatureMap])
def test_feature_maps_are_functions(feature_map: FeatureMap | LinearFeatureMap) -> None:
    """torch 2.11 compiles no call of an enumeration's member."""
    assert not callable(feature_map)
    assert feature_map.function(torch.ones(1)).shape == (1,)


def test_sequences_of_a_batch_step_at_their_own_positions() -> None:
    mixer, x, _ = build(RETNET)
    positions = torch.tensor([7, 123456])
    states = [torch.randn(BATCH, *shape, dtype=torch.float64) for shape in mixer.state_shapes]
    with torch.no_grad():
        together = mixer.step(x[:, :1], [state.clone() for state in states], positions, None)
        for row in range(BATCH):
            at = slice(row, row + 1)
            alone = mixer.step(x[at, :1], [state[at].clone() for state in states], positions[at], None)
            assert_close(together[at], alone, f"row {row}")


@pytest.mark.parametrize(
    ("name", "key", "value", "problem"),
    [
        ("gla", "num_layers", 0, "must be a whole number ≥ 1"),
        ("gla", "vocab_size", -3, "must be a whole number ≥ 1"),
        ("gla", "gate_low_rank_dim", 0, "must be a whole number ≥ 1"),
        ("gla", "intermediate_size", 0, "must be a whole number ≥ 1"),
        ("gla", "norm_eps", 0.0, "must be finite and > 0"),
        ("gla", "expand_v", math.nan, "must be finite and > 0"),
        ("gla", "expand_k", 0.3, "hidden_size (24) times it must be a multiple of num_heads (3); nearest: 0.25"),
        ("gla", "expand_k", 1e-9, "hidden_size (24) times it must be a multiple of num_heads (3); nearest: 0.125"),
        ("gla", "num_heads", 5, "divide hidden_size · expand_k = 12 and hidden_size · expand_v = 30; nearest: 6"),
        ("retnet", "rope_theta", 0.5, "must be finite and > 1"),
        ("retnet", "rope_theta", math.inf, "must be finite and > 1"),
        ("retnet", "expand_v", 0.001, "must be a multiple of num_heads"),
        ("lightning", "num_heads", 3, "must divide"),
        ("hgrn2", "num_heads", 3, "must divide"),
        ("hgrn2", "expand_ratio", 64, "must be hidden_size / num_heads = 4, or null"),
        ("gsa", "num_slots", 0, "must be a whole number ≥ 1"),
        ("gsa", "expand_v", 2.0, "must be 1: the output's norm is as wide as the model"),
        ("gsa", "num_kv_heads", 2, "must divide num_heads=3: 1, 3"),
        ("rebased", "num_heads", 5, "must divide"),
        ("rebased", "feature_dim", 0, "must be a whole number ≥ 1"),
        ("rebased", "feature_norm_eps", 0.0, "must be finite and > 0"),
        ("gated_deltanet", "num_v_heads", 4, "must be a multiple of num_heads=3"),
        ("kda", "num_v_heads", 0, "must be a multiple of num_heads=3"),
        ("gated_deltanet", "expand_v", 0.5, "times head_dim=5 must be a whole number; nearest: 0.4"),
        ("kda", "head_dim", 0, "must be a whole number ≥ 1"),
        ("delta_net", "conv_size", 1, "must be a whole number ≥ 2"),
        ("gated_deltanet", "conv_size", 1, "must be a whole number ≥ 2"),
        ("delta_net", "num_heads", 7, "must divide"),
        ("mamba1", "time_step_rank", 0, "must be a whole number ≥ 1"),
        ("mamba2", "head_dim", 7, "times num_heads=6 must equal expand · hidden_size = 48"),
        ("mamba2", "n_groups", 4, "must divide num_heads=6: 1, 2, 3, 6"),
        ("mamba2", "conv_kernel", 1, "must be a whole number ≥ 2"),
        ("mamba2", "time_step_min", 0.5, "must be ≤ time_step_max=0.1"),
        ("mamba2", "time_step_limit", (0.5, 0.5), "0 ≤ least < most"),
        ("mamba2", "time_step_limit", (-1.0, 1.0), "0 ≤ least < most"),
        ("mamba2", "time_step_limit", (0.0, math.nan), "0 ≤ least < most"),
        ("mamba2", "time_step_limit", (0.0, 1.0, 2.0), "must be [least, most]"),
        ("mamba2", "intermediate_size", -1, "must be a whole number ≥ 1"),
        ("gated_deltanet", "o_norm_eps", 0, "must be finite and > 0"),
    ],
    ids=lambda value: f"{value!s:.20}",
)
def test_values_out_of_range_are_refused(name: str, key: str, value: object, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(CASES[name], **{key: value})  # type: ignore[arg-type]
    assert str(error.value).startswith(f"model.{key}=")
    assert problem in error.value.line
