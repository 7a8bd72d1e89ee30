"""RetNet, Lightning Attention, HGRN and HGRN2 against plain references in fp64; decays; rotary embeddings far out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.config import ExpandedHeadsConfig, LanguageModelConfig
from models.mixer_registry import MIXERS
from models.mixers import hgrn, lightning, retnet
from models.mixers.base import Mixer
from models.mixers.hgrn import HGRNConfig, forget_gate
from models.mixers.hgrn2 import HGRN2Config
from models.mixers.lightning import LightningConfig
from models.mixers.retnet import RetNetConfig
from models.modules import GatedRMSNorm, GateFunction, rotate
from zeco_train.errors import ConfigError
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

# Odd sizes on purpose: no dimension equals another, so that a wrong transposition or reshape cannot pass. The number of
# heads is no power of two.
RETNET = RetNetConfig(hidden_size=20, num_heads=5, num_layers=3, expand_k=1.5, expand_v=1.75, norm_eps=1e-3)
LIGHTNING = LightningConfig(hidden_size=20, num_heads=5, num_layers=3, expand_k=1.5, expand_v=1.75, norm_eps=1e-3)
HGRN_SMALL = HGRNConfig(hidden_size=20, num_layers=3, expand_ratio=3, norm_eps=1e-3)
HGRN2_SMALL = HGRN2Config(hidden_size=20, num_heads=5, num_layers=3, norm_eps=1e-3)
CONFIGS: dict[str, LanguageModelConfig] = {
    "retnet": RETNET,
    "retnet without positions": dataclasses.replace(RETNET, rope_theta=None),
    "lightning": LIGHTNING,
    "lightning with positions": dataclasses.replace(LIGHTNING, rope_theta=100.0),
    "hgrn": HGRN_SMALL,
    "hgrn2": HGRN2_SMALL,
}
BATCH, TOKENS, LAYER = 2, 75, 1
# Tokens are this far from the beginning of the sequence.
FIRST = 1000

# Kept alive here: operators get only a handle of their scan.
SCAN = local_exchange()

Parameters = Mapping[str, Tensor]


def build(config: LanguageModelConfig) -> tuple[Mixer, Tensor, Tensor | None]:
    """A layer in the middle of a model with large random weights, tokens, and its part of the shared parameter."""
    generator = torch.Generator().manual_seed(0)
    mixer = MIXERS[config.mixer](config, LAYER).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) * 0.4)
    x = torch.randn(BATCH, TOKENS, config.hidden_size, dtype=torch.float64, generator=generator, requires_grad=True)
    if mixer.shared is None:
        return mixer, x, None
    bounds = torch.randn(mixer.shared.shape(config), dtype=torch.float64, generator=generator, requires_grad=True)
    return mixer, x, bounds


def part(mixer: Mixer, bounds: Tensor | None) -> Tensor | None:
    return None if bounds is None or mixer.shared is None else mixer.shared.parts(bounds)[LAYER]


def place(start: int, stop: int) -> SequencePosition:
    bounds = FIRST + start, FIRST + stop
    return SequencePosition(bounds, exchange=SCAN).on(torch.empty(1, stop - start), with_positions=True)


def whole(mixer: Mixer, x: Tensor, bounds: Tensor | None) -> Tensor:
    y, state_outputs = mixer(x, place(0, TOKENS), (StateInput(),), part(mixer, bounds))
    assert len(state_outputs) == 1
    return y


def reference_rotation(x: Tensor, theta: float | None) -> Tensor:
    """Rotate [T, H, K]: channels j and j + K/2 are the real and the imaginary part of a complex number."""
    if theta is None:
        return x
    tokens, _, size = x.shape
    channels = torch.arange(size // 2, dtype=torch.float64)
    angles = (FIRST + torch.arange(tokens, dtype=torch.float64))[:, None] * theta ** (-2 * channels / size)
    turned = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * torch.exp(1j * angles)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def reference_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) * weight


def quadratic(q: Tensor, k: Tensor, v: Tensor, decays: list[float]) -> Tensor:
    """o_t = Σ_{s ≤ t} decay^(t − s) (q_t · k_s) v_s, head by head: q, k [T, H, K], v [T, H, V] → [T, H, V]."""
    distance = torch.arange(q.shape[0])[:, None] - torch.arange(q.shape[0])
    heads = []
    for head, decay in enumerate(decays):
        weights = (decay ** distance.clamp(min=0).double()) * (distance >= 0)
        heads.append((weights * (q[:, head] @ k[:, head].T)) @ v[:, head])
    return torch.stack(heads, dim=1)


def reference_retnet(x: Tensor, p: Parameters, config: RetNetConfig, bound: Tensor | None) -> Tensor:
    q, k, v, gate = (cut(x @ p[f"{name}_proj.weight"].T, config) for name in "qkvg")
    decays = [1 - 2 ** (-5 - head) for head in range(config.num_heads)]
    q, k = (reference_rotation(tensor, config.rope_theta) for tensor in (q, k))
    o = quadratic(q / math.sqrt(config.head_k_dim), k, v, decays)
    normed = reference_norm(o, p["g_norm_swish_gate.weight"], config.norm_eps) * gate / (1 + torch.exp(-gate))
    return normed.flatten(1) @ p["o_proj.weight"].T


def reference_lightning(x: Tensor, p: Parameters, config: LightningConfig, bound: Tensor | None) -> Tensor:
    q, k, v = (cut(F.silu(x @ p[f"{name}_proj.weight"].T), config) for name in "qkv")
    # Five heads: the slopes of four, and the first of eight.
    decays = [math.exp(-(2**-e) * (1 - LAYER / 2 + 1e-5)) for e in (2, 4, 6, 8, 1)]
    q, k = (reference_rotation(tensor, config.rope_theta) for tensor in (q, k))
    normed = reference_norm(quadratic(q, k, v, decays).flatten(1), p["g_norm.weight"], config.norm_eps)
    return (normed / (1 + torch.exp(-(x @ p["g_proj.weight"].T)))) @ p["o_proj.weight"].T


def reference_hgrn(x: Tensor, p: Parameters, config: HGRNConfig, bound: Tensor | None) -> Tensor:
    """Token by token."""
    assert bound is not None
    forget = bound + (1 - bound) / (1 + torch.exp(-(x @ p["f_proj.weight"].T)))
    written = F.silu(x @ p["i_proj.weight"].T) * (1 - forget)
    state, outputs = x.new_zeros(60), []
    for t in range(x.shape[0]):
        state = forget[t] * state + written[t]
        outputs.append(state)
    normed = reference_norm(torch.stack(outputs), p["g_norm.weight"], config.norm_eps)
    return (normed * F.silu(x @ p["g_proj.weight"].T)) @ p["o_proj.weight"].T


def reference_hgrn2(x: Tensor, p: Parameters, config: HGRN2Config, bound: Tensor | None) -> Tensor:
    """Token by token."""
    assert bound is not None
    forget = bound + (1 - bound) / (1 + torch.exp(-(x @ p["f_proj.weight"].T)))
    q, f, i = (cut(tensor, config) for tensor in (F.silu(x @ p["q_proj.weight"].T), forget, x @ p["i_proj.weight"].T))
    state = x.new_zeros(config.num_heads, config.head_dim, config.head_dim)
    outputs = []
    for t in range(x.shape[0]):
        state = f[t][..., None] * state + (1 - f[t])[..., None] * i[t][:, None]
        outputs.append(torch.einsum("hk,hkv->hv", q[t], state) / math.sqrt(config.head_dim))
    # The format's own eps, whatever the configuration's.
    return reference_norm(torch.stack(outputs).flatten(1), p["g_norm.weight"], 1e-5) @ p["o_proj.weight"].T


def cut(x: Tensor, config: LanguageModelConfig) -> Tensor:
    """[T, H · size] → [T, H, size]."""
    return x.unflatten(-1, (config.num_heads, -1))


REFERENCES: dict[str, Callable[..., Tensor]] = {
    "retnet": reference_retnet,
    "lightning": reference_lightning,
    "hgrn": reference_hgrn,
    "hgrn2": reference_hgrn2,
}


def reference_bound(bounds: Tensor | None) -> Tensor | None:
    """HGRN2's lower bound in layer 1: the second term of the softmax over layers."""
    return None if bounds is None else torch.exp(bounds[LAYER]) / torch.exp(bounds).sum(0)


