"""Command lines with options."""

from __future__ import annotations

import subprocess
import sys

from tests.support.commands import REPOSITORY
from zeco_train.system import command
from zeco_train.system.command import docstring
from zeco_train.tracking.logger_config import LoggerConfig


def test_help_texts_stay_without_docstrings() -> None:
    """`python -OO` drops docstrings, and a dataclass without one gets its signature."""
    lines = [
        "from zeco_train.system import command",
        "from zeco_train.tracking.logger_config import LoggerConfig",
        "print([command.docstring(of) for of in (command, LoggerConfig, command.docstring)])",
    ]
    python = [sys.executable, "-OO", "-c", "\n".join(lines)]
    printed = subprocess.run(python, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout
    expected = [docstring(of) for of in (command, LoggerConfig, docstring)]
    assert all(expected)
    assert printed == f"{expected}\n"
