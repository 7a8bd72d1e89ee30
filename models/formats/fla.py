"""The classes of language models in fla (flash-linear-attention 0.6.0), whose block and softmax layers are the same.

fla's switches for fused kernels do not change a model; its `use_gk` and `use_gv` are not read by any of its code. Its
softmax layer (`fla.layers.attn`) always rotates queries and keys, and has no norms of them and no gate. Its window
counts the query itself, as ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from models.attn import AttnConfig
from models.config import LanguageModelConfig
from models.formats.format import Keys, ModelFormat, Names, is_number, not_exported
from models.mixers.base import Mixer
from models.mixers.delta_net import DeltaNet
from models.mixers.gated_deltanet import GatedDeltaNet
from models.mixers.gla import FeatureMap, GatedLinearAttention
from models.mixers.gsa import GatedSlotAttention, GSAConfig
from models.mixers.hgrn import HGRN as HGRNLayer
from models.mixers.hgrn2 import HGRN2 as HGRN2Layer
from models.mixers.kda import KimiDeltaAttention
from models.mixers.linear import LinearAttention, LinearFeatureMap
from models.mixers.retnet import MultiScaleRetention, RetNetConfig

_OTHER_LAYER = "another one than fla's layer has"
# More than any sequence needs.
_LONGEST = 1 << 40
# Of all models, by the same name here; with the defaults for missing keys.
_COMMON = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
_ONLY: Mapping[str, tuple[Any, str]] = {
    "attnres_block_size": (None, "residuals over blocks of layers"),
    "elementwise_affine": (True, "norms without weights"),
    "hidden_act": ("swish", "another activation of the MLP and the output gate"),
    "zero_centred_norms": (False, _OTHER_LAYER),
}


# The fields of `LanguageModelConfig`, but for the heads. `layers` and `ratio` are defaults; a null ratio is 4 always.
def _read_block(keys: Keys, layers: int, ratio: int) -> dict[str, Any]:
    keys.only(_ONLY)
    # It changes names of weights only, see `ModelFormat.other_names`.
    keys.value("fuse_norm", bool, True)
    values = keys.values(_COMMON)
    inner, ratio = keys.optional("intermediate_size"), keys.optional("hidden_ratio", default=ratio) or 4
    if inner is None:
        # fla's MLPs: 2/3 · ratio · width, rounded up to a multiple of 256.
        inner = -(-int(values["hidden_size"] * ratio * 2 / 3) // 256) * 256
    num_layers = keys.value("num_hidden_layers", int, layers)
    return {**values, "num_layers": num_layers, "intermediate_size": inner, "attn": _read_attn(keys)}


# In every config.json that is written.
_WRITTEN = {
    "attn_mode": "chunk",
    "elementwise_affine": True,
    "fuse_cross_entropy": True,
    "fuse_norm": True,
    "fuse_swiglu": True,
    "hidden_act": "swish",
    "hidden_ratio": None,
}


def _format(
    model_type: str,
    architecture: str,
    mixer: type[Mixer],
    values: Mapping[str, Any],
    *,
    only: Mapping[str, tuple[Any, str]],
    written: tuple[str, ...],
    optional: Mapping[str, type] = MappingProxyType({}),
    read: Callable[[Keys, dict[str, Any]], dict[str, Any]] = lambda keys, fields: {},
    write: Callable[[Any], dict[str, Any]] = lambda model: {},
    layers: int = 24,
    ratio: int = 4,
    **names: Any,
) -> ModelFormat:
    # Of a class whose keys are mostly named as our fields. `values` are the keys, with fla's defaults; of those in
    # `only` one value is supported, an export writes the `written` ones; `optional` ones may be null, which is their
    # default. `read` gives the other fields, `write` the other keys, `names` what else `ModelFormat` takes.

    def read_all(keys: Keys) -> dict[str, Any]:
        keys.only(only)
        fields = {**_read_block(keys, layers, ratio), **keys.values(values)}
        fields |= {key: keys.optional(key, kind) for key, kind in optional.items()}
        return {**fields, **read(keys, fields)}

    def write_all(model: LanguageModelConfig, seq_len: int) -> dict[str, Any]:
        own = {key: getattr(model, key) for key in (*_COMMON, "intermediate_size", *values, *optional)}
        own |= {"attn": _written_attn(model), "max_position_embeddings": seq_len}
        return {**_WRITTEN, **own, **{key: only[key][0] for key in written}, **write(model)}

    return ModelFormat(model_type, architecture, "fla", mixer, read_all, write_all, **names)


# Heads of keys and values that serve several heads of queries, where our layer has none.
def _refuse_kv_heads(keys: Keys, num_heads: int, meaning: str) -> None:
    if (found := keys.record.get("num_kv_heads")) not in (None, num_heads):
        raise keys.refusal("num_kv_heads", found, f"{meaning}: not supported, only None or num_heads")


def _read_attn(keys: Keys) -> AttnConfig:
    record = keys.record.get("attn")
    if isinstance(record, list | tuple) and len(record) == 1:
        (record,) = record
    if record is None:
        return AttnConfig()
    if not isinstance(record, Mapping):
        raise keys.refusal("attn", record, "must be null or one mapping: all softmax layers have one shape")
    keys = keys.inner("attn", record)
    keys.only_known("layers", "num_heads", "num_kv_heads", "qkv_bias", "window_size", "rope_theta")
    keys.only({"qkv_bias": (False, "biases of queries, keys and values")})
    layers, theta = record.get("layers"), record.get("rope_theta", 10000.0)
    if not isinstance(layers, list | tuple):
        raise keys.refusal("layers", layers, "must be a list of layers")
    if not is_number(theta, 1):
        raise keys.refusal("rope_theta", theta, "must be finite and > 1")
    heads = keys.positive("num_heads")
    return AttnConfig(
        layers=sorted(keys.whole("layers", layer, 0) for layer in layers) or None,
        num_heads=heads,
        num_kv_heads=keys.positive("num_kv_heads", null=heads),
        window=keys.positive("window_size", null=None, most=_LONGEST),
        rope_theta=float(theta),
    )


def _written_attn(model: LanguageModelConfig) -> dict[str, Any] | None:
    attn = model.canonical().attn
    if attn.layers is None:
        return None
    if attn.rope_theta is None:
        raise not_exported("attn.rope_theta", None, "fla's softmax layers always rotate queries and keys")
    return {
        "layers": attn.layers,
        "num_heads": attn.num_heads,
        "num_kv_heads": attn.num_heads if attn.num_kv_heads is None else attn.num_kv_heads,
        "qkv_bias": False,
        "rope_theta": attn.rope_theta,
        "window_size": attn.window,
    }


# What other values of keys mean that have one value in several classes.
_NO_CONVOLUTIONS = {"use_short_conv": (False, "short convolutions before the operator")}
_CONVOLUTIONS = {
    "conv_bias": (False, "convolutions with a bias"),
    "use_short_conv": (True, "layers without short convolutions"),
}
_LOWER_BOUND = {"use_lower_bound": (True, "no lower bounds of the forget gates")}
_DECAY = Names({".attn.decay.": ".attn."})
# With fuse_norm false.
_UNFUSED_NORM = {".g_norm.": ".g_norm_swish_gate."}

_FEATURE_MAPS = {**{one.value: one for one in FeatureMap}, "swish": FeatureMap.silu}

# Its layers have low-rank projections to the decays of one width, and divide the decays by one number.
GLA = _format(
    "gla",
    "GLAForCausalLM",
    GatedLinearAttention,
    {"num_heads": 4, "expand_k": 0.5, "expand_v": 1.0, "use_output_gate": True},
    optional={"num_kv_heads": int, "clamp_min": float},
    only={**_NO_CONVOLUTIONS, **dict.fromkeys(("gate_low_rank_dim", "gate_logit_normalizer"), (16, _OTHER_LAYER))},
    written=("use_short_conv",),
    read=lambda keys, _: {
        "feature_map": keys.choice("feature_map", _FEATURE_MAPS),
        "gate_low_rank_dim": 16,
        "gate_logit_normalizer": 16,
    },
    write=lambda model: {"feature_map": None if model.feature_map is None else model.feature_map.value},
    other_names=_UNFUSED_NORM,
)


def _read_linear(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    _refuse_kv_heads(keys, fields["num_heads"], "shared heads of keys and values")
    # fla's default feature map has no form here.
    maps = {one.value: one for one in LinearFeatureMap}
    feature_map = keys.choice("feature_map", maps, "elementwise_product")
    return {"feature_map": feature_map, "normaliser": keys.value("norm_feature_map", bool, False)}


LINEAR_ATTN = _format(
    "linear_attn",
    "LinearAttentionForCausalLM",
    LinearAttention,
    {"num_heads": 4, "expand_k": 1.0, "expand_v": 1.0},
    only={"norm_q": (False, "queries divided by their sum"), "norm_k": (False, "keys divided by their sum")},
    written=("norm_k", "norm_q"),
    read=_read_linear,
    write=lambda model: {
        "feature_map": model.feature_map.value,
        "norm_feature_map": model.normaliser,
        "tie_feature_map_qk": False,
    },
)

# The most channels of a head of keys that fla's kernels of RetNet take.
_WIDEST = 256


def _read_retnet(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    _refuse_kv_heads(keys, fields["num_heads"], "heads of keys and values that serve several heads of queries")
    return {"rope_theta": 10000.0}


def _write_retnet(model: RetNetConfig) -> dict[str, Any]:
    if model.head_k_dim > _WIDEST:
        raise not_exported("head_k_dim", model.head_k_dim, f"fla's RetNet takes at most {_WIDEST}")
    return {"num_kv_heads": None}


RETNET = _format(
    "retnet",
    "RetNetForCausalLM",
    MultiScaleRetention,
    {"num_heads": 8, "expand_k": 1.0, "expand_v": 2.0},
    only={
        **_NO_CONVOLUTIONS,
        "feature_map": (None, "a feature map of queries and keys"),
        "rope_theta": (10000.0, _OTHER_LAYER),
        "use_output_gate": (True, "no output gate"),
    },
    written=("feature_map", "use_output_gate", "use_short_conv"),
    read=_read_retnet,
    write=_write_retnet,
    ratio=2,
    other_names=_UNFUSED_NORM,
)


# The layers take the heads from `expand_ratio`, whatever `num_heads` says beside it.
def _read_hgrn2(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    heads, ratio, width = keys.optional("num_heads"), keys.optional("expand_ratio", default=128), fields["hidden_size"]
    if ratio is not None:
        heads = width // ratio if ratio > 0 and width % ratio == 0 else None
    if heads is None:
        raise keys.refusal("expand_ratio", ratio, "must divide hidden_size, or be null beside num_heads")
    return {"num_heads": heads, "expand_ratio": ratio}


HGRN2 = _format(
    "hgrn2",
    "HGRN2ForCausalLM",
    HGRN2Layer,
    {},
    only={**_LOWER_BOUND, **_NO_CONVOLUTIONS},
    written=("use_lower_bound", "use_short_conv"),
    read=_read_hgrn2,
    write=lambda model: {"num_heads": model.num_heads, "expand_ratio": model.expand_ratio},
)

HGRN = _format(
    "hgrn",
    "HGRNForCausalLM",
    HGRNLayer,
    {"expand_ratio": 1},
    only={"num_heads": (1, _OTHER_LAYER), **_LOWER_BOUND, **_NO_CONVOLUTIONS},
    written=("use_lower_bound", "use_short_conv"),
)

_GSA_FEATURE_MAPS = {"swish": FeatureMap.silu, "relu": FeatureMap.relu}


# Null: as many slots as a head has channels of keys.
def _read_gsa(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    slots = keys.optional("num_slots", default=64)
    if slots is None:
        slots = round(fields["hidden_size"] * fields["expand_k"]) // max(1, fields["num_heads"])
    return {"num_slots": slots, "feature_map": keys.choice("feature_map", _GSA_FEATURE_MAPS, "swish")}


def _write_gsa(model: GSAConfig) -> dict[str, Any]:
    names = {one: name for name, one in _GSA_FEATURE_MAPS.items()}
    own = None if model.feature_map is None else names.get(model.feature_map, model.feature_map.value)
    return {"num_slots": model.num_slots, "feature_map": own}


# Its layer reads neither bounds of the decays nor the switches of the norm and of an output gate.
GSA = _format(
    "gsa",
    "GSAForCausalLM",
    GatedSlotAttention,
    {"num_heads": 4, "expand_k": 1.0, "expand_v": 1.0, "gate_logit_normalizer": 8},
    optional={"num_kv_heads": int},
    only={**_NO_CONVOLUTIONS, **dict.fromkeys(("exapnd_k", "exapnd_v"), (1, "expand_k and expand_v by other names"))},
    written=("use_short_conv",),
    read=_read_gsa,
    write=_write_gsa,
)

DELTA_NET = _format(
    "delta_net",
    "DeltaNetForCausalLM",
    DeltaNet,
    {
        "num_heads": 16,
        "expand_k": 1.0,
        "expand_v": 1.0,
        "conv_size": 4,
        "use_gate": False,
        "allow_neg_eigval": False,
    },
    only={
        **_CONVOLUTIONS,
        "qk_activation": ("silu", "another function of queries and keys"),
        "qk_norm": ("l2", "keys of another norm, with which the state may grow without bound"),
        "use_beta": (True, "a rule that writes all of each value"),
        "use_output_norm": (True, "layers without a norm"),
    },
    written=("qk_activation", "qk_norm", "use_beta", "use_output_norm", "use_short_conv"),
)

# Hybrids of transformers with the same mixer are in `hybrids`.
GATED_DELTANET = _format(
    "gated_deltanet",
    "GatedDeltaNetForCausalLM",
    GatedDeltaNet,
    {
        "num_heads": 6,
        "head_dim": 256,
        "expand_v": 2.0,
        "conv_size": 4,
        "use_gate": True,
        "allow_neg_eigval": False,
    },
    optional={"num_v_heads": int},
    only={
        **_CONVOLUTIONS,
        "o_norm_eps": (None, _OTHER_LAYER),
        "output_gate_activation": ("swish", "another function of the output gate"),
    },
    written=("output_gate_activation", "use_short_conv"),
    layers=21,
    names=_DECAY,
)

KDA = _format(
    "kda",
    "KDAForCausalLM",
    KimiDeltaAttention,
    {"num_heads": 16, "head_dim": 128, "expand_v": 1.0, "conv_size": 4, "allow_neg_eigval": False},
    optional={"num_v_heads": int},
    only={
        **_CONVOLUTIONS,
        "lower_bound": (None, "decays with a lower bound"),
        "safe_gate": (False, "decays with a lower bound"),
    },
    written=("lower_bound", "safe_gate", "use_short_conv"),
    names=_DECAY,
)
