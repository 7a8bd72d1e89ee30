"""Linear attention in fla. Its default feature map has no form here."""

from __future__ import annotations

from typing import Any

from models.formats.fla import read_common, read_kv_heads, write_common
from models.formats.format import Keys, ModelFormat
from models.mixers.linear import LinearAttention, LinearAttentionConfig, LinearFeatureMap

_KEYS = {"num_heads": 4, "expand_k": 1.0, "expand_v": 1.0}


def _read(keys: Keys) -> dict[str, Any]:
    keys.only(
        {
            "norm_q": (False, "queries divided by their sum"),
            "norm_k": (False, "keys divided by their sum"),
        }
    )
    values = keys.values(_KEYS)
    read_kv_heads(keys, values["num_heads"], "shared heads of keys and values")
    return {
        **read_common(keys),
        **values,
        "feature_map": keys.choice("feature_map", {one.value: one for one in LinearFeatureMap}, "elementwise_product"),
        "normaliser": keys.value("norm_feature_map", bool, False),
    }


def _write(model: LinearAttentionConfig, seq_len: int) -> dict[str, Any]:
    return {
        **write_common(model, seq_len),
        **{key: getattr(model, key) for key in _KEYS},
        "feature_map": model.feature_map.value,
        "norm_feature_map": model.normaliser,
        "norm_k": False,
        "norm_q": False,
        "tie_feature_map_qk": False,
    }


LINEAR_ATTN = ModelFormat(
    model_type="linear_attn",
    architecture="LinearAttentionForCausalLM",
    library="fla",
    mixer=LinearAttention,
    read=_read,
    write=_write,
)