def gradients(y: Tensor, mixer: Mixer, x: Tensor, bounds: Tensor | None) -> dict[str, Tensor]:
    """Of a sum of y with random weights, by name."""
    dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(3))
    leaves = {**dict(mixer.named_parameters()), "x": x, **({} if bounds is None else {"bounds": bounds})}
    return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    """fp64; sums of 75 tokens in another order. Measured at most 1.2e-13."""
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max(), what


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_and_gradients_equal_the_reference(name: str) -> None:
    config = CONFIGS[name]
    mixer, x, bounds = build(config)
    y, reference = whole(mixer, x, bounds), REFERENCES[config.mixer]
    bound = reference_bound(bounds)
    expected = torch.stack([reference(row, dict(mixer.named_parameters()), config, bound) for row in x])
    assert_close(y, expected, "y")
    wanted = gradients(expected, mixer, x, bounds)
    for leaf, gradient in gradients(y, mixer, x, bounds).items():
        assert wanted[leaf].abs().max() > 1e-6, f"{leaf}: the reference does not exercise it"
        assert_close(gradient, wanted[leaf], leaf)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_steps_equal_the_whole_sequence(name: str) -> None:
    mixer, x, bounds = build(CONFIGS[name])
    with torch.no_grad():
        expected, shared = whole(mixer, x, bounds), part(mixer, bounds)
        states = [torch.zeros(BATCH, *shape, dtype=torch.float64) for shape in mixer.state_shapes]
        steps = [
            mixer.step(x[:, t, None], states, torch.full((BATCH,), FIRST + t), shared).squeeze(1) for t in range(TOKENS)
        ]
    assert_close(torch.stack(steps, dim=1), expected, "steps")


