"""Validates command-line overrides one by one, before Hydra composes them; also builds settings without Hydra.

Hydra's own errors take several lines and seldom list the allowed values, and an unknown key behind a `+` raises none.
Its grammar gives many characters a meaning. Names and paths may have any: a key of type text takes what follows the
first `=` as it was typed, except that `null`, `${…}` and a value wholly in quotes mean what they mean to Hydra.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import lru_cache
from typing import Any, ClassVar, Protocol, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zeco_train.errors import ConfigError

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_INT64_LIMIT = 1 << 63
# Once for a class: half of the time of all checks.
_hints = lru_cache(typing.get_type_hints)
_EXAMPLE = "train.steps=100"
_ASSIGNMENT = re.compile(r"(\+{0,2}[\w.]+)=(.+)", re.S)
# Keys of earlier versions, with what replaces each: setting one gives this line.
REMOVED = {
    "data.verify_changed": "went in 0.3: a token file that changed is refused until data.verify=true has read all once",
}


C = TypeVar("C", bound="Settings")


class Settings(Protocol):
    """The settings dataclass of a command that composes no configuration files."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def validate(self) -> None:
        """Raise `ConfigError` for a value out of range."""


def load_settings(schema: type[C], arguments: Sequence[str]) -> C:
    """Build settings from KEY=VALUE arguments in Hydra's syntax, and validate them.

    Raises:
        ConfigError: an argument of another form, an unknown key, a value of the wrong type or out of range.
    """
    config = parse_settings(schema, arguments)
    config.validate()
    return config


def parse_settings(schema: type[C], arguments: Sequence[str]) -> C:
    """`load_settings` without ranges, for a caller that adds values of its own before it validates them."""
    settings = OmegaConf.structured(schema)
    # An example for error messages; a bool is no whole number.
    number = next(entry.name for entry in dataclasses.fields(schema) if type(settings[entry.name]) is int)
    example = f"{number}={settings[number]}"
    check_groups(arguments, {}, (), schema, example)
    apply_overrides(arguments, settings, (), example)
    config = OmegaConf.to_object(settings)
    assert isinstance(config, schema)
    return config


def as_override(value: Any) -> str:
    """A value in the syntax of overrides."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_override, value))}]"
    return str(value).translate({ord(character): None for character in " '"})


def is_of(key: str, *names: str) -> bool:
    """Whether a key is one of these, or lies in a section among them."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def check_groups(
    overrides: Sequence[str],
    groups: Mapping[str, Collection[str]],
    sections: Collection[str],
    schema: Any,
    example: str = _EXAMPLE,
) -> None:
    """Check the form of each override, and the files of `configs/` that some choose.

    `groups` has the options of each configuration group; `sections` are those with a file that is chosen by default;
    `schema`, a dataclass, the types of keys.

    Raises:
        ConfigError: names the override and the allowed values.
    """
    for text in overrides:
        override = _parse(text, example)
        key, shown = override.key_or_group, text.partition("=")[2]
        if override.is_delete():
            raise ConfigError("argument", text, "nothing can be deleted; set a value with KEY=VALUE")
        if override.is_sweep_override() and not _takes_text(key, schema):
            raise ConfigError(key, shown, "takes one value; sweeps are not run here")
        if override.package is not None:
            raise ConfigError("argument", text, f"groups stay where they are; write {key}={shown}")
        if key in groups and not isinstance(override.value(), dict):
            _check_group(override, shown, groups[key], has_default=key in sections)


def of_groups(overrides: Sequence[str], groups: Collection[str]) -> list[str]:
    """The overrides that choose a file of one of the groups."""
    parsed = [(text, _parse(text, _EXAMPLE)) for text in overrides]
    return [text for text, one in parsed if one.key_or_group in groups and not isinstance(one.value(), dict)]


def find_value(overrides: Sequence[str], key: str) -> Any:
    """The value that the last override of a key sets, of any type, null as text; None if there is none."""
    parsed = [_parse(text, _EXAMPLE) for text in overrides]
    valued = [override for override in parsed if not (override.is_delete() or override.is_sweep_override())]
    leaves = dict(leaf for override in valued for leaf in _leaves(override.key_or_group, override.value()))
    return "null" if key in leaves and leaves[key] is None else leaves.get(key)


