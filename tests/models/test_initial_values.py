"""Initial weights: of one generator, by any number of threads; their distribution, ties, and weight decay."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from models import initial_values
from models.initial_values import jump
from models.mixer_registry import MIXERS
from models.mixers.gla import GLAConfig
from models.modules import ShortConvolution
from models.parameters import parameter_rules
from models.spec import ModelSpec, spec_of
from zeco_train.config.schema import load_config

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize(("before", "draws"), [(0, 1), (0, 624), (1, 623), (16, 608), (623, 2), (1000, 100_000)])
def test_jump_advances_generator_as_drawing_does(before: int, draws: int) -> None:
    jumped, drawn = (torch.Generator().manual_seed(3) for _ in range(2))
    for generator in (jumped, drawn)[: 2 * bool(before)]:
        torch.empty(before).uniform_(generator=generator)
    jump(jumped, draws)
    torch.empty(draws).uniform_(generator=drawn)
    ours, plain = (torch.empty(2000).normal_(generator=generator) for generator in (jumped, drawn))
    assert torch.equal(ours, plain)


# With convolutions, time steps and rates, and with sizes that take more numbers than values.
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "settings",
    [["model=kda_tiny"], ["model=mamba2_tiny"], ["model=gla_tiny", "model.vocab_size=259", "model.hidden_size=72"]],
)
def test_threads_draw_what_one_generator_does(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(load_config([*settings, "model.num_layers=2"]).model)
    threaded, plain = spec.build(), spec.build()
    jumps = []
    monkeypatch.setattr(initial_values, "_SHARE", spec.num_parameters // 6)
    monkeypatch.setattr(initial_values, "jump", lambda generator, draws: jumps.append(draws) or jump(generator, draws))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    threaded.init_weights(5)
    assert len(jumps) > 2
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter, rule in parameter_rules(plain):
            rule.init(parameter, spec.config.initializer_range, generator)
    for (name, ours), other in zip(threaded.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, other), name


def test_initial_weights_depend_only_on_seed() -> None:
    config = GLAConfig()
    weights = {}
    for label, dtype, device, seed in (
        ("first", torch.float32, "cpu", 7),
        ("again", torch.float32, "cpu", 7),
        ("meta", torch.float32, "meta", 7),
        ("fp64", torch.float64, "cpu", 7),
        ("other", torch.float32, "cpu", 8),
    ):
        torch.manual_seed(len(weights))  # the global generator must not matter
        with torch.device(device):
            model = ModelSpec(config).build().to(dtype)
        model.to_empty(device="cpu").init_weights(seed) if device == "meta" else model.init_weights(seed)
        weights[label] = {name: p.detach().double() for name, p in model.named_parameters()}
    for label in ("again", "meta", "fp64"):
        for name, value in weights["first"].items():
            assert torch.equal(value, weights[label][name]), f"{label}: {name}"
    assert not torch.equal(weights["first"]["lm_head.weight"], weights["other"]["lm_head.weight"])


def test_initial_weights_are_distributed_as_in_fla() -> None:
    model = ModelSpec(GLAConfig()).build()
    model.init_weights(0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:
            # The standard error of mean and deviation of n normal draws is about 0.02 / √n; five times that is safe.
            error = 5 * 0.02 / math.sqrt(parameter.numel())
            assert abs(parameter.mean().item()) < error, name
            assert abs(parameter.std().item() - 0.02) < error, name


def test_tied_weights_stay_tied_after_to_empty() -> None:
    with torch.device("meta"):
        model = ModelSpec(GLAConfig(tie_word_embeddings=True)).build()
    model.to_empty(device="cpu").init_weights(0)
    assert model.lm_head.weight is model.model.embeddings.weight
    assert sum(p.numel() for p in model.parameters()) == spec_of(model.config).num_parameters


@pytest.mark.parametrize("mixer", MIXERS)
def test_weight_decay_applies_to_weights_of_linear_layers_embedding_and_convolutions_only(mixer: str) -> None:
    with torch.device("meta"):
        model = ModelSpec(MIXERS[mixer].config_class()).build()
    modules = dict(model.named_modules())
    for name, _, rule in parameter_rules(model):
        owner, _, own = name.rpartition(".")
        of_matrices = isinstance(modules[owner], nn.Linear | nn.Embedding | ShortConvolution)
        assert rule.decays == (of_matrices and own == "weight"), name
