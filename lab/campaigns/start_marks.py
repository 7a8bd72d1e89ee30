"""Marks of a command's start and end, for `start_times`: put on a process's path as `sitecustomize`, it writes them.

A line of JSON each: seconds of the system's monotonic clock, a label, and the seconds that it took or None. Marked are
the activities that this project's watchdog is given, the first import of large packages, captures of CUDA graphs, and
what Triton and Dynamo compile. Only functions of the same name in all versions are replaced, while they are imported.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, TextIO

VARIABLE = "ZECO_START_MARKS"
LARGE = (
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("triton", "transformers", "datasets", "tokenizers", "matplotlib", "matplotlib.pyplot", "pandas", "wandb"),
    *("torch.utils.tensorboard", "hydra", "numpy", "scipy", "sympy", "lm_eval"),
)
_KERNELS, _CAPTURES = "Triton compiles", "graphs captured"

_file: TextIO | None = None
_owner = 0
# Counts and seconds of what happens many times.
_sums: dict[str, list[float]] = {_KERNELS: [0, 0.0], _CAPTURES: [0, 0.0]}


def mark(label: str, seconds: float | None = None) -> None:
    """Write a mark; a child process, which inherits this module by fork, writes none."""
    if _file is not None and os.getpid() == _owner:
        _file.write(json.dumps([time.monotonic(), label, seconds]) + "\n")
        _file.flush()


def _marked(owner: Any, name: str, label: Callable[..., str], *, both: bool = False) -> None:
    function = getattr(owner, name, None)
    if function is None:
        return

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        mark(label(*args, **options))
        try:
            return function(*args, **options)
        finally:
            if both:
                mark(f"{label(*args, **options)}: done")

    setattr(owner, name, call)


def _summed(owner: Any, name: str, label: str, *, last: bool = False) -> None:
    function = getattr(owner, name, None)
    if function is None:
        return

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        began = time.monotonic()
        try:
            return function(*args, **options)
        finally:
            _sums[label][0] += last
            _sums[label][1] += time.monotonic() - began
            if last and label == _CAPTURES:
                mark("the last graph is captured")

    setattr(owner, name, call)


def _of_watch(module: ModuleType) -> None:
    _marked(module.Watchdog, "enter", lambda _self, activity: activity)


def _of_end(module: ModuleType) -> None:
    _marked(module.Job, "finish", lambda *_: "closing", both=True)


def _of_recorder(module: ModuleType) -> None:
    _marked(module.Recorder, "summarise", lambda *_: "drawing and the summary", both=True)


def _of_trainer(module: ModuleType) -> None:
    _marked(module.Trainer, "save", lambda *_, **__: "checkpoint", both=True)


def _of_build(module: ModuleType) -> None:
    for name in ("build_model", "read_batches", "start_recorder"):
        _marked(module, name, lambda *_, name=name, **__: name, both=True)


def _of_triton(module: ModuleType) -> None:
    _summed(module, "compile", _KERNELS, last=True)


def _of_graphs(module: ModuleType) -> None:
    _summed(module.graph, "__enter__", _CAPTURES)
    _summed(module.graph, "__exit__", _CAPTURES, last=True)


_HOOKS = {
    "zeco_train.lifecycle.watch": _of_watch,
    "zeco_train.lifecycle.end": _of_end,
    "zeco_train.tracking.recorder": _of_recorder,
    "zeco_train.training.trainer": _of_trainer,
    "zeco_train.training.build": _of_build,
    "triton.compiler.compiler": _of_triton,
    "torch.cuda.graphs": _of_graphs,
}


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._seeking: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in self._seeking or not (name in LARGE or name in _HOOKS):
            return None
        self._seeking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
        finally:
            self._seeking.discard(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                began = time.monotonic()
                run(module)
                if name in _HOOKS:
                    _HOOKS[name](module)
                if name in LARGE:
                    mark(f"import {name}", time.monotonic() - began)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _at_exit() -> None:
    for label, (count, seconds) in _sums.items():
        if count:
            mark(f"{label}: {count:.0f}", seconds)
    utils = sys.modules.get("torch._dynamo.utils")
    metrics: dict[str, list[float]] = getattr(utils, "compilation_time_metrics", {})
    for name in ("_compile.compile_inner", "compile_fx.<locals>.bw_compiler", "compile_fx.<locals>.fw_compiler_base"):
        if found := metrics.get(name):
            mark(f"Dynamo's {name.rpartition('.')[2]}: {len(found)}", sum(found))
    mark("Python ends")


def begin(path: str) -> None:
    """Begin to write into this file, if no process has before: those that the command starts have none of their own."""
    global _file, _owner
    try:
        _file = open(path, "x")  # noqa: SIM115, PTH123 - to the end of the process
    except FileExistsError:
        return
    _owner = os.getpid()
    mark("Python runs")
    sys.meta_path.insert(0, _Finder())
    atexit.register(_at_exit)


if __name__.endswith("sitecustomize") and (_name := os.environ.get(VARIABLE)):
    begin(_name)
