"""Kimi Delta Attention in fla."""

from __future__ import annotations

from typing import Any

from models.formats.fla import read_common, write_common
from models.formats.format import ModelFormat, Names
from models.formats.keys import Keys
from models.mixers.kda import KDAConfig, KimiDeltaAttention

_KEYS = {"num_heads": 16, "head_dim": 128, "expand_v": 1.0, "conv_size": 4, "allow_neg_eigval": False}


def _read(keys: Keys) -> dict[str, Any]:
    keys.only(
        {
            "conv_bias": (False, "convolutions with a bias"),
            "lower_bound": (None, "decays with a lower bound"),
            "safe_gate": (False, "decays with a lower bound"),
            "use_short_conv": (True, "layers without short convolutions"),
        }
    )
    return {**read_common(keys), **keys.values(_KEYS), "num_v_heads": keys.optional("num_v_heads")}


def _write(model: KDAConfig, seq_len: int) -> dict[str, Any]:
    return {
        **write_common(model, seq_len),
        **{key: getattr(model, key) for key in (*_KEYS, "num_v_heads")},
        "lower_bound": None,
        "safe_gate": False,
        "use_short_conv": True,
    }


KDA = ModelFormat(
    model_type="kda",
    architecture="KDAForCausalLM",
    library="fla",
    mixer=KimiDeltaAttention,
    read=_read,
    write=_write,
    names=Names({".attn.decay.": ".attn."}),
)
