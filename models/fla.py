"""The flash-linear-attention (fla) 0.6.0 format of a mixer's models, for `zeco_train.hf` to read and write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class FlaFormat:
    """fla's class for a language model with this mixer, and the mixer-specific keys of its config.json.

    Keys have the same names as the fields of our configuration, except those in `keys`.

    Attributes:
        model_type, architecture: as in config.json.
        title: description of the model in the model card.
        numbers: numeric keys, with fla's defaults for missing ones.
        optional: numeric keys that may be null, with their type.
        switches: boolean keys, with fla's defaults.
        choices: keys that are null or the name of an Enum member.
        choice_defaults: fla's defaults of `choices`, where that is not null; null is refused then.
        aliases: alternative names for values of `choices`.
        fixed: fields that fla's layer hard-codes and its configuration cannot change, with their value.
        refused: keys with the only value that our model supports, and the meaning of any other value.
        written: keys that are written to the file but not read.
        keys: names of fields whose keys have other names, ours → fla's.
        plain_norm: parameter name parts, ours → those of a file with `fuse_norm` false.
    """

    model_type: str
    architecture: str
    title: str
    numbers: Mapping[str, int | float] = field(default_factory=dict)
    optional: Mapping[str, type] = field(default_factory=dict)
    switches: Mapping[str, bool] = field(default_factory=dict)
    choices: Mapping[str, type[Enum]] = field(default_factory=dict)
    choice_defaults: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, Enum] = field(default_factory=dict)
    fixed: Mapping[str, int | float] = field(default_factory=dict)
    refused: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    plain_norm: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the model in fla's documentation."""
        return self.architecture.removesuffix("ForCausalLM")
