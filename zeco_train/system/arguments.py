"""Command lines with options, with or without KEY=VALUE arguments."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

from zeco_train.errors import ConfigError, ZecoError
from zeco_train.system.paths import path_problem, shown

P = ParamSpec("P")


def errors_in_a_line(command: Callable[P, int]) -> Callable[P, int]:
    """Decorator of a command's `main`: prints a `ZecoError` as one line on stderr and returns its exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except ZecoError as error:
            print(error.line, file=sys.stderr, flush=True)
            return error.exit_code

    return run


class Parser(argparse.ArgumentParser):
    """An argument parser that raises usage errors as `ConfigError`, which are printed as one line."""

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError`, instead of printing the usage and exiting."""
        raise ConfigError("argument", shown(" ".join(sys.argv[1:])), f"{message}; --help lists all")


def docstring(of: Any) -> str:
    """The docstring of a module, class or function, for `--help`; from its source under `python -OO`."""
    text: str = of.__doc__ or ""
    # A dataclass without docstring gets its signature.
    if sys.flags.optimize >= 2 and (not text or text.startswith(f"{of.__name__}(")):
        tree = ast.parse(textwrap.dedent(inspect.getsource(of)))
        found = tree if inspect.ismodule(of) else tree.body[0]
        assert isinstance(found, ast.Module | ast.ClassDef | ast.FunctionDef)
        text = ast.get_docstring(found) or ""
    return inspect.cleandoc(text)


def user_path(text: str) -> Path:
    """The argparse type of a path; an empty shell variable does not mean the current folder.

    Raises:
        argparse.ArgumentTypeError: not a valid path.
    """
    if (problem := path_problem(text)) is not None:
        raise argparse.ArgumentTypeError(f"{shown(text)}: {problem}" if text else problem)
    return Path(text)
