"""Mamba and Mamba-2 in transformers. fla's models read Mamba-2's files as well, by other names of two keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from models.formats.format import Keys, ModelFormat, Names, in_json
from models.mixers.mamba1 import Mamba1, Mamba1Config
from models.mixers.mamba2 import Mamba2, Mamba2Config

_COMMON = {
    "initializer_range": 0.1,
    "expand": 2,
    "conv_kernel": 4,
    "time_step_min": 0.001,
    "time_step_max": 0.1,
    "time_step_floor": 1e-4,
    "use_conv_bias": True,
    "residual_in_fp32": True,
}
_MAMBA1 = {**_COMMON, "vocab_size": 50280, "hidden_size": 768, "state_size": 16, "tie_word_embeddings": True}
_MAMBA2 = {
    **_COMMON,
    "vocab_size": 32768,
    "hidden_size": 4096,
    "tie_word_embeddings": False,
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 8,
}
_OTHER_LAYER = "another one than transformers' layer has"
_ONLY: Mapping[str, tuple[Any, str]] = {
    "attn": (None, "layers of softmax attention"),
    "hidden_act": ("silu", "another activation"),
    "use_bias": (False, "biases of the projections"),
    "zero_centred_norms": (False, _OTHER_LAYER),
}
_NAMES = {
    "model.norm.": "backbone.norm_f.",
    "model.": "backbone.",
    ".attn_norm.": ".norm.",
    ".attn.decay.": ".mixer.",
    ".attn.": ".mixer.",
}


def _read_mamba1(keys: Keys) -> dict[str, Any]:
    # fla's class of the same name has other keys.
    keys.only({**_ONLY, "norm_eps": (None, "another key than transformers' layer_norm_epsilon")})
    values = keys.values(_MAMBA1)
    # transformers writes the inner width, and does not read it.
    if (inner := keys.record.get("intermediate_size", 0)) not in (0, values["expand"] * values["hidden_size"]):
        raise keys.refusal("intermediate_size", inner, "must be expand · hidden_size")
    has_rank = keys.record.get("time_step_rank", "auto") != "auto"
    return {
        **values,
        "num_layers": keys.value("num_hidden_layers", int, 32),
        "intermediate_size": 0,
        "norm_eps": keys.value("layer_norm_epsilon", float, 1e-5),
        "time_step_rank": keys.positive("time_step_rank") if has_rank else None,
    }


def _write_mamba1(model: Mamba1Config, seq_len: int) -> dict[str, Any]:
    return {
        **{key: getattr(model, key) for key in _MAMBA1},
        "hidden_act": "silu",
        "intermediate_size": model.inner_dim,
        "layer_norm_epsilon": model.norm_eps,
        "rescale_prenorm_residual": False,
        "time_step_rank": model.rank,
        "use_bias": False,
    }


def _read_mamba2(keys: Keys) -> dict[str, Any]:
    keys.only(
        {
            **_ONLY,
            "intermediate_size": (0, _OTHER_LAYER),
            # Of fla's model.
            "D_has_hdim": (False, "a skip connection by channel"),
            "norm_before_gate": (False, "a norm before the gate"),
            "rmsnorm": (True, "layers without a norm"),
        }
    )
    return {
        **keys.values(_MAMBA2),
        "num_layers": keys.value("num_hidden_layers", int, 64),
        "intermediate_size": 0,
        "norm_eps": keys.value(keys.either("layer_norm_epsilon", "norm_eps"), float, 1e-5),
        "time_step_limit": keys.pair(keys.either("time_step_limit", "dt_limit"), (0.0, math.inf)),
    }


def _write_mamba2(model: Mamba2Config, seq_len: int) -> dict[str, Any]:
    limit = [in_json(value) for value in model.time_step_limit]
    return {
        **{key: getattr(model, key) for key in _MAMBA2},
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


MAMBA1 = ModelFormat(
    model_type="mamba",
    architecture="MambaForCausalLM",
    library="transformers",
    mixer=Mamba1,
    read=_read_mamba1,
    write=_write_mamba1,
    names=Names({".attn.decay.dt_bias": ".attn.dt_proj.bias", **_NAMES}),
)
MAMBA2 = ModelFormat(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    library="transformers",
    mixer=Mamba2,
    read=_read_mamba2,
    write=_write_mamba2,
    names=Names(_NAMES),
    remark=_remark,
)
