"""Conversion between the configurations of fla's models (`fla.models`, 0.6.0) and this package's, in both directions.

Also of models of transformers itself (`FlaFormat.library`). Settings that the other side does not support are rejected
by name. fla's switches for fused kernels do not change the model; its `use_gk` and `use_gv` are not read by any of its
code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.tokenizer import Tokenizer
from models.config import LanguageModelConfig
from models.fla import FlaFormat
from models.mixers.base import Mixer
from models.registry import MIXERS, mixer_of
from zeco_train.checkpoint.files import HF_CONFIG_FILE as CONFIG_FILE
from zeco_train.errors import ConfigError
from zeco_train.hf.fla_attention import KEY as ATTENTION_KEY
from zeco_train.hf.fla_attention import attention_from_fla, attention_to_fla
from zeco_train.hf.layer_types import attention_from_transformers, attention_to_transformers
from zeco_train.hf.names import FlaModel

# fla's defaults, for keys missing from a file.
_DEFAULTS: dict[str, int | float | bool] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "norm_eps": 1e-6,
    "initializer_range": 0.02,
    "fuse_norm": True,
    "tie_word_embeddings": False,
}
_OPTIONAL = {"intermediate_size": int, "hidden_ratio": int}
# A null ratio is 4 in all of them, see `_default_inner`; a missing one in most.
_OPTIONAL_DEFAULTS = {"hidden_ratio": 4}
# More than any model needs, and little enough that the products of three are sizes that torch can express.
_LARGEST = 1 << 20
_RANGE = f"from −{_LARGEST:,} to {_LARGEST:,}"
_KINDS = {int: f"a whole number {_RANGE}", float: f"a number {_RANGE}", bool: "true or false"}
# Keys with the same name in fla and here.
_SAME = ("hidden_size", "initializer_range", "intermediate_size", "norm_eps", "tie_word_embeddings", "vocab_size")
# As transformers writes a float that JSON has not.
_INFINITY = {"__float__": "Infinity"}
# Keys with the only supported value, and the meaning of other values.
_REFUSED: dict[str, tuple[Any, str]] = {
    "attnres_block_size": (None, "residuals over blocks of layers"),
    "elementwise_affine": (True, "norms without weights"),
    "hidden_act": ("swish", "another activation of the MLP and the output gate"),
    "quantization_config": (None, "quantised weights"),
}


def from_fla(record: Mapping[str, Any], path: Path) -> FlaModel:
    """Convert a config.json to a model configuration.

    Args:
        record: its contents.
        path: of its folder, for messages and for the model's name.

    Raises:
        ConfigError: an unknown model, or an unsupported setting; names the key.
    """
    file = path / CONFIG_FILE
    mixer, fla = _known(file, record.get("model_type"))
    names = record.get("architectures") or [fla.architecture]
    if not (isinstance(names, list | str) and fla.architecture in names):
        raise _refusal(file, "architectures", names, f"only {fla.architecture} can be read")
    _check_refused(file, record, fla)
    values = dict(fla.decided) | _values(file, _own_names(file, record, fla), fla)
    inner, ratio, is_fused = (values.pop(key, None) for key in ("intermediate_size", "hidden_ratio", "fuse_norm"))
    try:
        if fla.softmax is None:
            attn = attention_from_fla(file, record.get(ATTENTION_KEY))
        else:
            attn = attention_from_transformers(file, record, fla.softmax)
        model = mixer.config_class(
            name=str(path.resolve().name),
            num_layers=values.pop("num_hidden_layers"),
            intermediate_size=_default_inner(values["hidden_size"], ratio) if inner is None else inner,
            attn=attn,
            **values,
        )
    except ConfigError as error:
        raise ConfigError("config", file, f"is of no model that can be built: {error}") from error
    # Unfused norms have other parameter names in fla.
    return FlaModel(model.canonical(), fla, {**({} if is_fused else fla.plain_norm), **fla.parts})


def _check_refused(file: Path, record: Mapping[str, Any], fla: FlaFormat) -> None:
    """Raise `ConfigError` for the first key with a value that our model does not support."""
    fixed = {name: (value, f"another one than {fla.owner} layer has") for name, value in fla.decided.items()}
    softmax = {} if fla.library == "fla" else {ATTENTION_KEY: (None, "layers of softmax attention")}
    for key, (supported, meaning) in {**_REFUSED, **softmax, **fla.refused, **fixed}.items():
        value, same = record.get(key, supported), fla.equals.get(key)
        if value == supported or (same is not None and value == record.get(same, fla.numbers[same])):
            continue
        others = "" if same is None else f" or {same}"
        raise _refusal(file, key, value, f"{meaning}: not supported, only {supported}{others}")


def _own_names(file: Path, record: Mapping[str, Any], fla: FlaFormat) -> dict[str, Any]:
    """The contents of config.json with the keys of `FlaFormat.keys` and `FlaFormat.copies` under our names."""
    renamed = dict(record)
    for own in {**fla.keys, **fla.copies}:
        names = [name for name in (fla.keys.get(own, own), fla.copies.get(own)) if name is not None]
        found = [record[name] for name in names if name in record]
        if any(value != found[0] for value in found):
            raise _refusal(file, names[1], found[1], f"differs from {names[0]}={found[0]!s:.80}, which means the same")
        renamed.pop(own, None)
        if found:
            renamed[own] = found[0]
    return renamed


def _values(file: Path, record: Mapping[str, Any], fla: FlaFormat) -> dict[str, Any]:
    """The checked values of all keys that describe the model, by our names."""
    values: dict[str, Any] = {}
    for key, default in {**_DEFAULTS, **fla.defaults, **fla.numbers, **fla.switches}.items():
        values[key] = _checked(file, fla.keys.get(key, key), record.get(key, default), type(default))
    for key, pair in fla.pairs.items():
        values[key] = _checked_pair(file, key, record.get(key, pair))
    defaults = {**_OPTIONAL_DEFAULTS, **fla.optional_defaults}
    for key, kind in {**_OPTIONAL, **fla.optional}.items():
        if key not in fla.decided:
            value = record.get(key, defaults.get(key))
            values[key] = None if value is None else _checked(file, key, value, kind)
    for key, derived in fla.derived.items():
        values[key] = derived.value(values)
        if values[key] is None:
            raise _refusal(file, derived.source, values[derived.source], derived.allowed)
    for key, kind in fla.needed.items():
        values[key] = _checked(file, fla.keys.get(key, key), record.get(key), kind)
    for key, (whole, of) in fla.ratios.items():
        # A width below 1 is refused by the configuration.
        values[key] = _checked(file, whole, record.get(whole), int) / max(1, values[of])
    for key, entries in fla.choices.items():
        known = {entry.value: entry for entry in entries} | dict(fla.aliases)
        # Not `in known`, which raises for lists and objects.
        name, nullable = record.get(key, fla.choice_defaults.get(key)), key not in fla.choice_defaults
        if not (name is None and nullable) and name not in list(known):
            raise _refusal(file, key, name, f"not supported, only {', '.join(known)}")
        values[key] = known.get(name)
    return values


def format_of(model: LanguageModelConfig, model_type: str | None = None) -> FlaFormat:
    """The format of a model's export: the one that is asked for, or the first of its mixer's that can express it.

    Raises:
        ConfigError: there is none, or it cannot express the model.
    """
    mixer = mixer_of(model)
    formats = {one.model_type: one for one in (mixer.fla, *mixer.other_formats) if one is not None}
    if not formats:
        raise ConfigError("model", model.name, f"fla has no model with {model.mixer}, so this one cannot be exported")
    if model_type is not None:
        if model_type not in formats:
            raise ConfigError("model_type", model_type, f"a model with {model.mixer} can be: {', '.join(formats)}")
        formats = {model_type: formats[model_type]}
    refusals = []
    for fla in formats.values():
        try:
            _check_expressible(model, fla)
        except ConfigError as error:
            refusals.append(error)
        else:
            return fla
    if len(refusals) == 1:
        raise refusals[0]
    reasons = "; ".join(f"as {name}: {error}" for name, error in zip(formats, refusals, strict=True))
    raise ConfigError("model", model.name, f"cannot be exported as any class; {reasons}")


def _check_expressible(model: LanguageModelConfig, fla: FlaFormat) -> None:
    """Raise `ConfigError` unless the library's configuration can express the model."""
    if not model.causal:
        raise ConfigError("model.causal", "false", f"fla's {fla.name} is causal, so this model cannot be exported")
    for name, value in fla.decided.items():
        # The same model may be written in several ways.
        if replace(model, **{name: value}).canonical() != model.canonical():
            allowed = f"{fla.owner} {fla.name} knows {value} only, so this model cannot be exported"
            raise ConfigError(f"model.{name}", getattr(model, name), allowed)
    for name, most in fla.most.items():
        if (own := getattr(model, name)) > most:
            allowed = f"{fla.owner} {fla.name} takes at most {most}, so this model cannot be exported"
            raise ConfigError(f"model.{name}", own, allowed)
    _softmax_keys(model, fla, 1)


