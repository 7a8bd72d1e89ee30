"""Gated DeltaNet in fla. Hybrids of transformers with the same mixer: `olmo_hybrid`, `qwen3_5`."""

from __future__ import annotations

from typing import Any

from models.formats.fla import OTHER_LAYER, read_common, write_common
from models.formats.format import ModelFormat, Names
from models.formats.keys import Keys
from models.mixers.gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig

_KEYS = {
    "num_heads": 6,
    "head_dim": 256,
    "expand_v": 2.0,
    "conv_size": 4,
    "use_gate": True,
    "allow_neg_eigval": False,
}


def _read(keys: Keys) -> dict[str, Any]:
    keys.only(
        {
            "conv_bias": (False, "convolutions with a bias"),
            "o_norm_eps": (None, OTHER_LAYER),
            "output_gate_activation": ("swish", "another function of the output gate"),
            "use_short_conv": (True, "layers without short convolutions"),
        }
    )
    return {**read_common(keys, layers=21), **keys.values(_KEYS), "num_v_heads": keys.optional("num_v_heads")}


def _write(model: GatedDeltaNetConfig, seq_len: int) -> dict[str, Any]:
    return {
        **write_common(model, seq_len),
        **{key: getattr(model, key) for key in (*_KEYS, "num_v_heads")},
        "output_gate_activation": "swish",
        "use_short_conv": True,
    }


GATED_DELTANET = ModelFormat(
    model_type="gated_deltanet",
    architecture="GatedDeltaNetForCausalLM",
    library="fla",
    mixer=GatedDeltaNet,
    read=_read,
    write=_write,
    names=Names({".attn.decay.": ".attn."}),
)
