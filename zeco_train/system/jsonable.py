"""Converts values for JSON, which has neither NaN nor infinities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


def jsonable(value: Any, replace: Callable[[float], Any] = str) -> Any:
    """Replace each non-finite float x by `replace(x)`, by default text, recursively in mappings and lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else replace(value)
    if isinstance(value, Mapping):
        return {key: jsonable(item, replace) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item, replace) for item in value]
    return value
