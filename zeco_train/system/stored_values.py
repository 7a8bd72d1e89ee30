"""Reads stored configurations, which may be untrusted: they contain values, and no interpolations.

`${oc.env:NAME}` in such a file would copy an environment variable of this machine into every output.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zeco_train.system.paths import is_utf8
from zeco_train.system.small_files import DEEPEST, read_small

# Enough for a run with a mixture of 10,000 stores; YAML takes 10 s for a megabyte.
_LARGEST_BYTES = 1 << 20
_LARGEST_INT_BITS = 64
_INTERPOLATION = "${"


def read_values(path: Path) -> dict[str, Any]:
    """The mapping in a small YAML file.

    Raises OSError if it cannot be read, is not a regular file, or is too large; ValueError if it is not YAML, not a
    mapping, nested too deeply, or has aliases or interpolations.
    """
    text = read_small(path, _LARGEST_BYTES).decode()
    try:
        _check_structure(text)
        if _INTERPOLATION in text:
            # OmegaConf would reject some of them without naming the key.
            check_values(yaml.safe_load(io.StringIO(text)))
        values = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    if not isinstance(values, dict):
        raise ValueError("not a mapping")
    check_values(values)
    return {str(key): value for key, value in values.items()}


def check_values(values: Any) -> None:
    """Raise ValueError, naming the key, for a text as in `find_unstorable`, or an integer of more than 64 bits."""
    if (found := find_unstorable(values)) is not None:
        raise ValueError("{}={}: {}".format(*found))
    for key, value in flatten(values, keys=True):
        if isinstance(value, int) and value.bit_length() > _LARGEST_INT_BITS:
            raise ValueError(f"{key} is a number of more than {_LARGEST_INT_BITS} bits")


def find_unstorable(values: Any) -> tuple[str, str, str] | None:
    """The key and the first text that no file can keep as it is, and why.

    OmegaConf would try to resolve an interpolation. A path of the command line may have bytes that are no UTF-8.
    """
    for key, value in flatten(values, keys=True):
        if isinstance(value, str) and _INTERPOLATION in value:
            return key, value, "stored configurations hold values, not interpolations"
        if isinstance(value, str) and not is_utf8(value):
            return key, value, "stored configurations are UTF-8, and this has other bytes; choose another name"
    return None


def flatten(value: Any, key: str = "", *, lists: bool = True, keys: bool = False) -> Iterator[tuple[str, Any]]:
    """Nested mappings and lists as pairs such as (`data.stores.0.path`, "a"), with keys as in overrides.

    Empty mappings and lists have no pairs. `lists=False`: a list is a value; `keys`: keys and indices are values, too.
    """
    if isinstance(value, Mapping) or (lists and isinstance(value, list)):
        for name, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            inner = f"{key}.{name}" if key else str(name)
            if keys:
                yield inner, name
            yield from flatten(item, inner, lists=lists, keys=keys)
    else:
        yield key, value


def _check_structure(text: str) -> None:
    # Reject aliases and deep nesting, which let a short text expand without bound, before values are built.
    depth = 0
    # As a stream: errors of a string quote its text, and the file may be a link to a private one.
    for event in yaml.parse(io.StringIO(text), Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"has an alias (*{event.anchor}); stored configurations have none")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"nested deeper than {DEEPEST} levels")
