"""Command lines that have options of their own, beside or without KEY=VALUE."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from zeco_train.errors import ConfigError
from zeco_train.system.paths import path_problem, shown


class Parser(argparse.ArgumentParser):
    """One whose mistakes are a line, as all of ours."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError("argument", shown(" ".join(sys.argv[1:])), f"{message}; --help lists all")


def user_path(text: str) -> Path:
    """The type of an option that takes a path; a variable of the shell that is empty does not mean this folder.

    Raises:
        argparse.ArgumentTypeError: no file or folder can have this path.
    """
    if (problem := path_problem(text)) is not None:
        raise argparse.ArgumentTypeError(f"{shown(text)}: {problem}" if text else problem)
    return Path(text)
