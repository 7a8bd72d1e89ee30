"""Conversion of softmax layers: the key `attn` of fla's configurations (0.6.0) and section `model.attn`.

fla's layer (`fla.layers.attn`) always rotates queries and keys, with heads of hidden_size / num_heads; its models have
neither norms of queries and keys nor a gate there. Its window counts the query itself, as ours: it asks flash-attn for
w − 1 keys before it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.attn import AttnConfig
from models.config import LanguageModelConfig
from models.fla import FlaFormat
from zeco_train.errors import ConfigError

KEY = "attn"
# More than any model needs.
_LARGEST = 1 << 40
_KEYS = ("layers", "num_heads", "num_kv_heads", "qkv_bias", "window_size", "rope_theta")


def attention_from_fla(file: Path, record: Any) -> AttnConfig:
    """Convert the key's value; null and no layers mean no softmax layers.

    Raises:
        ConfigError: an unknown or unsupported key; names it.
    """
    if isinstance(record, list | tuple) and len(record) == 1:
        (record,) = record
    if record is None:
        return AttnConfig()
    if not isinstance(record, Mapping):
        raise _refusal(file, KEY, record, "must be null or one mapping: all softmax layers have one shape")
    for key, value in record.items():
        if key not in _KEYS:
            raise _refusal(file, f"{KEY}.{key!s:.80}", value, f"not supported, only {', '.join(_KEYS)}")
    if (bias := record.get("qkv_bias", False)) is not False:
        raise _refusal(file, f"{KEY}.qkv_bias", bias, "biases of queries, keys and values: not supported, only False")
    layers = record.get("layers")
    if not isinstance(layers, list | tuple):
        raise _refusal(file, f"{KEY}.layers", layers, "must be a list of layers")
    theta = record.get("rope_theta", 10000.0)
    # Compared as a number of any size: a large int is no float.
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 1 < theta <= sys.float_info.max:
        raise _refusal(file, f"{KEY}.rope_theta", theta, "must be finite and > 1")
    heads = _whole(file, "num_heads", record.get("num_heads"))
    return AttnConfig(
        layers=sorted(_whole(file, "layers", layer, least=0) for layer in layers) or None,
        num_heads=heads,
        num_kv_heads=_whole(file, "num_kv_heads", record.get("num_kv_heads"), heads),
        window=_whole(file, "window_size", record.get("window_size"), None),
        rope_theta=float(theta),
    )


def attention_to_fla(model: LanguageModelConfig, fla: FlaFormat) -> dict[str, Any] | None:
    """The key's value; None without softmax layers.

    Raises:
        ConfigError: fla's layer cannot express them.
    """
    attn = model.canonical().attn
    if attn.layers is None:
        return None
    if fla.library != "fla":
        raise _not_exported("layers", attn.layers, f"{fla.owner} {fla.name} has no softmax layers")
    if attn.head_dim is not None:
        raise _not_exported("head_dim", attn.head_dim, "fla's softmax layers have hidden_size / num_heads")
    if attn.rope_theta is None:
        raise _not_exported("rope_theta", "null", "fla's softmax layers always rotate queries and keys")
    for name in ("qk_norm", "gate", "norm_after"):
        if getattr(attn, name):
            raise _not_exported(name, "true", "fla's softmax layers have none")
    if attn.rotary_dim is not None:
        raise _not_exported("rotary_dim", attn.rotary_dim, "fla's softmax layers rotate whole heads")
    return {
        "layers": attn.layers,
        "num_heads": attn.num_heads,
        "num_kv_heads": attn.num_heads if attn.num_kv_heads is None else attn.num_kv_heads,
        "qkv_bias": False,
        "rope_theta": attn.rope_theta,
        "window_size": attn.window,
    }


_REQUIRED = object()


def _whole(file: Path, key: str, value: Any, otherwise: Any = _REQUIRED, least: int = 1) -> Any:
    """A whole number from `least` on; null means `otherwise`, if that is given."""
    if value is None and otherwise is not _REQUIRED:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
        raise _refusal(file, f"{KEY}.{key}", value, f"must be a whole number ≥ {least}")
    return value


def _refusal(file: Path, key: str, value: Any, problem: str) -> ConfigError:
    return ConfigError(f"{file}: {key}", f"{value!s:.80}", problem)


def _not_exported(field: str, value: Any, problem: str) -> ConfigError:
    return ConfigError(f"model.attn.{field}", f"{value!s:.80}", f"{problem}, so this model cannot be exported")