def _softmax_keys(model: LanguageModelConfig, fla: FlaFormat, seq_len: int) -> dict[str, Any]:
    """The keys of config.json on softmax layers, and those that are the same in all models of fla."""
    if fla.softmax is not None:
        return attention_to_transformers(model, fla, seq_len)
    attn = attention_to_fla(model, fla)
    return {**_written_of_fla(seq_len), ATTENTION_KEY: attn} if fla.library == "fla" else {}


def to_fla(
    model: LanguageModelConfig,
    tokenizer: Tokenizer,
    pad_id: int | None,
    seq_len: int,
    dtype: str,
    model_type: str | None = None,
) -> dict[str, Any]:
    """The contents of config.json.

    Args:
        model: the shape.
        tokenizer: provides the end-of-sequence id; there is no beginning-of-sequence token.
        pad_id: padding id, if there is one.
        seq_len: sequence length in training; no limit of the model, but tools require one.
        dtype: of the weights, by its torch name.
        model_type: of the format, see `format_of`.

    Raises:
        ConfigError: fla's configuration cannot express the model.
    """
    fla = format_of(model, model_type)
    own_keys = (*_SAME, *fla.numbers, *fla.pairs, *fla.optional, *fla.switches, *fla.needed)
    fields = {key: getattr(model, key) for key in own_keys if key not in fla.decided}
    fields |= {key: [_written(value) for value in fields[key]] for key in fla.pairs}
    choices = {key: getattr(model, key) for key in fla.choices}
    record = {
        **_softmax_keys(model, fla, seq_len),
        "architectures": [fla.architecture],
        "bos_token_id": None,
        "dtype": dtype,
        "eos_token_id": tokenizer.eos_id,
        "model_type": fla.model_type,
        "num_hidden_layers": model.num_layers,
        "pad_token_id": pad_id,
        "use_cache": True,
        **{fla.keys.get(key, key): value for key, value in fields.items()},
        **{copy: fields[key] for key, copy in fla.copies.items()},
        **{key: None if choice is None else choice.value for key, choice in choices.items()},
        **{key: value(model) for key, value in fla.computed.items()},
        **fla.written,
    }
    return dict(sorted(record.items()))


