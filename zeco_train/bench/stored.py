"""Reads a benchmark's results.json, of this machine or another, possibly edited by hand."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from zeco_train.errors import DataError
from zeco_train.system.paths import is_plain_name
from zeco_train.system.small_files import read_json, shown_value

# Of results.json; a file without a number has format 1.
FORMAT = 1
# Columns of measured rows required by plots and reports, by case.
_NEEDED = {
    "collectives": ("size_mb", "variant", "mode"),
    "operator": ("heads", "key_dim", "value_dim", "tokens", "pass", "variant", "mode"),
    "attention": ("heads", "key_heads", "head_dim", "tokens", "pass", "variant"),
    "decode": ("model", "context", "batch", "variant", "tokens_per_second", "memory_gb"),
    "model": ("model", "heads", "tokens", "variant", "p10_ms", "p90_ms", "runs", "tokens_per_second_per_gpu"),
}
_TEXTS = ("model", "mixer", "operator", "decay", "variant", "mode", "pass", "note")
# They become parts of file names.
_NAMES = ("model", "mixer", "operator", "decay", "variant")
_COUNTS = {"heads", "key_heads", "head_dim", "window", "groups", "key_dim", "value_dim"}
_COUNTS |= {"tokens", "seq_len", "context", "batch", "runs"}
_NUMBERS = re.compile(r"size_mb|mfu|hfu|loss|ratio|slowest|.*_(ms|us|gb|mb|seconds|error)|.*tokens_per_second.*")
# Rates divide by them, and logarithmic axes show them.
_POSITIVE = ("size_mb", "p10_ms", "p90_ms")
# Beyond it ratios and plot axes would overflow.
_LARGEST = 1e100


class OtherResultsError(DataError):
    """JSON, but no results that plots and reports can show."""


def load_results(path: Path) -> dict[str, Any]:
    """A benchmark's results.json.

    Raises:
        OtherResultsError: the file is JSON of another kind, or of a case that has no such rows.
        DataError: the file is not a valid result; names the row and the column.
    """
    try:
        result = read_json(path)
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DataError(path, "is no results.json of a benchmark") from error
    if not isinstance(result, dict) or not {"case", "rows", "world_size", "environment"} <= result.keys():
        raise OtherResultsError(path, "is no results.json of a benchmark")
    if isinstance(result["case"], str) and result["case"] not in _NEEDED:
        raise OtherResultsError(path, f"case is {shown_value(result['case'])}, not one of {', '.join(_NEEDED)}")
    if problem := _problem_of(result):
        raise DataError(path, problem, "measure again, or correct the file")
    return result


def _problem_of(result: dict[str, Any]) -> str | None:
    for name, is_right, expected in (
        ("format", result.get("format", FORMAT) == FORMAT, f"{FORMAT}: another version of zeco-train wrote it"),
        ("case", isinstance(result["case"], str), f"one of {', '.join(_NEEDED)}"),
        ("world_size", _is_count(result["world_size"]), "a whole number ≥ 1"),
        ("environment", isinstance(result["environment"], dict), "an object"),
        ("rows", isinstance(result["rows"], list), "a list"),
    ):
        if not is_right:
            return f"{name} is {shown_value(result[name])}, not {expected}"
    if result["case"] == "model":
        config = result.get("config")
        for name, kind in (("strategy", str), ("segments", int), ("dtype", str)):
            if not isinstance(config, dict) or not isinstance(config.get(name), kind):
                return f"config has no {name}"
    problems = ((number, _problem_of_row(row, result["case"])) for number, row in enumerate(result["rows"], start=1))
    return next((f"row {number}: {problem}" for number, problem in problems if problem), None)


def _problem_of_row(row: object, case: str) -> str | None:
    if not isinstance(row, dict):
        return f"{shown_value(row)} is not an object"
    for name, value in row.items():
        if value is None:
            continue
        for is_meant, is_right, expected in (
            (name in _TEXTS, lambda x: isinstance(x, str), "text"),
            # A lone surrogate is not printable, and no path can have it.
            (name in _NAMES, lambda x: is_plain_name(x) and x.isprintable(), "a plain name without /"),
            (name in _COUNTS, _is_count, "a whole number ≥ 1"),
            (_NUMBERS.fullmatch(name), _is_number, "a number"),
            (name in _POSITIVE, lambda x: 0 < x < math.inf, "a finite number > 0"),
        ):
            if is_meant and not is_right(value):
                return f"{name} is {shown_value(value)}, not {expected}"
    if row.get("median_ms") and (missing := [name for name in _NEEDED[case] if row.get(name) is None]):
        return f"lacks {', '.join(missing)}"
    return None


def _is_count(value: object) -> bool:
    # Not isinstance: a bool is an int, too.
    return type(value) is int and 1 <= value <= 1 << 50


def _is_number(value: object) -> bool:
    if type(value) is int:
        return abs(value) <= _LARGEST
    # results.json may contain NaN and infinities, which count as numbers.
    return type(value) is float and (abs(value) <= _LARGEST or not math.isfinite(value))
