"""Command lines that have options of their own, beside or without KEY=VALUE."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from zeco_train.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """One whose mistakes are a line, as all of ours."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError("argument", " ".join(sys.argv[1:]), f"{message}; --help lists all")
