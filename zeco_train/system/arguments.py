"""Command lines that have options of their own, beside or without KEY=VALUE."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, ParamSpec

from zeco_train.errors import ConfigError, ZecoError
from zeco_train.system.paths import path_problem, shown

P = ParamSpec("P")


def errors_in_a_line(command: Callable[P, int]) -> Callable[P, int]:
    """Decorates the `main` of a command: a `ZecoError` becomes its line on stderr, and its exit code the result."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except ZecoError as error:
            print(error.line, file=sys.stderr, flush=True)
            return error.exit_code

    return run


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
