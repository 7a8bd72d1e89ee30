"""The `--help` texts of settings. What a key means stands once: in the docstring of the dataclass that has it."""

from __future__ import annotations

import dataclasses
import re
import textwrap
import typing
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

from zeco_train.config.overrides import Settings, as_override
from zeco_train.system.command import docstring

# Columns of a line, and of what stands before a key's meaning.
WIDTH, _BEFORE = 120, 38


class Key(NamedTuple):
    """A setting: its name on the command line, value, meaning, and the values to choose from, if they have names."""

    name: str
    value: Any
    meaning: str
    options: tuple[str, ...] = ()

    @property
    def brief(self) -> str:
        """The line of an overview: the meaning up to its first period or semicolon."""
        value = as_override(self.value)
        before = f"  {self.name}={value if len(value) <= _BEFORE else f'{value[:_BEFORE]}…'}"
        return f"{before:<{_BEFORE}}  {first_clause(self.meaning)}".rstrip()

    @property
    def whole(self) -> str:
        """The whole meaning, and what it may be."""
        before = f"  {self.name}={as_override(self.value)}"
        # Names that the meaning does not explain.
        options = () if all(option in self.meaning for option in self.options) else self.options
        text = self.meaning + (f" (of {', '.join(options)})" if options else "")
        lines = textwrap.wrap(text, WIDTH - _BEFORE - 2, break_on_hyphens=False)
        indented = [" " * (_BEFORE + 2) + line for line in lines]
        if len(before) > _BEFORE:
            return "\n".join([before, *indented])
        return "\n".join([f"{before:<{_BEFORE}}  {lines[0]}" if lines else before, *indented[1:]])


def keys_of(settings: Any, prefix: str = "", among: Collection[str] | None = None) -> Iterator[Key]:
    """The keys of settings, an instance of a dataclass, and of the sections in it, which are dataclasses as well.

    `among`: only these fields. A list of sections gives its own key, and one for each field of an element, `NAME.N.…`.
    """
    schema = type(settings)
    known, hints = meanings(schema), typing.get_type_hints(schema)
    for entry in dataclasses.fields(schema):
        if among is not None and entry.name not in among:
            continue
        value, name = getattr(settings, entry.name), f"{prefix}{entry.name}"
        if dataclasses.is_dataclass(value):
            yield from keys_of(value, f"{name}.")
            continue
        kind = type(value) if isinstance(value, Enum) else None
        options = tuple(kind.__members__) if kind is not None else entry.metadata.get("options", ())
        yield Key(name, value, known.get(entry.name, ""), tuple(options))
        element = typing.get_args(hints[entry.name])[0] if typing.get_origin(hints[entry.name]) is list else None
        if isinstance(element, type) and dataclasses.is_dataclass(element):
            yield from keys_of(element(), f"{name}.N.")


def meanings(schema: type) -> dict[str, str]:
    """The meaning of each field: by the `Attributes:` of its class, of a base, or by the docstring of its enum."""
    found = {
        name: docstring(kind)
        for name, kind in typing.get_type_hints(schema).items()
        if isinstance(kind, type) and issubclass(kind, Enum) and docstring(kind) != docstring(Enum)
    }
    for base in reversed(schema.__mro__):
        _, has_any, text = docstring(base).rpartition("Attributes:\n") if dataclasses.is_dataclass(base) else ("",) * 3
        for entry in re.split(r"\n(?=\S)", textwrap.dedent(text)) if has_any else ():
            names, _, meaning = entry.partition(": ")
            found |= dict.fromkeys(names.replace("\n", " ").split(", "), meaning)
    return {name: " ".join(meaning.split()).removesuffix(".") for name, meaning in found.items()}


def first_clause(meaning: str) -> str:
    """A meaning up to its first period or semicolon outside of parentheses."""
    depth = 0
    for place, character in enumerate(meaning):
        depth += (character == "(") - (character == ")")
        if not depth and (character == ";" or meaning[place : place + 2] in (".", ". ")):
            return meaning[:place]
    return meaning


def describe_settings(schema: type[Settings], *, brief: bool = False, among: Collection[str] | None = None) -> str:
    """The keys of settings with their defaults: all of their meanings, or `brief`; `among`: only of these fields."""
    return "\n".join(key.brief if brief else key.whole for key in keys_of(schema(), among=among))


def describe_groups(groups: Mapping[str, Collection[str]]) -> str:
    """Configuration groups and their options."""
    wrap = textwrap.TextWrapper(WIDTH, subsequent_indent=" " * 6, break_on_hyphens=False)
    return "\n".join(wrap.fill(f"  {name}={' | '.join(options)}") for name, options in groups.items())
