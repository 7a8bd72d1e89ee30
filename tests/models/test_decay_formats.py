"""RetNet, Lightning Attention, HGRN and HGRN2: configuration files; agreement with fla's and transformers' layers."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from models.config import LanguageModelConfig
from models.formats.registry import formats_of
from models.language_model import LanguageModel
from models.mixers.hgrn import HGRNConfig
from models.mixers.hgrn2 import HGRN2Config
from models.mixers.lightning import LightningAttention, LightningConfig
from models.mixers.retnet import RetNetConfig
from models.registry import MIXERS
from models.spec import ModelSpec, spec_of
from tests.support.fla_reference import use_decay_references
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import StateInput
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs" / "model"
PARAMETERS = {
    "retnet_tiny": 1_181_824,
    "retnet_340m": 347_397_120,
    "retnet_1b": 1_148_279_808,
    "lightning_tiny": 985_472,
    "lightning_340m": 347_415_552,
    "lightning_1b": 1_179_772_928,
    "hgrn_tiny": 920_448,
    "hgrn_340m": 341_148_672,
    "hgrn_1b": 1_158_842_368,
    "hgrn2_tiny": 920_448,
    "hgrn2_340m": 341_148_672,
    "hgrn2_1b": 1_158_842_368,
}
# Keys of our configurations that fla's take under the same name.
SMALL: dict[str, LanguageModelConfig] = {
    "retnet": RetNetConfig(
        vocab_size=29, hidden_size=24, num_layers=2, num_heads=3, expand_v=1.25, intermediate_size=20, norm_eps=1e-3
    ),
    "hgrn": HGRNConfig(
        vocab_size=29, hidden_size=24, num_layers=3, num_heads=3, expand_ratio=2, intermediate_size=20, norm_eps=1e-3
    ),
    "hgrn2": HGRN2Config(vocab_size=29, hidden_size=24, num_layers=3, num_heads=3, intermediate_size=20, norm_eps=1e-3),
}


def load_config(name: str) -> LanguageModelConfig:
    kind = MIXERS[name.split("_")[0]].config_class
    merged = OmegaConf.merge(OmegaConf.structured(kind), OmegaConf.load(CONFIG_DIR / f"{name}.yaml"))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, kind)
    return config


def fla_model(config: LanguageModelConfig) -> Any:
    """fla's model of the same shape, by the names in its format."""
    fla = formats_of(config)[0]
    models = importlib.import_module("fla.models")
    kind = getattr(models, fla.architecture.replace("ForCausalLM", "Config"))
    assert kind.model_type == fla.model_type
    return getattr(models, fla.architecture)(kind(**fla.write(config, 128), num_hidden_layers=config.num_layers))


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", PARAMETERS)
def test_files_hold_the_parameters_that_they_name(name: str) -> None:
    config = load_config(name)
    assert config.name == name
    assert spec_of(config).num_parameters == PARAMETERS[name]
    count = PARAMETERS[name]
    told = f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.0f}M" if count >= 1e8 else f"{count / 1e6:.2f}M"
    assert (CONFIG_DIR / f"{name}.yaml").read_text().startswith(f"# {told} parameters")


@pytest.mark.parametrize("mixer", ["retnet", "lightning", "hgrn", "hgrn2"])
def test_defaults_equal_the_tiny_model(mixer: str) -> None:
    assert MIXERS[mixer].config_class() == load_config(f"{mixer}_tiny")


@pytest.mark.parametrize("name", [name for name in PARAMETERS if not name.startswith("lightning")])
def test_parameter_names_and_shapes_equal_fla(name: str) -> None:
    config = load_config(name)
    with torch.device("meta"):
        ours, theirs = ModelSpec(config).build(), fla_model(config)
    assert shapes(ours.state_dict()) == shapes(theirs.state_dict())
    assert shapes(dict(ours.named_parameters())) == shapes(dict(theirs.named_parameters()))


def large_weights(model: LanguageModel) -> None:
    """Larger than initialised and no weight at 1 or 0, so that every path matters."""
    model.init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            waves = torch.sin(torch.arange(parameter.numel())).view(parameter.shape)
            parameter.mul_(5 if parameter.ndim > 1 else 1).add_(0.1 * waves)


@pytest.mark.parametrize("mixer", SMALL)
def test_logits_equal_fla(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fla's model with its Triton kernels replaced by fla's plain references, and with our weights."""
    use_decay_references(monkeypatch)
    config = SMALL[mixer]
    ours = ModelSpec(config).build()
    large_weights(ours)
    theirs = fla_model(config).eval()
    theirs.load_state_dict(ours.state_dict())
    ids = torch.arange(80).reshape(2, 40) * 7 % 29
    with torch.no_grad():
        logits = ours(ids, SequencePosition((0, 40), exchange=local_exchange()))
        expected = theirs(ids, use_cache=False).logits
    # fp32 on both sides, since fla's naive recurrences support no other dtype.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert 1 < expected.abs().max() < 20


def test_lightning_layers_equal_minimax() -> None:
    """The layer of transformers, whose heads hold q, k and v beside each other in one projection."""
    minimax = importlib.import_module("transformers.models.minimax.modeling_minimax")
    # With 65 layers, so that its 1e-5 in the denominator, which the original has not, changes less than a rounding.
    config = LightningConfig(hidden_size=24, num_heads=4, num_layers=65, norm_eps=1e-6)
    layer = 3
    theirs = minimax.MiniMaxLightningAttention(
        SimpleNamespace(
            hidden_size=24,
            num_attention_heads=4,
            num_hidden_layers=65,
            block_size=16,
            hidden_act="silu",
            layer_types=["linear_attention"] * 65,
        ),
        layer,
    )
    ours = LightningAttention(config, layer)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        q, k, v = theirs.qkv_proj.weight.view(4, 3, 6, 24).unbind(1)
        pairs = {
            ours.q_proj: q.flatten(0, 1),
            ours.k_proj: k.flatten(0, 1),
            ours.v_proj: v.flatten(0, 1),
            ours.g_proj: theirs.output_gate.weight,
            ours.o_proj: theirs.out_proj.weight,
            ours.g_norm: theirs.norm.weight,
        }
        for module, weight in pairs.items():
            module.weight.copy_(weight)
        x, scan = torch.randn(2, 50, 24, generator=generator), local_exchange()
        expected, _ = theirs(x, position_embeddings=None, attention_mask=None)
        y, _ = ours(x, SequencePosition((0, 50), exchange=scan).on(x), (StateInput(),), None)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
