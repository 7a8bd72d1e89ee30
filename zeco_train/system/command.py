"""What every command does first: threads, imports of this project's packages, its command line, errors as one line."""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import gc
import importlib.util
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, ParamSpec

from zeco_train.errors import ConfigError, ZecoError
from zeco_train.system.paths import path_problem, shown

_ROOT = Path(__file__).resolve().parents[2]
_OWN = ("zeco_train", "data", "models")
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def put_own_packages_first() -> None:
    """Import `data` and `models` from beside this package, even if the current folder has modules of these names.

    Exits with a one-line error if `python -m data.NAME` has imported such a module before this project's.
    """
    for name in {*_OWN} & sys.modules.keys():
        if (path := _other(sys.modules[name])) is not None:
            remedy = "take the name that nothing hides: python -m zeco_train COMMAND, or zeco-train COMMAND"
            print(ConfigError("package", name, f"{path} hides this project's; {remedy}").line, file=sys.stderr)
            sys.exit(ConfigError.exit_code)
    if sys.path[:1] != [str(_ROOT)]:
        sys.path.insert(0, str(_ROOT))


def import_own_packages() -> None:
    """Import `data` and `models` of this project into a program of others, whose `sys.path` stays as it is.

    A folder of these names without `__init__.py` is not in the way, unless it has been imported. Raises ConfigError,
    which names a module of the program that has, or would get, the name of one of these packages.
    """
    for name in _OWN:
        module = sys.modules.get(name)
        spec = importlib.util.find_spec(name) if module is None else None
        path = None if module is None else _other(module)
        # A namespace package has no origin.
        if spec is not None and spec.origin is not None and not _is_own(spec.origin):
            path = spec.origin
        if path is not None:
            remedy = "rename it, or work in another folder (zeco_train.functional works beside it)"
            raise ConfigError("package", name, f"{path} is in the way of this project's package {name}; {remedy}")
    # The finder of an editable install would come after a namespace package of the program.
    sys.path.insert(0, str(_ROOT))
    try:
        for name in _OWN:
            importlib.import_module(name)
    finally:
        sys.path.remove(str(_ROOT))


# Where a module comes from if it is none of this project's packages.
def _other(module: ModuleType) -> str | None:
    path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), None)
    path = path or f"a folder {module.__name__}"
    return None if _is_own(path) else path


def _is_own(path: str) -> bool:
    return Path(path).resolve().parents[1:2] == (_ROOT,)


@contextmanager
def explained_if_missing() -> Iterator[None]:
    """Exit with a one-line error if an import in the block lacks a third-party package; uses none itself."""
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
    was_enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
        # Not again in a process that has them: it may run a command many times, whose garbage is to be collected.
        if len(sys.modules) > before:
            gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def choose_variables() -> None:
    """Set how many threads operations take, how they wait, and how GPUs allocate, each if this process's user has not.

    To be called before torch is imported. Ranks divide the cores among them; torchrun would give each rank one thread.
    """
    # Else optimizer states of the first step split the memory that its activations have freed: of 662,528 tokens of
    # `lightning_1b` with recompute=full on an H200, 16 GB more are reserved than allocated, and the second step fails.
    # Not with NCCL, which registers buffers of captured collectives, and up to 2.28 may not map such ones; nor in WSL.
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1" and "microsoft" not in os.uname().release.lower()
    if is_alone and not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    # GNU OpenMP's threads spin at the end of every operation. Beside any other process that takes the time of the very
    # threads that they wait for.
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}:
        os.environ["OMP_WAIT_POLICY"] = "passive"
    if "OMP_NUM_THREADS" not in os.environ or _is_of_torchrun("OMP_NUM_THREADS"):
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
        each = available_cores() // (int(ranks) if ranks.isdecimal() and int(ranks) else 1)
        os.environ["OMP_NUM_THREADS"] = str(max(1, each))


def available_cores() -> int:
    """The cores that this process may use, by its affinity and by the quota of its control group (of a container)."""
    cores = len(os.sched_getaffinity(0))
    # Of versions 2 and 1.
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with suppress(OSError, ValueError):
            quota, period = " ".join((_CONTROL_GROUP / name).read_text() for name in names).split()
            if int(quota) > 0:
                cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _is_of_torchrun(name: str) -> bool:
    # Whether torchrun has set a variable for its ranks, not its user: then it is not among those it was started with.
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    try:
        started_with = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return False
    return not any(entry.startswith(f"{name}=".encode()) for entry in started_with.split(b"\0"))


def _missing(package: str) -> ConfigError:
    own = _ROOT / ".venv"
    # Created by launch/environment.sh.
    if (own / "bin" / "python").exists() and Path(sys.prefix).resolve() != own.resolve():
        remedy = f"take the environment of this repository: source {own}/bin/activate"
    else:
        remedy = f"install all packages: {_ROOT}/launch/quickstart.sh, or {sys.executable} -m pip install -e {_ROOT}"
    return ConfigError("package", package, f"is not installed in {sys.executable}; {remedy}")


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
        _, is_unknown, words = message.partition("unrecognized arguments: ")
        if is_unknown and (option := next((word for word in words.split() if word.startswith("--")), "")):
            name, known = option.partition("=")[0], [name for action in self._actions for name in action.option_strings]
            close = difflib.get_close_matches(name, known, n=1)
            allowed = f"did you mean {close[0]}?" if close else "--help lists all"
            raise ConfigError("argument", shown(name), f"unknown option; {allowed}")
        if any(word[:1] == "-" and word[1:2] not in ("-", "") for word in sys.argv[1:]):
            message += "; a name that begins with - is written ./-NAME"
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
    """The argparse type of a path; an empty shell variable does not mean the current folder."""
    if (problem := path_problem(text)) is not None:
        raise argparse.ArgumentTypeError(f"{shown(text)}: {problem}" if text else problem)
    return Path(text)
