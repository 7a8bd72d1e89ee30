"""RetNet in fla, whose kernels take keys of at most 256 channels a head."""

from __future__ import annotations

from typing import Any

from models.formats.fla import OTHER_LAYER, read_common, read_kv_heads, write_common
from models.formats.format import Keys, ModelFormat, not_exported
from models.mixers.retnet import MultiScaleRetention, RetNetConfig

_KEYS = {"num_heads": 8, "expand_k": 1.0, "expand_v": 2.0}
_WIDEST = 256


def _read(keys: Keys) -> dict[str, Any]:
    keys.only(
        {
            "feature_map": (None, "a feature map of queries and keys"),
            "rope_theta": (10000.0, OTHER_LAYER),
            "use_output_gate": (True, "no output gate"),
            "use_short_conv": (False, "short convolutions before the operator"),
        }
    )
    values = keys.values(_KEYS)
    read_kv_heads(keys, values["num_heads"], "heads of keys and values that serve several heads of queries")
    return {**read_common(keys, ratio=2), **values, "rope_theta": 10000.0}


def _write(model: RetNetConfig, seq_len: int) -> dict[str, Any]:
    if model.head_k_dim > _WIDEST:
        raise not_exported("head_k_dim", model.head_k_dim, f"fla's RetNet takes at most {_WIDEST}")
    return {
        **write_common(model, seq_len),
        **{key: getattr(model, key) for key in _KEYS},
        "feature_map": None,
        "num_kv_heads": None,
        "use_output_gate": True,
        "use_short_conv": False,
    }


RETNET = ModelFormat(
    model_type="retnet",
    architecture="RetNetForCausalLM",
    library="fla",
    mixer=MultiScaleRetention,
    read=_read,
    write=_write,
    # With fuse_norm false.
    other_names={".g_norm.": ".g_norm_swish_gate."},
)
