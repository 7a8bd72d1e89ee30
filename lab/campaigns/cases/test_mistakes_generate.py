"""More mistakes in the arguments of generate."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.generate import test_command as gate
from tests.generate.test_command import run

# A fixture.
__all__ = ["run"]
pytestmark = pytest.mark.campaign


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (["--prompt", "a\udcff"], 2, ["--prompt='a\\udcff'", "not UTF-8", "character 2"]),
        (["--prompt", "x", "--stop", ""], 2, ["stop="]),
        (["--temprature", "1"], 2, ["argument=--temprature: unknown option; did you mean --temperature?"]),
        (["--prompt", "x", "train.kernels=require"], 2, ["train.kernels=require: there are no kernels on CPUs"]),
        (["--prompt-file", "nowhere.txt"], 3, ["nowhere.txt", "cannot be read"]),
        (["--prompt", "x", "--json", "nowhere/out.json"], 2, ["--json=nowhere/out.json", "folder"]),
    ],
)
def test_invalid_arguments_print_one_error_line(run: Path, arguments: list[str], code: int, parts: list[str]) -> None:
    gate.test_invalid_arguments_print_one_error_line(run, arguments, code, parts)
