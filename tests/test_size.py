"""The size of the project, against the table of CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from models.mixer_registry import MIXERS
from tests.support.commands import REPOSITORY
from tests.test_rooms import nodes
from zeco_train.config.schema import load_config, to_plain
from zeco_train.system.stored_values import flatten

PRODUCT = ("train.py", "zeco_train", "models", "data", "launch")
TEXT = (".py", ".sh", ".html", ".js", ".css", ".j2")


def files(*tops: str) -> list[Path]:
    found = (path for top in tops for path in [REPOSITORY / top, *(REPOSITORY / top).rglob("*")])
    return [path for path in found if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts]


def lines(path: Path) -> int:
    return path.read_text().count("\n")


def statements(path: Path) -> int:
    """Without docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = sum(isinstance(node, documented) and ast.get_docstring(node) is not None for node in nodes(path))
    return sum(isinstance(node, ast.stmt) for node in nodes(path)) - docstrings


def keys() -> set[str]:
    """Of training, over all mixers; commands such as `bench` have settings of their own."""
    settings = [to_plain(load_config([])), *({"model": to_plain(mixer.config_class())} for mixer in MIXERS.values())]
    return {key for own in settings for key, _ in flatten(own, lists=False)}


def test_nothing_is_larger_than_the_table_says() -> None:
    product = files(*PRODUCT)
    python = [path for path in product if path.suffix == ".py"]
    found = [
        sum(map(lines, product)),
        sum(map(statements, python)),
        sum(lines(path) < 80 for path in python),
        sum(map(lines, files("tests"))),
        len(keys()),
    ]
    table = (REPOSITORY / "CONTRIBUTING.md").read_text().partition("## Size")[2].partition("## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([\d,]+) \|", table, re.MULTILINE)
    assert len(rows) == len(found)
    limits = {name: int(number.replace(",", "")) for name, number in rows}
    larger = {name: value for value, (name, limit) in zip(found, limits.items(), strict=True) if value > limit}
    assert not larger, f"larger than {limits}: {larger}"
