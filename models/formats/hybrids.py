"""What transformers' hybrids of Gated DeltaNet and softmax layers have in common.

`layer_types` names the kind of each layer; `num_attention_heads`, `num_key_value_heads` and `head_dim` are of softmax
layers, and `rope_parameters` has their rotation. What a class decides itself is in its file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.attn import AttnConfig, AttnShape
from models.formats.format import Keys, is_number, not_exported
from models.mixers.gated_deltanet import GatedDeltaNetConfig

_LINEAR, _SOFTMAX = "linear_attention", "full_attention"
# Axes of the positions of pictures; those of text are equal.
_OF_PICTURES = ("mrope_section", "mrope_interleaved")
# Keys by which older files say what `rope_parameters` does; accepted if both places agree.
_ELSEWHERE = ("rope_theta", "rope_scaling", "partial_rotary_factor")
_OTHER_LAYER = "another one than transformers' layer has"
_ONLY: Mapping[str, tuple[Any, str]] = {
    "attention_bias": (False, "biases in softmax layers"),
    "attention_dropout": (0.0, "dropout"),
    "attn": (None, "layers of softmax attention by fla's key"),
    "hidden_act": ("silu", "another activation"),
}


@dataclass(frozen=True)
class SoftmaxLayers:
    """The softmax layers of a class."""

    # Fields of `model.attn` that the class decides.
    fixed: Mapping[str, Any]
    # The class's defaults; None: those that other keys decide.
    num_heads: int
    num_kv_heads: int | None
    head_dim: int | None
    # Whether `rope_theta` must not be null, and whether it reads `partial_rotary_factor`.
    always_rotates: bool
    rotates_parts: bool


def read_common(
    keys: Keys, softmax: SoftmaxLayers, defaults: Mapping[str, int], fixed: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of a `GatedDeltaNetConfig`; `fixed` are those that the class decides, with their value.

    `defaults` are those of `vocab_size`, `hidden_size` and `intermediate_size`.
    """
    keys.only({**_ONLY, **{name: (value, _OTHER_LAYER) for name, value in fixed.items()}})
    same = keys.values({**defaults, "initializer_range": 0.02, "tie_word_embeddings": False})
    head_dim, value_dim = (keys.value(f"linear_{name}_head_dim", int) for name in ("key", "value"))
    return {
        **same,
        "num_layers": keys.value("num_hidden_layers", int, 32),
        "norm_eps": keys.value("rms_norm_eps", float, 1e-6),
        "num_heads": keys.value("linear_num_key_heads", int),
        "num_v_heads": keys.value("linear_num_value_heads", int),
        "head_dim": head_dim,
        # A width below 1 is refused by the configuration.
        "expand_v": value_dim / max(1, head_dim),
        "conv_size": keys.value("linear_conv_kernel_dim", int, 4),
        "attn": _read_attn(keys, softmax, same["hidden_size"]),
        **fixed,
    }


def write_common(model: GatedDeltaNetConfig, softmax: SoftmaxLayers, label: str, seq_len: int) -> dict[str, Any]:
    """The inverse of `read_common`, for a class with a label, and `max_position_embeddings`."""
    same = ("vocab_size", "hidden_size", "intermediate_size", "initializer_range", "tie_word_embeddings")
    return {
        **{key: getattr(model, key) for key in same},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "linear_conv_kernel_dim": model.conv_size,
        "linear_key_head_dim": model.head_dim,
        "linear_num_key_heads": model.num_heads,
        "linear_num_value_heads": model.heads.values,
        "linear_value_head_dim": model.heads.value_dim,
        "max_position_embeddings": seq_len,
        "rms_norm_eps": model.norm_eps,
        **_written_attn(model, softmax, label),
    }


