"""Conversion of softmax layers: the keys of transformers' hybrids and section `model.attn`.

`layer_types` names the kind of each layer; `num_attention_heads`, `num_key_value_heads` and `head_dim` are of softmax
layers, and `rope_parameters` has their rotation. What a class decides itself is in `models.fla.SoftmaxLayers`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.attn import AttnConfig, AttnShape
from models.config import LanguageModelConfig
from models.fla import FlaFormat, SoftmaxLayers
from zeco_train.errors import ConfigError

KEY, ROTATION = "layer_types", "rope_parameters"
_LINEAR, _SOFTMAX = "linear_attention", "full_attention"
# More than any model needs.
_LARGEST = 1 << 20
# Axes of the positions of pictures; those of text are equal.
_OF_PICTURES = ("mrope_section", "mrope_interleaved")
# Keys by which older files say what `rope_parameters` does; accepted if both places agree.
_ELSEWHERE = ("rope_theta", "rope_scaling", "partial_rotary_factor")


def attention_from_transformers(file: Path, record: Mapping[str, Any], softmax: SoftmaxLayers) -> AttnConfig:
    """Convert the keys on softmax layers of a config.json.

    Raises:
        ConfigError: a missing or unsupported value; names the key.
    """
    inside = record.get(ROTATION)
    for key in _ELSEWHERE:
        # Some versions of transformers write partial_rotary_factor in both places.
        if (value := record.get(key)) is not None and not (isinstance(inside, Mapping) and inside.get(key) == value):
            raise _refusal(file, key, value, f"not supported beside {ROTATION}, which must have it")
    layers = _layers(file, record)
    heads = _whole(file, record, "num_attention_heads", softmax.num_heads)
    key_heads = _whole(file, record, "num_key_value_heads", softmax.num_kv_heads, heads)
    width = _whole(file, record, "head_dim", softmax.head_dim, None)
    if width is None:
        hidden = record.get("hidden_size")
        width = hidden // heads if isinstance(hidden, int) else None
    rotation = _rotation(file, record.get(ROTATION), softmax, width)
    return AttnConfig(
        layers=layers, num_heads=heads, num_kv_heads=key_heads, head_dim=width, **rotation, **softmax.fixed
    )


def attention_to_transformers(model: LanguageModelConfig, fla: FlaFormat, seq_len: int) -> dict[str, Any]:
    """The keys on softmax layers.

    Raises:
        ConfigError: the class's layers cannot express them.
    """
    softmax, attn = fla.softmax, model.canonical().attn
    assert softmax is not None, "a class with softmax layers"
    chosen = attn.chosen(model.num_layers)
    if not 0 < len(chosen) < model.num_layers:
        raise _not_exported("layers", attn.layers, f"{fla.owner} {fla.name} has both kinds of layers")
    for name, value in softmax.fixed.items():
        if getattr(attn, name) != value:
            known = str(value).lower() if isinstance(value, bool) else "null"
            raise _not_exported(name, getattr(attn, name), f"{fla.owner} {fla.name} knows {known} only")
    if softmax.always_rotates and attn.rope_theta is None:
        raise _not_exported("rope_theta", "null", f"{fla.owner} {fla.name} always rotates queries and keys")
    if not softmax.rotates_parts and attn.rotary_dim is not None:
        raise _not_exported("rotary_dim", attn.rotary_dim, f"{fla.owner} {fla.name} rotates whole heads")
    shape = AttnShape.of(attn, model.num_heads, model.hidden_size)
    rotation: dict[str, Any] = {"rope_type": "default", "rope_theta": attn.rope_theta}
    if softmax.rotates_parts:
        rotated = shape.head_dim if attn.rotary_dim is None else attn.rotary_dim
        rotation["partial_rotary_factor"] = _share(rotated, shape.head_dim)
    return {
        KEY: [_SOFTMAX if layer in chosen else _LINEAR for layer in range(model.num_layers)],
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": seq_len,
        ROTATION: rotation,
    }


def _layers(file: Path, record: Mapping[str, Any]) -> list[int]:
    kinds = record.get(KEY)
    allowed = f"must be a list of {_LINEAR} and {_SOFTMAX}, one a layer and both among them"
    if not isinstance(kinds, list | tuple) or len(kinds) != record.get("num_hidden_layers", len(kinds)):
        raise _refusal(file, KEY, kinds, allowed)
    for kind in kinds:
        if kind not in (_LINEAR, _SOFTMAX):
            raise _refusal(file, KEY, kind, allowed)
    chosen = [layer for layer, kind in enumerate(kinds) if kind == _SOFTMAX]
    if not 0 < len(chosen) < len(kinds):
        raise _refusal(file, KEY, kinds, allowed)
    return chosen


def _rotation(file: Path, record: Any, softmax: SoftmaxLayers, width: int | None) -> dict[str, Any]:
    """Fields `rope_theta` and `rotary_dim`. A missing value would be another one in another version of transformers."""
    if not isinstance(record, Mapping):
        raise _refusal(file, ROTATION, record, "must be a mapping with rope_theta")
    known = (
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        *(_OF_PICTURES if softmax.rotates_parts else ()),
    )
    for key, value in record.items():
        if key not in known:
            raise _refusal(file, f"{ROTATION}.{key!s:.80}", value, f"not supported, only {', '.join(known)}")
    for key in ("rope_type", "type"):
        if (kind := record.get(key, "default")) != "default":
            raise _refusal(file, f"{ROTATION}.{key}", kind, "another rotation: not supported, only default")
    theta, share = record.get("rope_theta"), record.get("partial_rotary_factor", None if softmax.rotates_parts else 1.0)
    if not (theta is None and "rope_theta" in record and not softmax.always_rotates) and not _is_number(theta, 1):
        null = "" if softmax.always_rotates else ", or null for no rotation"
        raise _refusal(file, f"{ROTATION}.rope_theta", theta, f"must be finite and > 1{null}")
    if not _is_number(share, 0) or share > 1 or (share != 1 and not softmax.rotates_parts):
        allowed = "must be above 0 and at most 1" if softmax.rotates_parts else "not supported, only 1"
        raise _refusal(file, f"{ROTATION}.partial_rotary_factor", share, allowed)
    rotated = None if width is None or theta is None or share == 1 else int(width * share)
    return {"rope_theta": None if theta is None else float(theta), "rotary_dim": rotated}


def _share(rotated: int, width: int) -> float:
    """The factor f with int(width · f) = rotated, which is how transformers reads it."""
    share = rotated / width
    return share if int(width * share) == rotated else math.nextafter(share, 2.0)


def _is_number(value: Any, above: float) -> bool:
    # Compared as a number of any size: a large int is no float.
    return not isinstance(value, bool) and isinstance(value, int | float) and above < value <= sys.float_info.max


_REQUIRED = object()


def _whole(file: Path, record: Mapping[str, Any], key: str, default: int | None, null: Any = _REQUIRED) -> Any:
    """A whole number from 1 on; null means `null`, if that is given."""
    value = record.get(key, default)
    if value is None and null is not _REQUIRED:
        return null
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
        raise _refusal(file, key, value, "must be a whole number ≥ 1")
    return value


def _refusal(file: Path, key: str, value: Any, problem: str) -> ConfigError:
    return ConfigError(f"{file}: {key}", f"{value!s:.80}", problem)


def _not_exported(field: str, value: Any, problem: str) -> ConfigError:
    shown = str(value).lower() if isinstance(value, bool) else f"{value!s:.80}"
    return ConfigError(f"model.attn.{field}", shown, f"{problem}, so this model cannot be exported")
