"""Checks for training from a Hugging Face folder: whether the run's configuration matches the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.tokenizer import BYTES, HuggingFaceTokenizer
from models.config import LanguageModelConfig
from zeco_train.config.overrides import as_override
from zeco_train.errors import ConfigError, DataError
from zeco_train.hf.config_json import model_fields
from zeco_train.hf.folder import checked_model
from zeco_train.hf.tokenizer import tokenizer_info


def check_continuation(folder: Path, model: LanguageModelConfig) -> None:
    """Check that the model in `folder` matches the configured one.

    Raises:
        ConfigError: it differs; the message names the overrides that it needs.
        CheckpointError: its files cannot be read, or do not match its own configuration.
    """
    found = checked_model(folder).model
    # Keys of `found`: a model with another mixer has other ones, and `mixer` is the first.
    theirs, own = _trained_fields(found), _trained_fields(model.canonical())
    different = [key for key, value in theirs.items() if key not in own or own[key] != value]
    if different:
        overrides = " ".join(f"model.{key}={as_override(theirs[key])}" for key in different)
        value = as_override(_trained_fields(model).get(different[0]))
        raise ConfigError(
            f"model.{different[0]}", value, f"the model in {folder} is another one; it takes: {overrides}"
        )


def _trained_fields(model: LanguageModelConfig) -> dict[str, Any]:
    # Its initialisation is not part of a trained model.
    return {key: value for key, value in model_fields(model).items() if key != "initializer_range"}


def other_tokenizer(folder: Path, of_data: Mapping[str, str]) -> str | None:
    """A warning if the data's tokenizer is not, or may not be, the model's; None if they match."""
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
