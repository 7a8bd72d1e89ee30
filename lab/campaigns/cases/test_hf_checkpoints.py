"""More models that fla's and transformers' own classes have saved: logits, training on from them, and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models.mixers.retnet import RetNetConfig
from tests.hf import test_fla_checkpoints as fla_gate
from tests.hf import test_transformers_models as gate
from tests.hf.logits import error, our_logits
from tests.hf.test_fla_checkpoints import (
    ATTENTION,
    GATED,
    UNFUSED,
    fla_classes,
    fla_model,
    their_logits,
    tokens,
    with_attention,
)
from tests.hf.test_transformers_models import MAMBA, OLMO, QWEN, ROPE, WIDTH, exported
from tests.support.model_card import run_snippet
from zeco_train.hf.folder import INDEX_FILE
from zeco_train.training.config import Dtype

# Fixtures.
__all__ = ["exported", "with_attention"]
pytestmark = [pytest.mark.campaign, pytest.mark.numeric]
OF_FLA: dict[str, tuple[str, dict[str, Any]]] = {
    "retnet": ("retnet", {"num_heads": 4}),
    "hgrn2 by width": ("hgrn2", {"expand_ratio": 12}),
    "gla, unfused, groups": ("gla", {"num_heads": 4, "num_kv_heads": 2, "feature_map": "relu", "fuse_norm": False}),
    "gla, no gate, tied": ("gla", {"use_output_gate": False, "clamp_min": -0.3, "tie_word_embeddings": True}),
    "retnet, tied": ("retnet", {"num_heads": 2, "tie_word_embeddings": True, "hidden_ratio": None}),
    "hgrn": ("hgrn", {}),
    "gsa": ("gsa", {"num_heads": 4, "num_slots": 5}),
    "gsa, groups, as many slots as channels": (
        "gsa",
        {"num_heads": 4, "num_kv_heads": 2, "num_slots": None, "feature_map": "relu", "gate_logit_normalizer": 3},
    ),
    "hybrid of gsa": ("gsa", {"num_heads": 4, "num_slots": 5, "attn": {**ATTENTION, "layers": [1]}}),
    "hgrn of another width, unfused": ("hgrn", {"expand_ratio": 2, **UNFUSED}),
    "hgrn2 by heads, unfused": (
        "hgrn2",
        {"num_heads": 4, "expand_ratio": None, "attn_mode": "fused_chunk", **UNFUSED},
    ),
    "hgrn2 by width and other heads": ("hgrn2", {"num_heads": 3, "expand_ratio": 8}),
    "hgrn2 of one layer, tied": (
        "hgrn2",
        {"expand_ratio": 24, "num_hidden_layers": 1, "tie_word_embeddings": True, "hidden_ratio": 3},
    ),
    "gated_deltanet, no gate, tied": (
        "gated_deltanet",
        {**GATED, "num_v_heads": None, "use_gate": False, "allow_neg_eigval": True, "tie_word_embeddings": True},
    ),
    "delta_net": ("delta_net", {"num_heads": 4, "expand_k": 0.5, "use_gate": True}),
    "kda": ("kda", {**GATED, "allow_neg_eigval": True}),
    "hybrid of gla": ("gla", {"num_heads": 4, "attn": {"layers": [0, 2], "num_heads": 6}}),
    "hybrid of retnet": ("retnet", {"num_heads": 4, "attn": {**ATTENTION, "layers": [2, 1]}}),
    "hybrid of hgrn2 in a list": ("hgrn2", {"expand_ratio": 12, "attn": [ATTENTION]}),
}
TRAINED_ON: dict[str, tuple[dict[str, Any], list[str]]] = {
    "retnet": ({"num_heads": 2, "expand_v": 1.5, "num_kv_heads": 2}, ["expand_v=1.5"]),
    "hgrn2": ({"expand_ratio": 16, "num_heads": 2}, ["num_heads=3"]),
    "delta_net": (
        {"num_heads": 4, "expand_k": 0.5, "use_gate": True},
        ["num_heads=4", "expand_k=0.5", "use_gate=true"],
    ),
    "kda": ({**GATED, "allow_neg_eigval": True}, [f"{key}={value}" for key, value in GATED.items()]),
}
OF_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2, clamped, no bias, tied": (
        "Mamba2ForCausalLM",
        {
            **WIDTH,
            **MAMBA,
            "num_hidden_layers": 2,
            "n_groups": 1,
            "time_step_limit": [0.5, 1.5],
            "use_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "olmo, rotated, equal widths, tied": (
        "OlmoHybridForCausalLM",
        {
            **OLMO,
            "rope_parameters": ROPE,
            "rms_norm_eps": 1e-3,
            "linear_num_value_heads": 2,
            "linear_value_head_dim": 8,
            "linear_allow_neg_eigval": False,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
    ),
    "qwen, all rotated, layers elsewhere, tied": (
        "Qwen3_5ForCausalLM",
        {
            **QWEN,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0, "mrope_section": [3, 3, 2]},
            # As some versions of transformers write it.
            "partial_rotary_factor": 1.0,
            "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
            "tie_word_embeddings": True,
        },
    ),
}


@pytest.mark.parametrize("case", OF_FLA)
def test_checkpoint_of_fla_gives_its_logits(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fla_gate.CHECKPOINTS, case, OF_FLA[case])
    fla_gate.test_checkpoint_of_fla_gives_its_logits(case, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", TRAINED_ON)
def test_training_on_keeps_the_weights(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fla_gate.TRAINED_ON, name, TRAINED_ON[name])
    fla_gate.test_training_from_checkpoint_of_fla_and_export_keep_its_weights(name, tmp_path)


@pytest.mark.parametrize("case", OF_TRANSFORMERS)
def test_model_of_transformers_gives_its_logits(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gate.CHECKPOINTS, case, OF_TRANSFORMERS[case])
    gate.test_model_of_transformers_gives_its_logits(case, tmp_path)


def test_heads_of_retnet_are_bounded_in_fla() -> None:
    """Why we do not export wider ones."""
    kind, model = fla_classes("retnet")
    wide = RetNetConfig(hidden_size=1024, num_heads=2)
    with torch.device("meta"), pytest.raises(AssertionError, match="less than or equal to 256"):
        model(kind(hidden_size=wide.hidden_size, num_heads=wide.num_heads, num_hidden_layers=1))


def test_lines_of_the_model_card_run(exported: tuple[str, Path, Path]) -> None:
    """With the byte tokenizer, and without a GPU although fla is installed."""
    assert run_snippet(exported[2]).startswith("Once")


@pytest.mark.parametrize("case", ["retnet", "hgrn2 by width"])
def test_bf16_checkpoint_in_several_files_gives_its_logits(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rounded weights are computed with in fp64 on both sides."""
    name, settings = OF_FLA[case]
    theirs = fla_model(name, settings).bfloat16()
    theirs.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert (tmp_path / INDEX_FILE).is_file()
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    expected = their_logits(name, theirs, Dtype.fp64, monkeypatch)
    assert error(our_logits(tmp_path, tokens(), Dtype.fp64), expected) <= 1e-12
    # Rounding of activations.
    assert error(our_logits(tmp_path, tokens(), Dtype.bf16), expected) <= 4e-2
