"""Parts of the layers: decays, gates, norms, rotations, normalisers; initial values and wide parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from models.config import LanguageModelConfig
from models.decays import step_log_decays
from models.mixer_registry import MIXERS, check_document, longest_document
from models.mixers import hgrn, lightning, retnet
from models.mixers.based import BasedConfig
from models.mixers.cosformer import CosformerConfig
from models.mixers.hgrn import forget_gate
from models.mixers.lightning import LightningConfig
from models.mixers.linear import normalised, with_ones
from models.mixers.rebased import RebasedConfig
from models.modules import GatedRMSNorm, GateFunction, RMSNorm, rotate, swiglu
from models.parameters import cast, parameter_rules
from models.spec import ModelSpec, spec_of
from tests.models.test_fla_models import GATED, KDA
from tests.models.test_layers import (
    CASES,
    LINEAR,
    MAMBA2,
    RETNET,
    SCAN,
    THREE,
    assert_close,
    build,
    reference_norm,
    reference_rotation,
    run,
)
from zeco_train.errors import ConfigError
from zeco_train.ops.gated_norm import l2_normalised
from zeco_train.ops.position import SequencePosition

pytestmark = pytest.mark.numeric


def test_retnet_decays_are_those_of_the_paper() -> None:
    expected = torch.tensor([31 / 32, 63 / 64, 127 / 128, 255 / 256], dtype=torch.float64)
    torch.testing.assert_close(retnet.log_decays(4).exp(), expected, rtol=1e-15, atol=0)
    mixer = MIXERS[RETNET.mixer](RETNET, 0)
    assert isinstance(mixer.log_decay, Tensor)
    assert mixer.to(torch.bfloat16).log_decay.dtype == torch.float64


def test_lightning_slopes_are_those_of_alibi_and_fall_over_layers() -> None:
    assert lightning.slopes(8) == [2**-n for n in range(1, 9)]
    # From the paper of ALiBi: other numbers take the slopes of the next lower power of two, then every second one of
    # the next higher one.
    assert lightning.slopes(12) == [2**-n for n in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert lightning.slopes(1) == [2**-8]
    factors = [lightning.log_decays(8, layer, 5)[0].item() / -0.5 for layer in range(5)]
    assert factors == pytest.approx([1 + 1e-5, 0.75 + 1e-5, 0.5 + 1e-5, 0.25 + 1e-5, 1e-5], rel=1e-12)
    assert lightning.log_decays(8, 0, 1)[0].item() == pytest.approx(-0.5 * (1 + 1e-5))


def test_hgrn2_lower_bounds_rise_from_zero_over_the_layers() -> None:
    parameter = torch.randn(6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bounds = hgrn.lower_bounds(parameter)
    softmax = torch.exp(parameter) / torch.exp(parameter).sum(0)
    torch.testing.assert_close(bounds, softmax.cumsum(0) - softmax[0], rtol=1e-14, atol=1e-15)
    assert (bounds[0] == 0).all()
    assert (bounds.diff(dim=0) > 0).all()
    torch.testing.assert_close(hgrn.lower_bounds(torch.zeros(4, 1)).flatten(), torch.tensor([0, 0.25, 0.5, 0.75]))
    # Rounding must not make a decay larger than 1.
    skewed = torch.randn(48, 4096, generator=torch.Generator().manual_seed(1)) * 9
    assert hgrn.lower_bounds(skewed).max() <= 1


@pytest.mark.parametrize("bound", [0.0, 1e-9, 0.3, 0.999999])
def test_forget_gates_have_all_digits_and_finite_gradients(bound: float) -> None:
    """In fp32, for gates nearly open and nearly closed, where 1 − f and log f cancel."""
    logits = torch.tensor([-60.0, -30, -17, -3, -0.1, 0, 0.1, 3, 17, 30, 60], requires_grad=True)
    bounds = torch.full_like(logits, bound)
    k, g = forget_gate(logits, bounds)
    wide = logits.detach().double()
    b = bounds.double()
    expected_k = (1 - b) / (1 + torch.exp(wide))
    forget, forgotten = 1 / (1 + torch.exp(-wide)), 1 / (1 + torch.exp(wide))
    # log(1 − k) or log f: even in fp64 only the form without cancellation is accurate.
    expected_g = torch.where(expected_k < 0.5, torch.log1p(-expected_k), torch.log(b + (1 - b) * forget))
    torch.testing.assert_close(k.double(), expected_k, rtol=5e-7, atol=0)
    torch.testing.assert_close(g.double(), expected_g, rtol=5e-7, atol=0)
    (gradient,) = torch.autograd.grad(g.sum(), logits)
    expected = (1 - b) * forget * forgotten / (b + (1 - b) * forget)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-6, atol=0)


def test_forget_gates_of_extreme_logits_are_finite() -> None:
    logits = torch.tensor([-1e30, -200.0, -95, 95, 200, 1e30], requires_grad=True)
    for bound in (torch.zeros(6), torch.ones(6)):
        leaf = bound.requires_grad_()
        k, g = forget_gate(logits, leaf)
        assert g.max() <= 0
        found = (k, g, *torch.autograd.grad([k, g], [logits, leaf], [torch.ones(6), torch.full((6,), 1e3)]))
        assert all(tensor.isfinite().all() for tensor in found)


EPS = 1e-3


def norm(kind: type[nn.Module], *arguments: Any) -> Callable[..., Tensor]:
    """A norm as a function of its inputs and its weight."""
    module = kind(8, EPS, *arguments)
    return lambda *x: functional_call(module, {"weight": x[-1]}, x[:-1])


def written_gates(logits: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    forget = bound.sigmoid() + (1 - bound.sigmoid()) * (3 * logits).sigmoid()
    return 1 - forget, forget.log()


ROWS, WIDTH, HEADS = (2, 3, 8), (8,), (2, 3, 4, 8)
SWISH, SIGMOID = GateFunction
# By function: its formula in plain operations, and the shapes of its operands.
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Sequence[tuple[int, ...]]]] = {
    "norm": (norm(RMSNorm), lambda x, w: reference_norm(x, w, EPS), (ROWS, WIDTH)),
    "zero-centred": (norm(RMSNorm, True), lambda x, w: reference_norm(x, 1 + w, EPS), (ROWS, WIDTH)),
    "swish": (norm(GatedRMSNorm, SWISH), lambda x, g, w: reference_norm(x, w, EPS) * F.silu(g), (ROWS, ROWS, WIDTH)),
    "sigmoid": (
        norm(GatedRMSNorm, SIGMOID),
        lambda x, g, w: reference_norm(x, w, EPS) * g.sigmoid(),
        (HEADS, HEADS, WIDTH),
    ),
    "swiglu": (swiglu, lambda gate, up: F.silu(gate) * up, (ROWS, ROWS)),
    "l2": (lambda x: l2_normalised(x, 1.0), lambda x: x / (x.square().sum(-1, keepdim=True) + 1).sqrt(), (ROWS,)),
    "normaliser": (lambda o: normalised(o, 5), lambda o: o[..., :5] / o[..., 5:6], (ROWS,)),
    "log-decays of heads": (
        lambda x, p: step_log_decays(x, p, 8),
        lambda x, p: -p[:8].exp() * F.softplus(x + p[8:]),
        (ROWS, (16,)),
    ),
    "log-decays of channels": (
        lambda x, p: step_log_decays(x, p, 2),
        lambda x, p: (-p[:2].exp().repeat_interleave(4) * F.softplus(x + p[2:])).unflatten(-1, (2, 4)),
        (ROWS, (10,)),
    ),
    "forget gate": (lambda x, b: forget_gate(3 * x, b.sigmoid()), written_gates, (ROWS, WIDTH)),
    "rotation": (
        lambda q, k: rotate(q, k, torch.arange(3), 100.0),
        lambda *x: tuple(reference_rotation(y.transpose(1, 2), 100.0).transpose(1, 2) for y in x),
        (HEADS, HEADS),
    ),
}


@pytest.mark.parametrize("form", ["eager", "traced", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_gradients_equal_the_formulas(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced: what a compiler is given."""
    function, formula, shapes = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    if form == "traced":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    if form == "compiled":
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for outputs in (function(*leaves), formula(*leaves)):
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        weights = [torch.arange(1, 1 + out.numel(), dtype=out.dtype).view(out.shape).sin() for out in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, weights)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["norm", "swish", "swiglu", "l2"])
def test_functions_round_once(name: str) -> None:
    """In bf16. Rounding fp32 differs from rounding the exact value in rare near-ties only, two roundings do often."""
    function, formula, shapes = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape if shape == WIDTH else (8000, 8), generator=generator).bfloat16() for shape in shapes]
    found = function(*inputs)
    assert found.dtype is torch.bfloat16
    assert (found != formula(*(x.double() for x in inputs)).bfloat16()).double().mean() < 1e-3


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 4e-7)])
def test_rotated_products_depend_on_the_distance_only(dtype: torch.dtype, tolerance: float) -> None:
    """At 8 million tokens as at the beginning; angles in fp32 would be multiples of 0.5 there."""
    generator = torch.Generator().manual_seed(0)
    q, k = (F.normalize(torch.randn(1, 1, 9, 64, generator=generator).to(dtype), dim=-1) for _ in range(2))

    def product(position: int, distance: int) -> Tensor:
        (rotated, _), (_, key) = (rotate(q, k, torch.tensor([at]), 10000.0) for at in (position + distance, position))
        return (rotated.double() * key.double()).sum(-1)

    for distance in (0, 1, 700, 100_000):
        for position in (1, 4095, 8_000_000, 2**24 + 1):
            error = (product(position, distance) - product(0, distance)).abs().max()
            assert error <= tolerance, f"{error:.1e} at {position}, {distance} apart"
    # What is compared does depend on the distance.
    assert (product(0, 1) - product(0, 700)).abs().max() > 0.1


