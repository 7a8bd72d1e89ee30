"""The configuration of fla's GLA model (`fla.models.GLAConfig`, 0.6.0) and ours, in both directions.

What fla's configuration can say and our model cannot do is refused by name, and so is the reverse. Its switches for
fused kernels do not change the model; `use_gk` and `use_gv` no code of it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.tokenizer import Tokenizer
from models.gla_config import FeatureMap, GLAConfig
from zeco_train.checkpoint.files import HF_CONFIG_FILE as CONFIG_FILE
from zeco_train.errors import ConfigError

MODEL_TYPE, ARCHITECTURE = "gla", "GLAForCausalLM"
# What its layer has for the rank of the decays' projection and for their divisor, out of its configuration's reach.
_FIXED = {"gate_low_rank_dim": 16, "gate_logit_normalizer": 16}
# Its defaults, for what a file leaves out.
_NUMBERS: dict[str, int | float] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_heads": 4,
    "expand_k": 0.5,
    "expand_v": 1.0,
    "norm_eps": 1e-6,
    "initializer_range": 0.02,
}
_OPTIONAL = {"num_kv_heads": int, "clamp_min": float, "intermediate_size": int, "hidden_ratio": int}
_SWITCHES = {"use_output_gate": True, "fuse_norm": True, "tie_word_embeddings": False}
# Keys with the only value that our model has, and what another one stands for.
_REFUSED: dict[str, tuple[Any, str]] = {
    "use_short_conv": (False, "short convolutions before the operator"),
    "attn": (None, "layers of softmax attention"),
    "attnres_block_size": (None, "residuals over blocks of layers"),
    "elementwise_affine": (True, "norms without weights"),
    "hidden_act": ("swish", "another activation of the MLP and the output gate"),
    "quantization_config": (None, "quantised weights"),
    **{name: (value, "another one than fla's layer has") for name, value in _FIXED.items()},
}
_ALIASES = {"silu": FeatureMap.silu, "swish": FeatureMap.silu}


@dataclass(frozen=True)
class FlaModel:
    """What a config.json says.

    Attributes:
        model: the shape.
        renamed: parts of parameters' names, ours to those of the file, where they differ.
    """

    model: GLAConfig
    renamed: Mapping[str, str]

    def name_of(self, parameter: str) -> str:
        """What the file calls one of our parameters."""
        for own, theirs in self.renamed.items():
            parameter = parameter.replace(own, theirs)
        return parameter


def from_fla(record: Mapping[str, Any], path: Path) -> FlaModel:
    """Our model for a config.json.

    Args:
        record: its contents.
        path: of its folder, for messages and for the model's name.

    Raises:
        ConfigError: it is of another model, or of a GLA that ours is not; names the key.
    """
    file = path / CONFIG_FILE
    if record.get("model_type") != MODEL_TYPE:
        raise _refusal(file, "model_type", record.get("model_type"), f"only {MODEL_TYPE!r} can be read")
    if ARCHITECTURE not in (record.get("architectures") or [ARCHITECTURE]):
        raise _refusal(file, "architectures", record["architectures"], f"only {ARCHITECTURE} can be read")
    for key, (supported, meaning) in _REFUSED.items():
        value = record.get(key, supported)
        if value != supported:
            raise _refusal(file, key, value, f"{meaning}: not supported, only {supported}")
    values: dict[str, Any] = {
        key: _number(file, key, record.get(key, default), type(default)) for key, default in _NUMBERS.items()
    }
    optional: dict[str, Any] = {
        key: None if record.get(key) is None else _number(file, key, record[key], kind)
        for key, kind in _OPTIONAL.items()
    }
    switches: dict[str, Any] = {key: _switch(file, key, record.get(key, default)) for key, default in _SWITCHES.items()}
    width, inner, ratio = values["hidden_size"], optional.pop("intermediate_size"), optional.pop("hidden_ratio")
    fused = switches.pop("fuse_norm")
    kv_heads = optional.pop("num_kv_heads")
    try:
        model = GLAConfig(
            name=str(path.resolve().name),
            num_layers=values.pop("num_hidden_layers"),
            intermediate_size=inner if inner is not None else _default_inner(width, ratio if ratio is not None else 4),
            feature_map=_feature_map(file, record.get("feature_map")),
            num_kv_heads=None if kv_heads == values["num_heads"] else kv_heads,
            **values,
            **optional,
            **switches,
            gate_low_rank_dim=_FIXED["gate_low_rank_dim"],
            gate_logit_normalizer=_FIXED["gate_logit_normalizer"],
        )
    except ConfigError as error:
        raise ConfigError("config", file, f"is of no model that can be built: {error}") from error
    renamed = {} if fused or not model.use_output_gate else {"g_norm_swish_gate": "g_norm"}
    return FlaModel(model, renamed)


def to_fla(model: GLAConfig, tokenizer: Tokenizer, pad_id: int | None, seq_len: int, dtype: str) -> dict[str, Any]:
    """The contents of config.json.

    Args:
        tokenizer: names the end of a sequence; there is no token for its beginning.
        pad_id: of padding, if there is one.
        seq_len: that the model was trained with; it bounds nothing, but tools ask.
        dtype: of the weights, as torch calls it.

    Raises:
        ConfigError: fla's configuration cannot express the model.
    """
    for name, value in _FIXED.items():
        if (own := getattr(model, name)) != value:
            raise ConfigError(f"model.{name}", own, f"fla's GLA knows {value} only, so this model cannot be exported")
    return {
        "architectures": [ARCHITECTURE],
        "attn": None,
        "attn_mode": "chunk",
        "bos_token_id": None,
        "clamp_min": model.clamp_min,
        "dtype": dtype,
        "elementwise_affine": True,
        "eos_token_id": tokenizer.eos_id,
        "expand_k": model.expand_k,
        "expand_v": model.expand_v,
        "feature_map": None if model.feature_map is None else model.feature_map.value,
        "fuse_cross_entropy": True,
        "fuse_norm": True,
        "fuse_swiglu": True,
        "hidden_act": "swish",
        "hidden_ratio": None,
        "hidden_size": model.hidden_size,
        "initializer_range": model.initializer_range,
        "intermediate_size": model.intermediate_size,
        "max_position_embeddings": seq_len,
        "model_type": MODEL_TYPE,
        "norm_eps": model.norm_eps,
        "num_heads": model.num_heads,
        "num_hidden_layers": model.num_layers,
        "num_kv_heads": model.num_kv_heads,
        "pad_token_id": pad_id,
        "tie_word_embeddings": model.tie_word_embeddings,
        "use_cache": True,
        "use_output_gate": model.use_output_gate,
        "use_short_conv": False,
        "vocab_size": model.vocab_size,
    }


def _default_inner(width: int, ratio: float) -> int:
    """fla's width of the MLP where its configuration gives none: 2/3 · ratio · width, up to a multiple of 256."""
    return -(-int(width * ratio * 2 / 3) // 256) * 256


def _feature_map(file: Path, name: Any) -> FeatureMap | None:
    if name is None:
        return None
    known = {entry.value: entry for entry in FeatureMap} | _ALIASES
    if name not in known:
        raise _refusal(file, "feature_map", name, f"not supported, only {', '.join(known)}")
    return known[name]


def _number(file: Path, key: str, value: Any, kind: type) -> Any:
    """A number of a kind; whole ones are good for both."""
    if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and not isinstance(value, int)):
        raise _refusal(file, key, value, f"must be {'a whole' if kind is int else 'a'} number")
    return kind(value)


def _switch(file: Path, key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refusal(file, key, value, "must be true or false")
    return value


def _refusal(file: Path, key: str, value: Any, problem: str) -> ConfigError:
    return ConfigError(f"{file}: {key}", value, problem)
