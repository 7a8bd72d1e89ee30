"""The GLA model's shapes and weights: configurations, parity with fla, parameter counts, initial weights, decay."""

from __future__ import annotations

import dataclasses
import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from models.mixers.gla import GLAConfig
from models.modules import ShortConvolution
from models.parameters import parameter_rules
from models.registry import MIXERS
from models.spec import ModelSpec, spec_of
from tests.support.fla_reference import use_references
from zeco_train.errors import ConfigError
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs" / "model"
PARAMETERS = {"gla_tiny": 932_096, "gla_125m": 127_255_296, "gla_340m": 341_707_776, "gla_1b": 1_159_766_528}
WIDTH_RULE = "hidden_size (128) times it must be a multiple of num_heads (4)"


def load_config(name: str) -> GLAConfig:
    merged = OmegaConf.merge(OmegaConf.structured(GLAConfig), OmegaConf.load(CONFIG_DIR / f"{name}.yaml"))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, GLAConfig)
    return config


def fla_config(config: GLAConfig) -> Any:
    from fla.models import GLAConfig as FlaConfig

    same = ("vocab_size", "hidden_size", "num_heads", "expand_k", "expand_v", "intermediate_size", "norm_eps")
    return FlaConfig(
        num_hidden_layers=config.num_layers,
        tie_word_embeddings=config.tie_word_embeddings,
        **{field: getattr(config, field) for field in same},
    )


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_parameter_counts_match_built_models(name: str) -> None:
    config = load_config(name)
    with torch.device("meta"):
        model = ModelSpec(config).build()
    print(f"{name}: {spec_of(config).num_parameters:,} parameters")
    assert config.name == name
    assert spec_of(config).num_parameters == sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.few
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_parameter_names_and_shapes_equal_fla(name: str, tied: bool) -> None:
    fla_models = importlib.import_module("fla.models")
    config = dataclasses.replace(load_config(name), tie_word_embeddings=tied)
    with torch.device("meta"):
        ours, theirs = ModelSpec(config).build(), fla_models.GLAForCausalLM(fla_config(config))
    assert shapes(ours.state_dict()) == shapes(theirs.state_dict())
    assert shapes(dict(ours.named_parameters())) == shapes(dict(theirs.named_parameters()))
    # Counted on fla's model, so that parameters added by a default of its layer would show.
    assert sum(p.numel() for p in theirs.parameters()) == spec_of(config).num_parameters


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_fla(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """fla's model with its Triton kernels replaced by fla's plain references, and with our weights."""
    fla_models = importlib.import_module("fla.models")
    use_references(monkeypatch)
    config = GLAConfig(
        vocab_size=29,
        hidden_size=24,
        num_layers=2,
        num_heads=3,
        expand_v=1.25,
        intermediate_size=20,
        tie_word_embeddings=tied,
    )
    ours = ModelSpec(config).build()
    ours.init_weights(0)
    with torch.no_grad():
        for parameter in ours.parameters():
            # Larger than initialised and no weight at 1, so that every path matters.
            parameter.mul_(5 if parameter.ndim > 1 else 1).add_(0.1 * torch.sin(torch.arange(parameter.shape[-1])))
    theirs = fla_models.GLAForCausalLM(fla_config(config)).eval()
    theirs.load_state_dict(ours.state_dict())
    ids = torch.arange(80).reshape(2, 40) * 7 % 29
    logits = ours(ids, SequencePosition((0, 40), exchange=local_exchange()))
    expected = theirs(ids, use_cache=False).logits
    # fp32 on both sides, since fla's naive recurrence supports no other dtype.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert 1 < expected.abs().max() < 20


def test_defaults_equal_tiny_model() -> None:
    assert GLAConfig() == load_config("gla_tiny")


def test_initial_weights_depend_only_on_seed() -> None:
    config = load_config("gla_tiny")
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
    model = ModelSpec(load_config("gla_tiny")).build()
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "model.num_layers=0: must be a whole number ≥ 1"),
        ({"vocab_size": -3}, "model.vocab_size=-3: must be a whole number ≥ 1"),
        ({"gate_low_rank_dim": 0}, "model.gate_low_rank_dim=0: must be a whole number ≥ 1"),
        ({"norm_eps": 0.0}, "model.norm_eps=0.0: must be finite and > 0"),
        ({"expand_v": float("nan")}, "model.expand_v=nan: must be finite and > 0"),
        ({"expand_k": 0.3}, f"model.expand_k=0.3: {WIDTH_RULE}; nearest: 0.3125"),
        ({"expand_k": 1e-9}, f"model.expand_k=1e-09: {WIDTH_RULE}; nearest: 0.03125"),
        (
            {"num_heads": 5},
            "model.num_heads=5: must divide hidden_size · expand_k = 64 and hidden_size · expand_v = 128; nearest: 4",
        ),
        (
            {"expand_v": 1.015625},
            "model.num_heads=4: must divide hidden_size · expand_k = 64 and hidden_size · expand_v = 130; nearest: 2",
        ),
    ],
)
def test_invalid_shapes_are_refused_with_one_line(change: dict[str, Any], message: str) -> None:
    merged = OmegaConf.merge(OmegaConf.structured(GLAConfig), change)
    with pytest.raises(ConfigError) as error:
        OmegaConf.to_object(merged)
    assert str(error.value) == message


@pytest.mark.parametrize("mixer", MIXERS)
def test_weight_decay_applies_to_weights_of_linear_layers_embedding_and_convolutions_only(mixer: str) -> None:
    with torch.device("meta"):
        model = ModelSpec(MIXERS[mixer].config_class()).build()
    modules = dict(model.named_modules())
    for name, _, rule in parameter_rules(model):
        owner, _, own = name.rpartition(".")
        of_matrices = isinstance(modules[owner], nn.Linear | nn.Embedding | ShortConvolution)
        assert rule.decays == (of_matrices and own == "weight"), name
