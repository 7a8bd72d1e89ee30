"""How a mixer's models are called in flash-linear-attention (fla) 0.6.0: what `zeco_train.hf` reads and writes by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class FlaFormat:
    """fla's class for a language model with this mixer, and the keys of its config.json beside those of every model.

    A key and the field of our configuration have one name.

    Attributes:
        model_type, architecture: as in config.json.
        title: what the model card says that the model has.
        numbers: keys of numbers, with fla's defaults for what a file leaves out.
        optional: keys of numbers that may be null, with their kind.
        switches: keys that are true or false, with fla's defaults.
        choices: keys that are null or the name of one of an Enum's values.
        aliases: of `choices`, other names for a value.
        fixed: fields with the only value that fla's layer has; out of its configuration's reach.
        refused: keys with the only value that our model has, and the meaning of another one.
        written: keys that only a file has.
        plain_norm: part of parameters' names, ours to that of a file with `fuse_norm` false.
    """

    model_type: str
    architecture: str
    title: str
    numbers: Mapping[str, int | float] = field(default_factory=dict)
    optional: Mapping[str, type] = field(default_factory=dict)
    switches: Mapping[str, bool] = field(default_factory=dict)
    choices: Mapping[str, type[Enum]] = field(default_factory=dict)
    aliases: Mapping[str, Enum] = field(default_factory=dict)
    fixed: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    plain_norm: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As fla's documentation calls the model."""
        return self.architecture.removesuffix("ForCausalLM")
