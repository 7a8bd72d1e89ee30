"""Training that goes on from a model in Hugging Face's form: whether the run's configuration is of that model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from data.tokenizer import BYTES, HuggingFaceTokenizer
from models.config import LanguageModelConfig
from zeco_train.config.overrides import as_override
from zeco_train.errors import ConfigError, DataError
from zeco_train.hf.folder import checked_fla_model
from zeco_train.hf.tokenizer import tokenizer_info

# They name it, and say how it was begun.
_NOT_OF_THE_MODEL = ("name", "initializer_range")


def check_continuation(folder: Path, model: LanguageModelConfig) -> None:
    """Check that the model in `folder` is the one that is configured.

    Raises:
        ConfigError: it is another one; the overrides that it takes are named.
        CheckpointError: its files cannot be read, or do not fit its own configuration.
    """
    found = checked_fla_model(folder).model
    fields = [entry.name for entry in dataclasses.fields(model) if entry.name not in _NOT_OF_THE_MODEL]
    different = [name for name in fields if getattr(found, name) != getattr(model, name)]
    if different:
        overrides = " ".join(f"model.{name}={as_override(getattr(found, name))}" for name in different)
        own = as_override(getattr(model, different[0]))
        raise ConfigError(f"model.{different[0]}", own, f"the model in {folder} is another one; it takes: {overrides}")


def other_tokenizer(folder: Path, of_data: Mapping[str, str]) -> str | None:
    """What to tell the user if the tokens of the data are not, or may not be, those that the model knows."""
    info = tokenizer_info(folder)
    if info is None:
        return f"{folder} has no tokenizer: whether its tokens are those of the data, nobody has checked"
    is_bytes, of_bytes = (one.get("kind") == BYTES for one in (info, of_data))
    try:
        same = is_bytes == of_bytes
        if same and not is_bytes:
            same = HuggingFaceTokenizer(str(folder)).info["sha256"] == of_data.get("sha256")
    except DataError as error:
        return f"whether its tokens are those of the data, nobody can check: {error}"
    if same:
        return None
    return f"the tokenizer in {folder} is not the one that the data was prepared with; the model may not know its ids"
