"""What a file of this folder says of one class of language models in fla or transformers, and how it reads config.json.

A stranger may have written a config.json: `Keys` checks its values, and nothing of it is run, whatever it holds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from models.mixers.base import Mixer
from zeco_train.errors import ConfigError

# More than any model needs, and little enough that the products of three are sizes that torch can express.
_LARGEST = 1 << 20
_RANGE = f"from −{_LARGEST:,} to {_LARGEST:,}"
_KINDS = {int: f"a whole number {_RANGE}", float: f"a number {_RANGE}", bool: "true or false"}
# As transformers writes a float that JSON has not.
_INFINITY = {"__float__": "Infinity"}
_REQUIRED = object()


class Keys:
    """A mapping of a config.json, or one inside it, whose keys have a prefix in messages.

    Every method raises a `ConfigError` that names the key.
    """

    def __init__(self, file: Path, record: Mapping[str, Any], prefix: str = "") -> None:
        self.file = file
        self.record = record
        self._prefix = prefix

    def refusal(self, key: str, value: Any, problem: str) -> ConfigError:
        return ConfigError(f"{self.file}: {self._prefix}{key!s:.80}", f"{value!s:.80}", problem)

    def inner(self, key: str, record: Mapping[str, Any]) -> Keys:
        return Keys(self.file, record, f"{self._prefix}{key}.")

    def only(self, supported: Mapping[str, tuple[Any, str]]) -> None:
        """Refuse other values of keys than the supported one; each comes with what others mean."""
        for key, (value, meaning) in supported.items():
            if (found := self.record.get(key, value)) != value:
                raise self.refusal(key, found, f"{meaning}: not supported, only {value}")

    def only_known(self, *keys: str) -> None:
        for key, value in self.record.items():
            if key not in keys:
                raise self.refusal(key, value, f"not supported, only {', '.join(keys)}")

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        """An int, float or bool. An int is accepted as float, a bool is not accepted as a number."""
        return self._checked(key, self.record.get(key, default), kind)

    def values(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Values of the types of the defaults, by key."""
        return {key: self.value(key, type(default), default) for key, default in defaults.items()}

    def optional(self, key: str, kind: type = int, default: Any = None) -> Any:
        """As `value`, or null."""
        value = self.record.get(key, default)
        return None if value is None else self._checked(key, value, kind)

    def positive(self, key: str, default: int | None = None, null: Any = _REQUIRED, most: int = _LARGEST) -> Any:
        """A whole number from 1 on; null means `null`, if that is given."""
        value = self.record.get(key, default)
        return null if value is None and null is not _REQUIRED else self.whole(key, value, 1, most)

    def whole(self, key: str, value: Any, least: int, most: int = _LARGEST) -> int:
        """Check a whole number, the value of a key or a part of it."""
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refusal(key, value, f"must be a whole number ≥ {least}")
        return value

    def choice(self, key: str, names: Mapping[str, Enum], default: str | None = None) -> Any:
        """The member that a name stands for; null is None if that is the default."""
        name = self.record.get(key, default)
        if name is None and default is None:
            return None
        # Not `in names`, which raises for lists and objects.
        if name not in list(names):
            raise self.refusal(key, name, f"not supported, only {', '.join(names)}")
        return names[name]

    def either(self, key: str, other: str) -> str:
        """The one of two keys to read; they mean the same, and must agree if both are there."""
        record = self.record
        if key in record and other in record and record[other] != record[key]:
            raise self.refusal(other, record[other], f"differs from {key}={record[key]!s:.80}, which means the same")
        return key if key in record else other

    def pair(self, key: str, default: tuple[float, float]) -> tuple[float, float]:
        """A list of two numbers, of which the second may be infinite."""
        value = self.record.get(key, default)
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise self.refusal(key, value, "must be a list of two numbers")
        # Python's JSON reads Infinity as a float; transformers writes an object.
        is_infinite = value[1] == _INFINITY or value[1] == math.inf
        return self._checked(key, value[0], float), math.inf if is_infinite else self._checked(key, value[1], float)

    def _checked(self, key: str, value: Any, kind: type) -> Any:
        allowed = int | float if kind is float else kind
        is_kind = isinstance(value, allowed) and isinstance(value, bool) == (kind is bool)
        if not is_kind or not -_LARGEST <= value <= _LARGEST:
            raise self.refusal(key, value, f"must be {_KINDS[kind]}")
        return kind(value)


def is_number(value: Any, above: float) -> bool:
    """Whether a value is finite and above a bound. Compared as a number of any size: a large int is no float."""
    return not isinstance(value, bool) and isinstance(value, int | float) and above < value <= sys.float_info.max


def in_json(value: float) -> Any:
    """A number as transformers writes it."""
    return _INFINITY if value == math.inf else value


def not_exported(field: str, value: Any, problem: str) -> ConfigError:
    """The error for a field of `model` that a class cannot express."""
    return ConfigError(f"model.{field}", shown(value), f"{problem}, so this model cannot be exported")


def shown(value: Any) -> str:
    """A value as in YAML, and not longer than a line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value!s:.80}"


@dataclass(frozen=True)
class Rows:
    """Tensors of a file that together hold the rows of several of our parameters.

    Attributes:
        ours: our parameters in a layer, in the order of the rows, such as `attn.q_proj.weight`.
        theirs: the file's tensors in a layer, in that order. As many as ours: an export writes one for each, and a file
            may cut the rows elsewhere.
        by_heads: the rows of each head of queries lie together: of each head first those of the first parameter.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    by_heads: bool = False


@dataclass(frozen=True)
class Names:
    """Names of a layer's tensors.

    Attributes:
        parts: parts of parameter names, ours → the file's, replaced one after the other.
        rows: tensors of other rows than our parameters.
    """

    parts: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[Rows, ...] = ()


@dataclass(frozen=True)
class ModelFormat:
    """A class of language models: its config.json, and the names of its tensors.

    Attributes:
        model_type, architecture: as in config.json.
        library: that has the class, "fla" or "transformers".
        mixer: of the models.
        read: config.json → the fields of `mixer.config_class`, without its name.
        write: (configuration, sequence length in training) → the keys of config.json that are not the same in all
            formats. A setting that `read` does not give back is refused without a check here.
        names: of layers with the mixer, and of what lies outside of layers.
        softmax_names: of softmax layers; null: the same.
        other_names: name parts that files may have in place of the library's own: the file's → the library's.
        title: of the model in the model card; null: the mixer's.
        remark: a sentence of the model card on what not all versions of the library compute alike, or "".
    """

    model_type: str
    architecture: str
    library: str
    mixer: type[Mixer]
    read: Callable[[Keys], dict[str, Any]]
    write: Callable[[Any, int], dict[str, Any]]
    names: Names = field(default_factory=Names)
    softmax_names: Names | None = None
    other_names: Mapping[str, str] = field(default_factory=dict)
    title: str | None = None
    remark: Callable[[Any], str] = lambda config: ""

    @property
    def name(self) -> str:
        """As in the library's documentation."""
        return self.architecture.removesuffix("ForCausalLM")

    @property
    def label(self) -> str:
        """The class in messages, such as "fla's GLA"."""
        owner = "transformers'" if self.library == "transformers" else "fla's"
        return f"{owner} {self.name}"