def test_heads_of_odd_width_need_no_positions() -> None:
    assert LightningConfig(hidden_size=20).head_k_dim == 5
    with pytest.raises(ConfigError, match=r"model.rope_theta=10000.0: .* must be of even width, not 5"):
        LightningConfig(hidden_size=20, rope_theta=10000.0)


@pytest.mark.parametrize("name", ["linear relu normalised", "cosformer"])
def test_token_without_weights_gives_zero_output_and_gradients(name: str) -> None:
    """relu maps a query to zeros: 0 / 0."""
    mixer, x, _ = build(CASES[name])
    with torch.no_grad():
        mixer.q_proj.weight.copy_(mixer.q_proj.weight.abs())
        x[:, 40:60] = -x[:, 40:60].abs()
    y, _ = run(mixer, x)
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
@pytest.mark.parametrize(
    "name", [name for name in CASES if name.startswith(("linear", "based", "rebased", "cosformer"))]
)
def test_traced_form_equals_the_eager_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a compiler the maps and the normaliser are plain operations."""
    mixer, x, _ = build(CASES[name])
    leaves = [x, *mixer.parameters()]
    eager, _ = run(mixer, x)
    wanted = torch.autograd.grad(eager.square().sum(), leaves)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    plain, _ = run(mixer, x)
    assert_close(plain, eager, "y")
    for ours, theirs in zip(torch.autograd.grad(plain.square().sum(), leaves), wanted, strict=True):
        assert_close(ours, theirs, "a gradient")


def test_symmetric_features_are_fewer_and_equal() -> None:
    """By default; and otherwise as the papers write them."""
    widths = [(kind(symmetric=False).head, kind().head) for kind in (BasedConfig, RebasedConfig)]
    assert [(paper.features, paper.key) for paper, _ in widths] == [(273, 288), (256, 256)]
    assert [(fewer.features, fewer.key) for _, fewer in widths] == [(153, 160), (136, 144)]
    for name in ("based", "rebased"):
        (fewer, x, _), (paper, _, _) = build(CASES[f"{name} symmetric"]), build(CASES[name])
        assert_close(run(fewer, x)[0], run(paper, x)[0], name)


def test_cosformer_positions_are_exact_at_millions() -> None:
    """Only differences of positions count, also far from the start."""
    mixer, x, _ = build(CASES["cosformer"])
    assert_close(run(mixer, x, offset=8_000_000)[0], run(mixer, x)[0], "y", 1e-7)
    relu, _, _ = build(CASES["linear relu"])
    assert (run(mixer, x, offset=8_000_000)[0] - run(relu, x)[0]).abs().max() > 1e-3


def test_cosformer_refuses_longer_documents() -> None:
    config = CosformerConfig(max_document=100)
    assert [longest_document(c) for c in (config, BasedConfig(), LINEAR)] == [100, None, None]
    check_document(config, "data.seq_len", 100)
    with pytest.raises(ConfigError, match=r"^data.seq_len=101: .* at most 100 tokens \(model.max_document\)$"):
        check_document(config, "data.seq_len", 101)
    check_document(LINEAR, "data.seq_len", 1 << 40)


def test_rebased_scale_and_shift_start_at_one_and_zero_without_weight_decay() -> None:
    mixer = MIXERS["rebased"](RebasedConfig(**THREE), 0)
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


MANY: dict[str, Any] = {"hidden_size": 64, "num_heads": 64, "num_v_heads": 128, "head_dim": 16, "num_layers": 1}
OF_MAMBA2 = dataclasses.replace(MAMBA2, hidden_size=512, num_heads=128, num_layers=1, n_groups=1)


@pytest.mark.parametrize(
    ("config", "least"),
    [(dataclasses.replace(GATED, **MANY), 0.0), (dataclasses.replace(KDA, **MANY), 1.0), (OF_MAMBA2, 1.0)],
)
def test_initial_values_are_those_of_fla_or_of_the_paper(config: LanguageModelConfig, least: float) -> None:
    # fla's model has 128 decays a layer, or 128 · 16.
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
    if config is OF_MAMBA2:
        assert (layer.decay.D == 1).all()
        for parameter in (layer.conv1d.weight, layer.conv1d.bias):
            assert 0.95 < parameter.abs().max() * math.sqrt(config.conv_kernel) <= 1  # type: ignore[attr-defined]
    else:
        for convolution in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d):
            assert convolution.bias is None
            assert 0.018 < convolution.weight.std() < 0.022
    again = ModelSpec(config).build().double()
    again.init_weights(0)
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name).float(), parameter), name


@pytest.mark.parametrize(
    ("config", "own"), [(dataclasses.replace(MAMBA2, num_layers=2), {"D"}), (GATED, set()), (KDA, set())]
)
def test_wide_parameters_have_no_weight_decay_and_stay_fp32(config: LanguageModelConfig, own: set[str]) -> None:
    model = ModelSpec(config).build()
    rules = {name: rule for name, _, rule in parameter_rules(model)}
    wide = {name for name, rule in rules.items() if rule.wide}
    assert wide == {
        f"model.layers.{n}.attn.decay.{name}" for n in range(config.num_layers) for name in ("A_log", "dt_bias", *own)
    }
    assert not any(rules[name].decays for name in wide)
    for dtype, of_wide in ((torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2):
        cast(model, dtype)
        assert all(p.dtype is (of_wide if name in wide else dtype) for name, p in model.named_parameters())


@pytest.mark.parametrize("wide", [False, True])
def test_residual_stream_is_fp32_if_configured(wide: bool) -> None:
    model = ModelSpec(dataclasses.replace(MAMBA2, num_layers=2, residual_in_fp32=wide)).build()
    model.init_weights(0)
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
        spec_of(dataclasses.replace(MAMBA2, intermediate_size=size)).blocks.values() for size in (40, 0)
    )
    assert without.mlp_products == []
    assert without.mixer_products == with_mlp.mixer_products == [[(24, 48), (24, 68), (24, 6)], [(48, 24)]]
    assert sum(map(math.prod, with_mlp.parameters)) - sum(map(math.prod, without.parameters)) == 24 * (3 * 40 + 1)


@pytest.mark.slow
def test_compiled_rotations_equal_the_plain_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 6, 3, 8, generator=generator) for _ in range(2))
    positions = 8_000_000 + torch.arange(6)
    compiled = torch.compile(rotate, fullgraph=True, backend="aot_eager")(q, k, positions, 10000.0)
    for ours, plain in zip(compiled, rotate(q, k, positions, 10000.0), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