def _read_attn(keys: Keys, softmax: SoftmaxLayers, hidden_size: int) -> AttnConfig:
    record = keys.record
    inside = record.get("rope_parameters")
    for key in _ELSEWHERE:
        # Some versions of transformers write partial_rotary_factor in both places.
        if (value := record.get(key)) is not None and not (isinstance(inside, Mapping) and inside.get(key) == value):
            raise keys.refusal(key, value, "not supported beside rope_parameters, which must have it")
    layers = _read_layers(keys)
    heads = keys.positive("num_attention_heads", softmax.num_heads)
    key_heads = keys.positive("num_key_value_heads", softmax.num_kv_heads, null=heads)
    width = keys.positive("head_dim", softmax.head_dim, null=hidden_size // heads)
    if not isinstance(inside, Mapping):
        raise keys.refusal("rope_parameters", inside, "must be a mapping with rope_theta")
    rotation = _read_rotation(keys.inner("rope_parameters", inside), softmax, width)
    return AttnConfig(
        layers=layers, num_heads=heads, num_kv_heads=key_heads, head_dim=width, **rotation, **softmax.fixed
    )


def _read_layers(keys: Keys) -> list[int]:
    kinds = keys.record.get("layer_types")
    allowed = f"must be a list of {_LINEAR} and {_SOFTMAX}, one a layer and both among them"
    if not isinstance(kinds, list | tuple) or len(kinds) != keys.record.get("num_hidden_layers", len(kinds)):
        raise keys.refusal("layer_types", kinds, allowed)
    for kind in kinds:
        if kind not in (_LINEAR, _SOFTMAX):
            raise keys.refusal("layer_types", kind, allowed)
    chosen = [layer for layer, kind in enumerate(kinds) if kind == _SOFTMAX]
    if not 0 < len(chosen) < len(kinds):
        raise keys.refusal("layer_types", kinds, allowed)
    return chosen


# A missing value is refused: it would be another one in another version of transformers.
def _read_rotation(keys: Keys, softmax: SoftmaxLayers, width: int) -> dict[str, Any]:
    record = keys.record
    of_pictures = _OF_PICTURES if softmax.rotates_parts else ()
    keys.only_known("rope_type", "type", "rope_theta", "partial_rotary_factor", *of_pictures)
    keys.only(dict.fromkeys(("rope_type", "type"), ("default", "another rotation")))
    theta, share = record.get("rope_theta"), record.get("partial_rotary_factor", None if softmax.rotates_parts else 1.0)
    if not (theta is None and "rope_theta" in record and not softmax.always_rotates) and not is_number(theta, 1):
        null = "" if softmax.always_rotates else ", or null for no rotation"
        raise keys.refusal("rope_theta", theta, f"must be finite and > 1{null}")
    if not is_number(share, 0) or share > 1 or (share != 1 and not softmax.rotates_parts):
        allowed = "must be above 0 and at most 1" if softmax.rotates_parts else "not supported, only 1"
        raise keys.refusal("partial_rotary_factor", share, allowed)
    rotated = None if theta is None or share == 1 else int(width * share)
    return {"rope_theta": None if theta is None else float(theta), "rotary_dim": rotated}


def _written_attn(model: GatedDeltaNetConfig, softmax: SoftmaxLayers, label: str) -> dict[str, Any]:
    attn = model.canonical().attn
    chosen = attn.chosen(model.num_layers)
    if not 0 < len(chosen) < model.num_layers:
        raise not_exported("attn.layers", attn.layers, f"{label} has both kinds of layers")
    if softmax.always_rotates and attn.rope_theta is None:
        raise not_exported("attn.rope_theta", None, f"{label} always rotates queries and keys")
    shape = AttnShape.of(attn, model.num_heads, model.hidden_size)
    rotation: dict[str, Any] = {"rope_type": "default", "rope_theta": attn.rope_theta}
    if softmax.rotates_parts:
        rotated = shape.head_dim if attn.rotary_dim is None else attn.rotary_dim
        # transformers reads int(width · factor).
        share = rotated / shape.head_dim
        share = share if int(shape.head_dim * share) == rotated else math.nextafter(share, 2.0)
        rotation["partial_rotary_factor"] = share
    return {
        "layer_types": [_SOFTMAX if layer in chosen else _LINEAR for layer in range(model.num_layers)],
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.head_dim,
        "rope_parameters": rotation,
    }
