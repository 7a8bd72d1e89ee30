"""Linear attention with feature maps: each mixer against a plain attention matrix, and its parts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.config import LanguageModelConfig
from models.mixer_registry import MIXERS, check_document, longest_document
from models.mixers.based import BasedConfig
from models.mixers.cosformer import CosformerConfig
from models.mixers.linear import FeatureMapAttention, LinearAttentionConfig, LinearFeatureMap, normalised, with_ones
from models.mixers.rebased import RebasedConfig
from models.parameters import parameter_rules
from models.spec import spec_of
from zeco_train.errors import ConfigError
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

TOKENS = 150
# fp64; sums of 150 tokens in another order, and divisions by sums of weights; measured at most 4.4e-14.
TOLERANCE = 1e-12
# No width equals another, so that a wrong transposition or reshape cannot pass.
SHAPE: dict[str, Any] = {"vocab_size": 29, "hidden_size": 24, "num_layers": 1, "num_heads": 3, "intermediate_size": 20}
LINEAR = LinearAttentionConfig(**SHAPE, expand_k=0.5, expand_v=1.25)
CASES: dict[str, LanguageModelConfig] = {
    **{f"linear {map_.value}": dataclasses.replace(LINEAR, feature_map=map_) for map_ in LinearFeatureMap},
    "linear normalised": dataclasses.replace(LINEAR, normaliser=True),
    "linear relu normalised": dataclasses.replace(LINEAR, feature_map=LinearFeatureMap.relu, normaliser=True),
    "based": BasedConfig(**SHAPE, feature_dim=5, symmetric=False),
    "based symmetric": BasedConfig(**SHAPE, feature_dim=5),
    "rebased": RebasedConfig(**SHAPE, feature_dim=5, symmetric=False),
    "rebased symmetric": RebasedConfig(**SHAPE, feature_dim=5),
    "cosformer": CosformerConfig(**SHAPE, max_document=TOKENS),
}

# Kept alive here: operators get only a handle of their scan.
SCAN = local_exchange()
Parameters = Mapping[str, Tensor]


def build(config: LanguageModelConfig) -> FeatureMapAttention:
    """A mixer in fp64 with random parameters, large enough that every path matters."""
    mixer = MIXERS[config.mixer](config, 0).double()
    assert isinstance(mixer, FeatureMapAttention)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in mixer.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(0.5 * noise if parameter.ndim > 1 else 1 + 0.5 * noise)
    return mixer


def inputs(batch: int = 2, tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(batch, tokens, SHAPE["hidden_size"], generator=generator, dtype=torch.float64)


def run(
    mixer: FeatureMapAttention,
    x: Tensor,
    offset: int = 0,
    carry_in: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs of tokens from `offset` on, and the state after them."""
    documents = None if cu_seqlens is None else [cu_seqlens]
    position = SequencePosition((offset, offset + x.shape[1]), documents=documents, exchange=SCAN)
    position = position.on(x, with_positions=mixer.reads_positions)
    y, (state_output,) = mixer(x, position, (StateInput(None, carry_in, True),), None)
    return y, state_output.carry_out


def linear_weights(q: Tensor, k: Tensor, config: Any, parameters: Parameters) -> Tensor:
    maps: dict[LinearFeatureMap, Callable[[Tensor], Tensor]] = {
        LinearFeatureMap.elu: lambda x: nn.functional.elu(x) + 1,
        LinearFeatureMap.relu: lambda x: x * (x > 0),
        LinearFeatureMap.identity: lambda x: x,
    }
    q, k = (maps[config.feature_map](x) for x in (q, k))
    return q @ k.T / math.sqrt(q.shape[-1])


def based_weights(q: Tensor, k: Tensor, config: Any, parameters: Parameters) -> Tensor:
    scores = q @ k.T / math.sqrt(q.shape[-1])
    return 1 + scores + scores**2 / 2


