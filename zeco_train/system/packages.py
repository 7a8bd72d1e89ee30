"""Packages: this project's own come first; one that is not installed is a line with the command that installs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zeco_train.errors import ConfigError

_ROOT = Path(__file__).resolve().parents[2]
_OWN = ("zeco_train", "data", "models")


def put_own_packages_first() -> None:
    """Find `data` and `models` beside this package, whatever is called so in the current folder."""
    if sys.path[:1] != [str(_ROOT)]:
        sys.path.insert(0, str(_ROOT))


@contextmanager
def explained_if_missing() -> Iterator[None]:
    """End the process with a line if the block, which imports, lacks a package of others; needs none of them itself.

    Raises:
        SystemExit: a package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package in _OWN:
            raise
        # One rank of a node is enough.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(_missing(package).line, file=sys.stderr, flush=True)
        sys.exit(ConfigError.exit_code)


def _missing(package: str) -> ConfigError:
    own = _ROOT / ".venv"
    # As launch/environment.sh makes it.
    if (own / "bin" / "python").exists() and Path(sys.prefix).resolve() != own.resolve():
        remedy = f"take the environment of this repository: source {own}/bin/activate"
    else:
        remedy = f"install all packages: {_ROOT}/launch/quickstart.sh, or {sys.executable} -m pip install -e {_ROOT}"
    return ConfigError("package", package, f"is not installed in {sys.executable}; {remedy}")