def test_sequences_of_a_batch_step_at_their_own_positions() -> None:
    mixer, x, _ = build(RETNET)
    positions = torch.tensor([7, 123456])
    states = [torch.randn(BATCH, *shape, dtype=torch.float64) for shape in mixer.state_shapes]
    with torch.no_grad():
        together = mixer.step(x[:, :1], [state.clone() for state in states], positions, None)
        for row in range(BATCH):
            alone = mixer.step(
                x[row : row + 1, :1], [state[row : row + 1].clone() for state in states], positions[row : row + 1], None
            )
            assert_close(together[row], alone[0], f"row {row}")


@pytest.mark.few(quick=2)
@pytest.mark.parametrize("name", CONFIGS)
def test_two_shards_joined_by_their_state_equal_the_whole_sequence(name: str) -> None:
    mixer, x, bounds = build(CONFIGS[name])
    expected, border, shared = whole(mixer, x, bounds), 32, part(mixer, bounds)
    first, (state_output,) = mixer(x[:, :border], place(0, border), (StateInput(want_carry=True),), shared)
    carry = StateInput(carry_in=state_output.carry_out)
    second, _ = mixer(x[:, border:], place(border, TOKENS), (carry,), shared)
    joined = torch.cat((first, second), dim=1)
    assert_close(joined, expected, "y")
    wanted = gradients(expected, mixer, x, bounds)
    for leaf, gradient in gradients(joined, mixer, x, bounds).items():
        assert_close(gradient, wanted[leaf], leaf)


