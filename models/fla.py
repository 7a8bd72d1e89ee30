"""The Hugging Face format of a mixer's models, for `zeco_train.hf` to read and write.

Most are formats of flash-linear-attention (fla) 0.6.0; some models have a class in transformers itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class Derived:
    """A key that the library computes from others.

    Attributes:
        source: the key that decides it, for messages.
        value: the values by our names → the key's value, or None if they do not determine it.
        allowed: values of `source` that do.
    """

    source: str
    value: Callable[[Mapping[str, Any]], int | None]
    allowed: str


@dataclass(frozen=True)
class FlaFormat:
    """The class for a language model with this mixer, and the mixer-specific keys of its config.json.

    Keys have the same names as the fields of our configuration, except those in `keys`.

    Attributes:
        model_type, architecture: as in config.json.
        title: description of the model in the model card.
        library: that has the class, "fla" or "transformers".
        defaults: of keys that all models have, for missing ones, where they differ from fla's GLA.
        keys: fields with another name in config.json: ours → the file's.
        numbers: numeric keys, with the library's defaults for missing ones.
        pairs: keys that are a list of two numbers, with the library's defaults.
        optional: numeric keys that may be null, with their type.
        optional_defaults: the library's defaults of `optional` and of hidden_ratio, where they differ from null and 4.
        derived: `optional` keys that the library computes from others.
        switches: boolean keys, with the library's defaults.
        choices: keys that are null or the name of an Enum member.
        choice_defaults: fla's defaults of `choices`, where that is not null; null is refused then.
        aliases: alternative names for values of `choices`.
        fixed: fields that the library's model hard-codes and its configuration cannot change, with their value.
        refused: keys with the only value that our model supports, and the meaning of any other value.
        equals: keys of `refused` that may also have the value of another key, one of `numbers`.
        most: numbers of our model's shape that the library's model bounds, with the largest; on export.
        written: keys that are written to the file but not read.
        copies: keys that are written once more under a second name, for another library that reads the file.
        plain_norm: parameter name parts, ours → those of a file with `fuse_norm` false.
        parts: parameter name parts, ours → the file's, replaced one after the other.
    """

    model_type: str
    architecture: str
    title: str
    library: str = "fla"
    defaults: Mapping[str, int | float] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, int | float] = field(default_factory=dict)
    pairs: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    optional: Mapping[str, type] = field(default_factory=dict)
    optional_defaults: Mapping[str, int] = field(default_factory=dict)
    derived: Mapping[str, Derived] = field(default_factory=dict)
    switches: Mapping[str, bool] = field(default_factory=dict)
    choices: Mapping[str, type[Enum]] = field(default_factory=dict)
    choice_defaults: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, Enum] = field(default_factory=dict)
    fixed: Mapping[str, int | float] = field(default_factory=dict)
    refused: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    equals: Mapping[str, str] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    plain_norm: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """The library in the possessive, for messages."""
        return f"{self.library}'" if self.library.endswith("s") else f"{self.library}'s"

    @property
    def name(self) -> str:
        """Name of the model in the library's documentation."""
        return self.architecture.removesuffix("ForCausalLM")
