"""Files of `configs/model`, and each mixer beside the model of fla (Lightning Attention: of transformers)."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from models.config import LanguageModelConfig
from models.formats.format_registry import formats_of
from models.mixer_registry import MIXERS
from models.mixers.delta_net import DeltaNetConfig
from models.mixers.gated_deltanet import GatedDeltaNetConfig
from models.mixers.gla import FeatureMap, GLAConfig
from models.mixers.gsa import GSAConfig
from models.mixers.hgrn import HGRNConfig
from models.mixers.hgrn2 import HGRN2Config
from models.mixers.kda import KDAConfig
from models.mixers.lightning import LightningAttention, LightningConfig
from models.mixers.retnet import RetNetConfig
from models.spec import ModelSpec, spec_of
from tests.support.fla_reference import use_decay_references, use_delta_references
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs" / "model"
PARAMETERS = {
    "gla_tiny": 932_096, "gla_125m": 127_255_296, "gla_340m": 341_707_776, "gla_1b": 1_159_766_528,
    "gla_1.3b": 1_365_514_240,
    "retnet_tiny": 1_181_824, "retnet_340m": 347_397_120, "retnet_1b": 1_148_279_808, "retnet_1.3b": 1_351_727_104,
    "lightning_tiny": 985_472, "lightning_340m": 347_415_552, "lightning_1b": 1_179_772_928,
    "hgrn_tiny": 920_448, "hgrn_340m": 341_148_672, "hgrn_1b": 1_158_842_368,
    "hgrn2_tiny": 920_448, "hgrn2_340m": 341_148_672, "hgrn2_1b": 1_158_842_368,
    "gated_deltanet_tiny": 995_360, "gated_deltanet_340m": 347_120_124, "gated_deltanet_1b": 1_208_318_896,
    "gated_deltanet_1.3b": 1_387_348_732,
    "gsa_tiny": 985_472, "gsa_340m": 347_415_552, "gsa_1.3b": 1_376_929_792,
    "delta_net_tiny": 927_744, "delta_net_340m": 341_594_112, "delta_net_1b": 1_159_909_888,
    "kda_tiny": 994_320, "kda_340m": 354_226_368, "kda_1b": 1_180_963_648,
}  # fmt: skip
# No dimension equals another, so that a wrong transposition or reshape cannot pass.
WIDTHS: dict[str, Any] = {"vocab_size": 29, "hidden_size": 24, "num_layers": 2, "intermediate_size": 20, "num_heads": 3}
SHARED: dict[str, Any] = {**WIDTHS, "num_v_heads": 6, "head_dim": 5, "expand_v": 2.0, "conv_size": 3, "norm_eps": 1e-3}
GATED, KDA = GatedDeltaNetConfig(**SHARED), KDAConfig(**SHARED)
DELTA = DeltaNetConfig(**WIDTHS, expand_k=0.625, expand_v=1.25, conv_size=3, norm_eps=1e-3)
SMALL: dict[str, LanguageModelConfig] = {
    "gla": GLAConfig(**WIDTHS, expand_v=1.25),
    "gla, tied": GLAConfig(**WIDTHS, expand_v=1.25, tie_word_embeddings=True),
    "retnet": RetNetConfig(**WIDTHS, expand_v=1.25, norm_eps=1e-3),
    "hgrn": HGRNConfig(**{**WIDTHS, "num_layers": 3}, expand_ratio=2, norm_eps=1e-3),
    "hgrn2": HGRN2Config(**{**WIDTHS, "num_layers": 3}, norm_eps=1e-3),
    "gsa": GSAConfig(**WIDTHS, expand_k=0.625, num_slots=7, norm_eps=1e-3),
    "gsa, groups, relu": GSAConfig(
        **{**WIDTHS, "num_heads": 6}, num_kv_heads=2, gate_logit_normalizer=2, num_slots=3, feature_map=FeatureMap.relu
    ),
    "gated_deltanet": GATED,
    "gated_deltanet, no gate, negative eigenvalues": dataclasses.replace(GATED, use_gate=False, allow_neg_eigval=True),
    "gated_deltanet, as many heads of keys": dataclasses.replace(GATED, num_v_heads=None),
    "delta_net": DELTA,
    "delta_net, gate, negative eigenvalues": dataclasses.replace(DELTA, use_gate=True, allow_neg_eigval=True),
    "kda": KDA,
    "kda, negative eigenvalues": dataclasses.replace(KDA, allow_neg_eigval=True),
}


def load_config(name: str) -> LanguageModelConfig:
    kind = MIXERS[name.rpartition("_")[0]].config_class
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


def in_fla(config: LanguageModelConfig, name: str) -> str:
    """fla's name of a parameter."""
    for own, theirs in formats_of(config)[0].names.parts.items():
        name = name.replace(own, theirs)
    return name


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_files_hold_the_parameters_that_they_name(name: str) -> None:
    config, count = load_config(name), PARAMETERS[name]
    assert config.name == name
    assert spec_of(config).num_parameters == count
    told = f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.0f}M" if count >= 1e8 else f"{count / 1e6:.2f}M"
    assert (CONFIG_DIR / f"{name}.yaml").read_text().startswith(f"# {told} parameters")
    if name.endswith("_tiny"):
        assert MIXERS[config.mixer].config_class() == config


@pytest.mark.slow
@pytest.mark.few(8)
@pytest.mark.parametrize("name", [*SMALL, *(name for name in PARAMETERS if not name.startswith("lightning"))])
def test_parameter_names_and_shapes_equal_fla(name: str) -> None:
    config = SMALL[name] if name in SMALL else load_config(name)
    with torch.device("meta"):
        ours, theirs = ModelSpec(config).build(), fla_model(config)
    for found, expected in (
        (ours.state_dict(), theirs.state_dict()),
        (dict(ours.named_parameters()), dict(theirs.named_parameters())),
    ):
        assert {in_fla(config, key): x.shape for key, x in found.items()} == {k: x.shape for k, x in expected.items()}
    # Counted on fla's model, so that parameters added by a default of its layer would show.
    assert sum(p.numel() for p in theirs.parameters()) == spec_of(config).num_parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_logits_equal_fla(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fla's model with its Triton kernels replaced by fla's plain references, and with our weights."""
    config = SMALL[name]
    is_delta = isinstance(config, GatedDeltaNetConfig | KDAConfig | DeltaNetConfig)
    (use_delta_references if is_delta else use_decay_references)(monkeypatch)
    ours = ModelSpec(config).build()
    ours.init_weights(0)
    with torch.no_grad():
        for parameter in ours.parameters():
            # Larger than initialised and no weight at 1 or 0, so that every path matters.
            waves = torch.sin(torch.arange(parameter.numel())).view(parameter.shape)
            parameter.mul_(5 if parameter.ndim > 1 else 1).add_(0.1 * waves)
    theirs = fla_model(config).eval()
    theirs.load_state_dict({in_fla(config, key): x for key, x in ours.state_dict().items()})
    ids = torch.arange(80).reshape(2, 40) * 7 % 29
    with torch.no_grad():
        logits = ours(ids, SequencePosition((0, 40), exchange=local_exchange()))
        expected = theirs(ids, use_cache=False).logits
    # fp32 on both sides, since fla's naive recurrences support no other dtype.
    torch.testing.assert_close(logits, expected, rtol=2e-5, atol=2e-5)
    assert 1 < expected.abs().max() < 20


@pytest.mark.slow
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