@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_stays_close_to_fp64(name: str) -> None:
    """The decays are neither parameters nor buffers, so casting the model does not round them."""
    config = CONFIGS[name]
    mixer, x, bounds = build(config)
    narrow = MIXERS[config.mixer](config, LAYER).to(torch.bfloat16)
    narrow.load_state_dict(mixer.state_dict())
    wide = MIXERS[config.mixer](config, LAYER).double()
    wide.load_state_dict(narrow.state_dict())
    shared = part(mixer, bounds)
    with torch.no_grad():
        y, _ = narrow(x.bfloat16(), place(0, TOKENS), (StateInput(),), None if shared is None else shared.float())
        expected, _ = wide(x.bfloat16().double(), place(0, TOKENS), (StateInput(),), shared)
    assert y.dtype == torch.bfloat16
    # Measured at most 0.8 eps.
    assert (y - expected).norm() <= 2 * torch.finfo(torch.bfloat16).eps * expected.norm()


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


def test_compiled_forget_gates_equal_the_written_out_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 8, dtype=torch.float64, generator=generator) * 5
    bound = torch.rand(8, dtype=torch.float64, generator=generator)
    found = []
    for gate in (forget_gate, torch.compile(forget_gate, fullgraph=True, backend="aot_eager")):
        leaves = logits.clone().requires_grad_(), bound.clone().requires_grad_()
        outputs = gate(*leaves)
        weights = [torch.arange(1, 1 + out.numel(), dtype=torch.float64).view(out.shape).sin() for out in outputs]
        found.append([*outputs, *torch.autograd.grad(outputs, leaves, weights)])
    for compiled, plain in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("function", GateFunction)
def test_gated_norms_have_exact_gradients(function: GateFunction) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = GatedRMSNorm(7, 1e-3, function).double()
    with torch.no_grad():
        norm.weight.copy_(torch.randn(7, dtype=torch.float64, generator=generator))
    x, gate = (torch.randn(2, 3, 7, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(2))
    factor = gate.sigmoid() * (gate if function is GateFunction.swish else 1)
    expected = reference_norm(x, norm.weight, 1e-3) * factor
    for run in (norm, torch.compile(norm, fullgraph=True, backend="aot_eager")):
        y = run(x, gate)
        torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-14)
        for ours, theirs in zip(
            *(torch.autograd.grad(out.sin().sum(), (x, gate, norm.weight), retain_graph=True) for out in (y, expected)),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


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


@pytest.mark.slow
def test_compiled_rotations_equal_the_plain_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 6, 3, 8, generator=generator) for _ in range(2))
    positions = 8_000_000 + torch.arange(6)
    compiled = torch.compile(rotate, fullgraph=True, backend="aot_eager")(q, k, positions, 10000.0)
    for ours, plain in zip(compiled, rotate(q, k, positions, 10000.0), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "changes", "field"),
    [
        (RetNetConfig, {"rope_theta": 0.5}, "model.rope_theta"),
        (RetNetConfig, {"rope_theta": math.inf}, "model.rope_theta"),
        # Heads of K 5.
        (LightningConfig, {"hidden_size": 20, "rope_theta": 10000.0}, "model.rope_theta"),
        (LightningConfig, {"num_heads": 3}, "model.num_heads"),
        (RetNetConfig, {"expand_v": 0.001}, "model.expand_v"),
        (HGRN2Config, {"num_heads": 3}, "model.num_heads"),
        (HGRN2Config, {"expand_ratio": 64}, "model.expand_ratio"),
    ],
)
def test_impossible_shapes_are_refused_by_name(
    kind: type[ExpandedHeadsConfig] | type[HGRN2Config], changes: dict[str, float], field: str
) -> None:
    with pytest.raises(ConfigError, match=field):
        kind(**changes)  # type: ignore[arg-type]


def test_heads_of_odd_width_need_no_positions() -> None:
    assert LightningConfig(hidden_size=20).head_k_dim == 5


def test_an_expand_ratio_that_says_the_same_is_left_out() -> None:
    assert HGRN2Config(expand_ratio=32).canonical() == HGRN2Config()
