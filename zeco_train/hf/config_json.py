"""Conversion between config.json and this package's configuration of a model, by the formats of `models.formats`.

Settings that the other side does not support are rejected by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.tokenizer import Tokenizer
from models.config import LanguageModelConfig
from models.formats.format import Keys, ModelFormat, not_exported, shown
from models.formats.format_registry import FORMATS, formats_of
from zeco_train.checkpoint.files import HF_CONFIG_FILE as CONFIG_FILE
from zeco_train.errors import ConfigError
from zeco_train.hf.names import StoredModel


def from_config_json(record: Mapping[str, Any], path: Path) -> StoredModel:
    """Convert a config.json in the folder `path` to a model configuration, with the folder's name.

    Raises:
        ConfigError: an unknown model, or an unsupported setting; names the key.
    """
    keys = Keys(path / CONFIG_FILE, record)
    known = {one.model_type: one for one in FORMATS}
    # Not `in known`, which raises for lists and objects.
    if (model_type := record.get("model_type")) not in list(known):
        raise keys.refusal("model_type", model_type, f"only {', '.join(map(repr, known))} can be read")
    form = known[model_type]
    names = record.get("architectures") or [form.architecture]
    if not (isinstance(names, list | str) and form.architecture in names):
        raise keys.refusal("architectures", names, f"only {form.architecture} can be read")
    keys.only({"quantization_config": (None, "quantised weights")})
    fields = form.read(keys)
    try:
        model = form.mixer.config_class(name=str(path.resolve().name), **fields)
    except ConfigError as error:
        raise ConfigError("config", keys.file, f"is of no model that can be built: {error}") from error
    return StoredModel(model.canonical(), form)


def to_config_json(
    model: LanguageModelConfig,
    tokenizer: Tokenizer,
    pad_id: int | None,
    seq_len: int,
    dtype: str,
    model_type: str | None = None,
) -> dict[str, Any]:
    """The contents of config.json.

    Args:
        tokenizer: provides the end-of-sequence id; there is no beginning-of-sequence token.
        seq_len: sequence length in training; no limit of the model, but tools require one.
        dtype: of the weights, by its torch name.
        model_type: of the format; None: the first that can express the model.

    Raises:
        ConfigError: no format can express the model.
    """
    form = format_of(model, model_type)
    record = {
        **form.write(model, seq_len),
        "architectures": [form.architecture],
        "bos_token_id": None,
        "dtype": dtype,
        "eos_token_id": tokenizer.eos_id,
        "model_type": form.model_type,
        "num_hidden_layers": model.num_layers,
        "pad_token_id": pad_id,
        "use_cache": True,
    }
    return dict(sorted(record.items()))


def format_of(model: LanguageModelConfig, model_type: str | None = None) -> ModelFormat:
    """The format of a model's export: the one that is asked for, or the first that can express it, or `ConfigError`."""
    formats = {one.model_type: one for one in formats_of(model)}
    if not formats:
        raise ConfigError("model", model.name, f"fla has no model with {model.mixer}, so this one cannot be exported")
    if model_type is not None:
        if model_type not in formats:
            raise ConfigError("model_type", model_type, f"a model with {model.mixer} can be: {', '.join(formats)}")
        formats = {model_type: formats[model_type]}
    refusals = []
    for form in formats.values():
        try:
            check_expressible(model, form)
        except ConfigError as error:
            refusals.append(error)
        else:
            return form
    if len(refusals) == 1:
        raise refusals[0]
    reasons = "; ".join(f"as {name}: {error}" for name, error in zip(formats, refusals, strict=True))
    raise ConfigError("model", model.name, f"cannot be exported as any class; {reasons}")


def check_expressible(model: LanguageModelConfig, form: ModelFormat) -> None:
    """Raise `ConfigError` for the first field that the format's config.json would not give back."""
    record = {**form.write(model, 1), "num_hidden_layers": model.num_layers}
    found = form.mixer.config_class(**form.read(Keys(Path(CONFIG_FILE), record))).canonical()
    theirs = model_fields(found)
    for key, value in model_fields(model.canonical()).items():
        if value != theirs[key]:
            raise not_exported(key, value, f"{form.label} has {shown(theirs[key])} only")


def model_fields(model: LanguageModelConfig) -> dict[str, Any]:
    """The values of a configuration by key, `attn.layers` and its like among them, without the name."""
    values = {entry.name: getattr(model, entry.name) for entry in dataclasses.fields(model)}
    del values["name"], values["attn"]
    return values | {f"attn.{entry.name}": getattr(model.attn, entry.name) for entry in dataclasses.fields(model.attn)}