def set_keys(overrides: Sequence[str], groups: Collection[str]) -> set[str]:
    """The keys that checked overrides set, without groups."""
    parsed = [_parse(text, _EXAMPLE) for text in overrides]
    leaves = [leaf for one in parsed for leaf in _leaves(one.key_or_group, one.value())]
    return {key for key, value in leaves if key not in groups}


def _takes_text(key: str, schema: Any) -> bool:
    kind = _type_of(key, schema)
    return str in (kind, *typing.get_args(kind)) and typing.get_origin(kind) is not list


def apply_overrides(
    overrides: Sequence[str], settings: Any, groups: Collection[str] = (), example: str = _EXAMPLE
) -> dict[str, Any]:
    """Set the values of overrides that `check_groups` accepts, after checks of keys and types, without ranges.

    `settings`, an OmegaConf instance of a dataclass, is changed. Choices of files of `groups` are skipped; `example` is
    an override, for messages. Returns the new value of each key, as it was written.

    Raises:
        ConfigError: names the key, its value and what is allowed.
    """
    schema, values = OmegaConf.get_type(settings), dict[str, Any]()
    for text in overrides:
        override = _parse(text, example)
        key, value, shown = override.key_or_group, override.value(), text.partition("=")[2]
        if key in groups and not isinstance(value, dict):
            continue
        if _takes_text(key, schema):
            is_quoted = isinstance(value, str) and shown[:1] in ("'", '"')
            leaves = [(key, value if value is None or is_quoted else shown, shown)]
        else:
            leaves = [(name, part, shown if name == key else part) for name, part in _leaves(key, value)]
        for name, part, written in leaves:
            _check_value(name, part, written, settings, groups)
            if override.type is OverrideType.ADD:
                raise ConfigError(f"+{name}", written, f"the key exists; write {name}={written}")
            values[name] = written
    return values


@lru_cache(maxsize=1024)
def _parse(text: str, example: str) -> Override:
    # Once what several checks read: the parser takes a millisecond.
    parser = OverridesParser.create()
    try:
        return parser.parse_override(text)
    except HydraException as error:
        if (match := _ASSIGNMENT.fullmatch(text)) is not None:
            # As text, which keys of other types refuse, unless the grammar has no such key.
            with suppress(HydraException):
                return parser.parse_override(f"{match[1]}={QuotedString(match[2], Quote.single).with_quotes()}")
        raise ConfigError("argument", text, f"must be KEY=VALUE, as in {example}") from error


def _check_group(override: Override, shown: str, options: Collection[str], has_default: bool) -> None:
    # A group without a default, such as `experiment`, needs a `+`.
    group, value = override.key_or_group, override.value()
    # A list of files may be added if there is no default to replace.
    chosen = value if isinstance(value, list) and not has_default else [value]
    if any(option not in options for option in chosen):
        raise ConfigError(group, shown, f"must be one of {', '.join(options)}")
    expected = OverrideType.CHANGE if has_default else OverrideType.ADD
    if override.type is not expected:
        raise ConfigError("argument", override.input_line, f"write {'' if has_default else '+'}{group}={shown}")


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield key, value
        return
    for name, inner in value.items():
        yield from _leaves(f"{key}.{name}", inner)


