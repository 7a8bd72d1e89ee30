"""GLA in fla. Its layers have low-rank projections to the decays of one width, and divide the decays by one number."""

from __future__ import annotations

from typing import Any

from models.formats.fla import OTHER_LAYER, read_common, write_common
from models.formats.format import Keys, ModelFormat
from models.mixers.gla import FeatureMap, GatedLinearAttention, GLAConfig

_KEYS = {"num_heads": 4, "expand_k": 0.5, "expand_v": 1.0, "use_output_gate": True}


def _read(keys: Keys) -> dict[str, Any]:
    keys.only(
        {
            "use_short_conv": (False, "short convolutions before the operator"),
            "gate_low_rank_dim": (16, OTHER_LAYER),
            "gate_logit_normalizer": (16, OTHER_LAYER),
        }
    )
    maps = {one.value: one for one in FeatureMap}
    return {
        **read_common(keys),
        **keys.values(_KEYS),
        "num_kv_heads": keys.optional("num_kv_heads"),
        "clamp_min": keys.optional("clamp_min", float),
        "feature_map": keys.choice("feature_map", {**maps, "swish": FeatureMap.silu}),
        "gate_low_rank_dim": 16,
        "gate_logit_normalizer": 16,
    }


def _write(model: GLAConfig, seq_len: int) -> dict[str, Any]:
    return {
        **write_common(model, seq_len),
        **{key: getattr(model, key) for key in (*_KEYS, "num_kv_heads", "clamp_min")},
        "feature_map": None if model.feature_map is None else model.feature_map.value,
        "use_short_conv": False,
    }


GLA = ModelFormat(
    model_type="gla",
    architecture="GLAForCausalLM",
    library="fla",
    mixer=GatedLinearAttention,
    read=_read,
    write=_write,
    # With fuse_norm false.
    other_names={".g_norm.": ".g_norm_swish_gate."},
)
