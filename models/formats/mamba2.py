"""Mamba-2 in transformers. fla's model of the same name reads the files as well, by other names of two keys."""

from __future__ import annotations

import math
from typing import Any

from models.formats.format import Keys, ModelFormat, Names, in_json
from models.mixers.mamba2 import Mamba2, Mamba2Config

_KEYS = {
    "vocab_size": 32768,
    "hidden_size": 4096,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 8,
    "expand": 2,
    "conv_kernel": 4,
    "time_step_min": 0.001,
    "time_step_max": 0.1,
    "time_step_floor": 1e-4,
    "use_conv_bias": True,
    "residual_in_fp32": True,
}
_OTHER_LAYER = "another one than transformers' layer has"


def _read(keys: Keys) -> dict[str, Any]:
    keys.only(
        {
            "attn": (None, "layers of softmax attention"),
            "hidden_act": ("silu", "another activation"),
            "intermediate_size": (0, _OTHER_LAYER),
            "use_bias": (False, "biases of the projections"),
            "zero_centred_norms": (False, _OTHER_LAYER),
            # Of fla's model.
            "D_has_hdim": (False, "a skip connection by channel"),
            "norm_before_gate": (False, "a norm before the gate"),
            "rmsnorm": (True, "layers without a norm"),
        }
    )
    return {
        **keys.values(_KEYS),
        "num_layers": keys.value("num_hidden_layers", int, 64),
        "intermediate_size": 0,
        "norm_eps": keys.value(keys.either("layer_norm_epsilon", "norm_eps"), float, 1e-5),
        "time_step_limit": keys.pair(keys.either("time_step_limit", "dt_limit"), (0.0, math.inf)),
    }


def _write(model: Mamba2Config, seq_len: int) -> dict[str, Any]:
    limit = [in_json(value) for value in model.time_step_limit]
    return {
        **{key: getattr(model, key) for key in _KEYS},
        "chunk_size": 256,
        "dt_limit": limit,
        "hidden_act": "silu",
        "layer_norm_epsilon": model.norm_eps,
        "norm_eps": model.norm_eps,
        "rescale_prenorm_residual": False,
        "time_step_limit": limit,
        "use_bias": False,
    }


def _remark(model: Mamba2Config) -> str:
    text = "Its gated norm is of each group of channels, as in mamba_ssm: use transformers ≥ 5.23.0."
    return text if model.n_groups != 1 else ""


MAMBA2 = ModelFormat(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    library="transformers",
    mixer=Mamba2,
    read=_read,
    write=_write,
    names=Names(
        {
            "model.norm.": "backbone.norm_f.",
            "model.": "backbone.",
            ".attn_norm.": ".norm.",
            ".attn.decay.": ".mixer.",
            ".attn.": ".mixer.",
        }
    ),
    remark=_remark,
)