def _check_value(key: str, value: Any, shown: Any, settings: Any, groups: Collection[str]) -> None:
    # By setting it in `settings`, an instance of the schema.
    schema = OmegaConf.get_type(settings)
    kind = _type_of(key, schema)
    if kind is None:
        mixer = getattr(_kinds(schema).get(key.partition(".")[0]), "mixer", None)
        raise ConfigError(key, shown, _unknown(key, [*groups, *_keys(schema)], mixer))
    if dataclasses.is_dataclass(kind):
        raise ConfigError(key, shown, f"is a section; set its keys, such as {key}.{dataclasses.fields(kind)[0].name}")
    element = typing.get_args(kind)[0] if typing.get_origin(kind) is list else None
    if dataclasses.is_dataclass(element):
        _check_sections(key, value, shown, element, settings)
        return
    if OmegaConf.select(settings, key.rpartition(".")[0] or "") is None:
        raise ConfigError(key, shown, "does not fit what it changes, as a number beyond the end of a list")
    try:
        OmegaConf.update(settings, key, value, merge=True)
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(key, shown, f"must be {_allowed(kind)}{_inner_quotes(value)}") from error
    numbers = typing.get_args(kind) if typing.get_origin(kind) is tuple else None
    if numbers is not None and isinstance(value, list) and len(value) != len(numbers):
        raise ConfigError(key, shown, f"must be {_allowed(kind)}")
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, int) and not -_INT64_LIMIT <= number < _INT64_LIMIT:
            raise ConfigError(key, shown, "must fit into 64 bits")
        if isinstance(number, float) and not math.isfinite(number):
            raise ConfigError(key, shown, "must be finite")


def _check_sections(key: str, value: Any, shown: Any, section: Any, settings: Any) -> None:
    kinds = typing.get_type_hints(section)
    names = ", ".join(kinds)
    if not isinstance(value, list) or not all(isinstance(element, dict) for element in value):
        allowed = f"must be a list [{{{next(iter(kinds))}:…}}, …] of sections with {names}{_inner_quotes(value)}"
        raise ConfigError(key, shown, allowed)
    OmegaConf.update(settings, key, [{} for _ in value])
    for number, element in enumerate(value):
        for name, part in element.items():
            field = f"{key}.{number}.{name}"
            if name not in kinds:
                raise ConfigError(field, part, f"unknown key; allowed: {names}")
            if isinstance(part, float) and str in (kinds[name], *typing.get_args(kinds[name])):
                raise ConfigError(field, part, "is a number; text that looks like one needs quotes of its own")
            _check_value(field, part, part, settings, ())


def _inner_quotes(value: Any) -> str:
    is_list = isinstance(value, str) and value[:1] in ("[", "{")
    return "; text with special characters needs quotes inside [ ] and { }" if is_list else ""


def _type_of(key: str, schema: Any) -> Any:
    kind = schema
    for part in key.split("."):
        if dataclasses.is_dataclass(kind):
            kind = _kinds(kind).get(part)
        elif typing.get_origin(kind) in (list, tuple) and part.isdigit():
            elements = typing.get_args(kind)
            kind = elements[0] if typing.get_origin(kind) is list or int(part) < len(elements) else None
        else:
            return None
    return kind


def _kinds(schema: Any) -> dict[str, Any]:
    # For a section its default's type, which may be narrower than the annotation.
    hints, kinds = _hints(schema), {}
    for entry in dataclasses.fields(schema):
        default: Any = entry.default_factory
        kinds[entry.name] = default if dataclasses.is_dataclass(default) else hints[entry.name]
    return kinds


def _allowed(kind: Any) -> str:
    if isinstance(kind, types.UnionType):
        return " or ".join(_allowed(member) for member in typing.get_args(kind))
    if kind is types.NoneType:
        return "null"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(member.name for member in kind)}"
    if typing.get_origin(kind) in (list, tuple):
        elements = typing.get_args(kind)
        return f"a list [{', '.join(_allowed(e) for e in elements)}{', …' if typing.get_origin(kind) is list else ''}]"
    return _KINDS[kind]


def _keys(schema: Any, prefix: str = "") -> list[str]:
    keys = []
    for name, kind in _kinds(schema).items():
        keys.append(f"{prefix}{name}")
        if dataclasses.is_dataclass(kind):
            keys += _keys(kind, f"{prefix}{name}.")
    return keys


def _unknown(key: str, known: Sequence[str], mixer: str | None) -> str:
    if key.partition(".")[0] == "hydra":
        return "Hydra only composes the configuration of train.py, and there are no hydra settings"
    if key in REMOVED:
        return REMOVED[key]
    # `steps` for train.steps: a forgotten section is likelier than a misspelt key.
    close = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]][:3]
    # A common section alone is not close.
    close = close or difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    of_mixer = f" of mixer {mixer}" if mixer else ""
    return f"unknown key{of_mixer}; " + (f"did you mean {' or '.join(close)}?" if close else "--help lists all")