def _written_of_fla(seq_len: int) -> dict[str, Any]:
    """Keys that are the same in all models of fla."""
    return {
        "elementwise_affine": True,
        "fuse_cross_entropy": True,
        "fuse_norm": True,
        "fuse_swiglu": True,
        "hidden_act": "swish",
        "hidden_ratio": None,
        "max_position_embeddings": seq_len,
    }


def _written(value: float) -> Any:
    return _INFINITY if value == math.inf else value


def _known(file: Path, model_type: Any) -> tuple[type[Mixer], FlaFormat]:
    formats = [(mixer, fla) for mixer in MIXERS.values() for fla in (mixer.fla, *mixer.other_formats)]
    known = {fla.model_type: (mixer, fla) for mixer, fla in formats if fla is not None}
    # Not `in known`, which raises for lists and objects.
    if model_type not in list(known):
        raise _refusal(file, "model_type", model_type, f"only {', '.join(map(repr, known))} can be read")
    return known[model_type]


def _default_inner(width: int, ratio: int | None) -> int:
    """The default MLP width of fla: 2/3 · ratio · width, rounded up to a multiple of 256."""
    return -(-int(width * (4 if ratio is None else ratio) * 2 / 3) // 256) * 256


def _checked(file: Path, key: str, value: Any, kind: type) -> Any:
    """Check a value's type, one of `_KINDS`, and a number's size.

    An int is accepted as float, a bool is not accepted as a number.
    """
    allowed = int | float if kind is float else kind
    is_kind = isinstance(value, allowed) and isinstance(value, bool) == (kind is bool)
    if not is_kind or not -_LARGEST <= value <= _LARGEST:
        raise _refusal(file, key, value, f"must be {_KINDS[kind]}")
    return kind(value)


def _checked_pair(file: Path, key: str, value: Any) -> tuple[float, float]:
    """Check a list of two numbers, of which the second may be infinite."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise _refusal(file, key, value, "must be a list of two numbers")
    # Python's JSON reads Infinity as a float; transformers writes an object.
    is_infinite = value[1] == _INFINITY or value[1] == math.inf
    return _checked(file, key, value[0], float), math.inf if is_infinite else _checked(file, key, value[1], float)


def _refusal(file: Path, key: str, value: Any, problem: str) -> ConfigError:
    return ConfigError(f"{file}: {key}", f"{value!s:.80}", problem)
