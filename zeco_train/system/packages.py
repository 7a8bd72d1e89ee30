"""Imports of commands: this project's packages come first, missing ones are reported, and all take less time."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zeco_train.errors import ConfigError

_ROOT = Path(__file__).resolve().parents[2]
_OWN = ("zeco_train", "data", "models")


def put_own_packages_first() -> None:
    """Import `data` and `models` from beside this package, even if the current folder has modules of these names.

    Raises:
        SystemExit: `python -m data.NAME` has imported such a module before this project's; after a one-line error.
    """
    for name in {*_OWN} & sys.modules.keys():
        path = getattr(sys.modules[name], "__file__", None) or f"a folder {name}"
        if Path(path).resolve().parents[1:2] != (_ROOT,):
            remedy = "take the name that nothing hides: python -m zeco_train COMMAND, or zeco-train COMMAND"
            print(ConfigError("package", name, f"{path} hides this project's; {remedy}").line, file=sys.stderr)
            sys.exit(ConfigError.exit_code)
    if sys.path[:1] != [str(_ROOT)]:
        sys.path.insert(0, str(_ROOT))


@contextmanager
def explained_if_missing() -> Iterator[None]:
    """Exit with a one-line error if an import in the block lacks a third-party package; uses none itself.

    Raises:
        SystemExit: a package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package in _OWN:
            raise
        # Print on one rank a node.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(_missing(package).line, file=sys.stderr, flush=True)
        sys.exit(ConfigError.exit_code)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Suspend the garbage collector for the imports in the block, and exempt what they have made from it.

    Modules stay to the end. Without this, collections that find nothing take a third of the time of importing torch and
    of ending the interpreter.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def _missing(package: str) -> ConfigError:
    own = _ROOT / ".venv"
    # Created by launch/environment.sh.
    if (own / "bin" / "python").exists() and Path(sys.prefix).resolve() != own.resolve():
        remedy = f"take the environment of this repository: source {own}/bin/activate"
    else:
        remedy = f"install all packages: {_ROOT}/launch/quickstart.sh, or {sys.executable} -m pip install -e {_ROOT}"
    return ConfigError("package", package, f"is not installed in {sys.executable}; {remedy}")