def rebased_weights(q: Tensor, k: Tensor, config: Any, parameters: Parameters) -> Tensor:
    def mapped(x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = (centred**2).mean(-1, keepdim=True)
        scaled = centred / torch.sqrt(variance + config.feature_norm_eps)
        return parameters["feature_map.gamma"] * scaled + parameters["feature_map.beta"]

    return (mapped(q) @ mapped(k).T) ** 2 / q.shape[-1]


def cosformer_weights(q: Tensor, k: Tensor, config: Any, parameters: Parameters) -> Tensor:
    positions = torch.arange(len(q), dtype=torch.float64)
    distances = positions[:, None] - positions
    return (q * (q > 0)) @ (k * (k > 0)).T * torch.cos(math.pi / 2 * distances / config.max_document)


WEIGHTS: dict[str, Callable[[Tensor, Tensor, Any, Parameters], Tensor]] = {
    "linear": linear_weights,
    "based": based_weights,
    "rebased": rebased_weights,
    "cosformer": cosformer_weights,
}


def reference(x: Tensor, config: Any, parameters: Parameters) -> Tensor:
    """One layer on one sequence [T, D], as a masked matrix of attention weights, head by head."""
    q, k, v = ((x @ parameters[f"{name}_proj.weight"].T).chunk(config.num_heads, -1) for name in "qkv")
    heads = []
    for head in range(config.num_heads):
        weights = WEIGHTS[config.mixer](q[head], k[head], config, parameters).tril()
        if config.mixer != "linear" or config.normaliser:
            sums = weights.sum(-1, keepdim=True)
            weights = torch.where(sums == 0, 0.0, weights / torch.where(sums == 0, 1.0, sums))
        o = weights @ v[head]
        if config.mixer == "linear":
            mean_square = (o**2).mean(-1, keepdim=True)
            o = o / torch.sqrt(mean_square + config.norm_eps) * parameters["norm.weight"]
        heads.append(o)
    return torch.cat(heads, -1) @ parameters["o_proj.weight"].T


def assert_close(actual: Tensor, expected: Tensor, name: str, tolerance: float = TOLERANCE) -> None:
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_an_attention_matrix(name: str) -> None:
    config, x = CASES[name], inputs().requires_grad_()
    mixer, dy = build(config), inputs().flip(1)
    parameters = {name: p.detach().clone().requires_grad_() for name, p in mixer.named_parameters()}
    expected = torch.stack([reference(row, config, parameters) for row in x])
    wanted = torch.autograd.grad(expected, [x, *parameters.values()], dy)
    y, _ = run(mixer, x)
    found = torch.autograd.grad(y, [x, *mixer.parameters()], dy)
    assert_close(y, expected, "y")
    for label, ours, theirs in zip(["x", *parameters], found, wanted, strict=True):
        assert theirs.abs().max() > 1e-3, f"{label}: the reference does not exercise it"
        assert_close(ours, theirs, f"gradient of {label}")


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("name", CASES)
def test_second_shard_continues_the_first(name: str) -> None:
    """A border inside a chunk, the state handed over by hand; then token by token. Gradients through the border too."""
    mixer, x, border = build(CASES[name]), inputs().requires_grad_(), 70
    whole, _ = run(mixer, x)
    (wanted,) = torch.autograd.grad(whole.square().sum(), x)
    first, state = run(mixer, x[:, :border])
    second, _ = run(mixer, x[:, border:], border, state)
    joined = torch.cat([first, second], 1)
    assert_close(joined, whole, "y")
    assert_close(torch.autograd.grad(joined.square().sum(), x)[0], wanted, "gradient of x")
    assert [shape for (shape,) in [mixer.state_shapes]] == [tuple(state.shape[1:])]
    with torch.no_grad():
        states = [state.detach().clone()]
        for token in range(border, TOKENS):
            y = mixer.step(x[:, token : token + 1], states, torch.tensor([token, token]), None)
            assert_close(y, whole[:, token : token + 1], f"step {token}")


@pytest.mark.few(4, quick=2)
@pytest.mark.parametrize("name", CASES)
def test_documents_are_independent(name: str) -> None:
    """cosFormer's positions count from the start of the sequence: only their differences matter."""
    mixer, x, borders = build(CASES[name]), inputs(1), [0, 1, 70, TOKENS]
    packed, _ = run(mixer, x, cu_seqlens=torch.tensor(borders))
    for start, stop in itertools.pairwise(borders):
        assert_close(packed[:, start:stop], run(mixer, x[:, start:stop])[0], f"document at {start}")


@pytest.mark.parametrize("name", ["linear relu normalised", "cosformer"])
def test_token_without_weights_gives_zero_output_and_gradients(name: str) -> None:
    """relu maps a query to zeros: 0 / 0."""
    mixer, x = build(CASES[name]), inputs()
    with torch.no_grad():
        mixer.q_proj.weight.copy_(mixer.q_proj.weight.abs())
        x[:, 40:60] = -x[:, 40:60].abs()
    y, _ = run(mixer, x.requires_grad_())
    assert (y[:, 40:60] == 0).all()
    assert (y[:, 60:].abs().amax(-1) > 0).double().mean() > 0.8
    gradients = torch.autograd.grad(y[:, 40:60].sum(), [x, *mixer.parameters()])
    assert all((gradient == 0).all() for gradient in gradients)
    assert all(g.isfinite().all() for g in torch.autograd.grad(run(mixer, x)[0].sum(), [x, *mixer.parameters()]))


@pytest.mark.parametrize("compiled", [False, True])
def test_normaliser_has_exact_gradients(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    torch.manual_seed(0)
    o = torch.randn(2, 4, 3, 8, dtype=torch.float64)
    torch.autograd.gradcheck(lambda o: normalised(o, 5), o.clone().requires_grad_())
    o[0, 0, 0, 5], o[0, 1, 0, 5] = 0, 1e-310
    y = normalised(o.requires_grad_(), 5)
    (gradient,) = torch.autograd.grad(y.square().sum(), o)
    for position in (0, 1):
        assert (y[0, position, 0] == 0).all()
        assert (gradient[0, position, 0] == 0).all()
    assert gradient.isfinite().all()
    wide = with_ones(o[..., :5])
    assert wide.shape[-1] == 8
    assert torch.equal(wide[..., 5:], torch.tensor([1.0, 0, 0], dtype=o.dtype).expand(2, 4, 3, 3))
    assert with_ones(o).shape[-1] == 16


@pytest.mark.few(4, quick=1)
@pytest.mark.parametrize("name", CASES)
def test_traced_form_equals_the_eager_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a compiler the maps and the normaliser are plain operations."""
    mixer, x = build(CASES[name]), inputs().requires_grad_()
    leaves = [x, *mixer.parameters()]
    eager, _ = run(mixer, x)
    wanted = torch.autograd.grad(eager.square().sum(), leaves)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    plain, _ = run(mixer, x)
    assert_close(plain, eager, "y")
    for ours, theirs in zip(torch.autograd.grad(plain.square().sum(), leaves), wanted, strict=True):
        assert_close(ours, theirs, "a gradient")


@pytest.mark.few(4)
@pytest.mark.parametrize("name", CASES)
def test_bf16_layer_stays_close_to_fp64(name: str) -> None:
    config = CASES[name]
    exact, rounded, x = build(config), build(config).bfloat16(), inputs().bfloat16()
    exact.load_state_dict(rounded.state_dict())
    y, state = run(rounded, x)
    expected, _ = run(exact, x.double())
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    # Measured: at most 0.85 eps.
    error = (y.double() - expected).norm() / expected.norm()
    assert error < 2 * torch.finfo(torch.bfloat16).eps


def test_symmetric_features_are_fewer_and_equal() -> None:
    """By default; and otherwise as the papers write them."""
    widths = [(kind(symmetric=False).head, kind().head) for kind in (BasedConfig, RebasedConfig)]
    assert [(paper.features, paper.key) for paper, _ in widths] == [(273, 288), (256, 256)]
    assert [(fewer.features, fewer.key) for _, fewer in widths] == [(153, 160), (136, 144)]
    for name in ("based", "rebased"):
        assert_close(run(build(CASES[f"{name} symmetric"]), inputs())[0], run(build(CASES[name]), inputs())[0], name)


def test_cosformer_positions_are_exact_at_millions() -> None:
    """Only differences of positions count, also far from the start."""
    mixer, x = build(CASES["cosformer"]), inputs()
    assert_close(run(mixer, x, offset=8_000_000)[0], run(mixer, x)[0], "y", 1e-7)
    assert (run(mixer, x, offset=8_000_000)[0] - run(build(CASES["linear relu"]), x)[0]).abs().max() > 1e-3


def test_cosformer_refuses_longer_documents() -> None:
    config = CosformerConfig(max_document=100)
    assert [longest_document(c) for c in (config, BasedConfig(), LINEAR)] == [100, None, None]
    check_document(config, "data.seq_len", 100)
    with pytest.raises(ConfigError, match=r"^data.seq_len=101: .* at most 100 tokens \(model.max_document\)$"):
        check_document(config, "data.seq_len", 101)
    check_document(LINEAR, "data.seq_len", 1 << 40)


@pytest.mark.parametrize("change", [{"num_heads": 5}, {"feature_dim": 0}, {"feature_norm_eps": 0.0}])
def test_impossible_shapes_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"model.{next(iter(change))}="):
        RebasedConfig(**{**SHAPE, **change})


def test_rebased_scale_and_shift_start_at_one_and_zero_without_weight_decay() -> None:
    mixer = MIXERS["rebased"](RebasedConfig(**SHAPE), 0)
    rules = {name: (parameter, rule) for name, parameter, rule in parameter_rules(mixer) if "feature_map" in name}
    for (name, (parameter, rule)), value in zip(rules.items(), (1.0, 0.0), strict=True):
        rule.init(parameter.data, 0.02, torch.Generator())
        assert (parameter == value).all(), name
        assert not rule.decays


def test_flops_count_no_columns_of_zeros() -> None:
    """153 features and 33 values: of the queries' and keys' and values' padding nothing counts."""
    config = BasedConfig()
    (block,) = spec_of(config).blocks.values()
    assert block.state_shapes == ((4, 160, 40),)
    assert block.operator_flops(100).forward == 4 * (4 * 153 * 33 + 65 * (153 + 33))
