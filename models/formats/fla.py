"""What all models of fla (flash-linear-attention 0.6.0) have in common: keys of the block, and softmax layers.

fla's switches for fused kernels do not change a model; its `use_gk` and `use_gv` are not read by any of its code. Its
softmax layer (`fla.layers.attn`) always rotates queries and keys, and has no norms of them and no gate. Its window
counts the query itself, as ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.attn import AttnConfig
from models.config import LanguageModelConfig
from models.formats.format import Keys, is_number, not_exported

OTHER_LAYER = "another one than fla's layer has"
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
    "zero_centred_norms": (False, OTHER_LAYER),
}


def read_common(keys: Keys, *, layers: int = 24, ratio: int = 4) -> dict[str, Any]:
    """The fields of `LanguageModelConfig`, but for the heads.

    `layers` and `ratio` are the defaults of `num_hidden_layers` and `hidden_ratio`; null is 4 in all models.
    """
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


def write_common(model: LanguageModelConfig, seq_len: int) -> dict[str, Any]:
    """The inverse of `read_common`, and keys that are not read."""
    return {
        **{key: getattr(model, key) for key in (*_COMMON, "intermediate_size")},
        "attn": _written_attn(model),
        "attn_mode": "chunk",
        "elementwise_affine": True,
        "fuse_cross_entropy": True,
        "fuse_norm": True,
        "fuse_swiglu": True,
        "hidden_act": "swish",
        "hidden_ratio": None,
        "max_position_embeddings": seq_len,
    }


def plain(
    values: Mapping[str, Any],
    *,
    only: Mapping[str, tuple[Any, str]],
    written: tuple[str, ...],
    optional: tuple[str, ...] = (),
    layers: int = 24,
) -> dict[str, Any]:
    """`read` and `write` of a class whose keys are named as our fields.

    Args:
        values: the keys, with the library's defaults.
        only: keys of which one value is supported, with what others mean.
        written: those of `only` that an export writes.
        optional: keys of whole numbers that may be null, which is their default.
        layers: default of `num_hidden_layers`.
    """

    def read(keys: Keys) -> dict[str, Any]:
        keys.only(only)
        nullable = {key: keys.optional(key) for key in optional}
        return {**read_common(keys, layers=layers), **keys.values(values), **nullable}

    def write(model: LanguageModelConfig, seq_len: int) -> dict[str, Any]:
        own = {key: getattr(model, key) for key in (*values, *optional)}
        return {**write_common(model, seq_len), **own, **{key: only[key][0] for key in written}}

    return {"read": read, "write": write}


def read_kv_heads(keys: Keys, num_heads: int, meaning: str) -> None:
    """Refuse heads of keys and values that serve several heads of queries, where our layer has none."""
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
