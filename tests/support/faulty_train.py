"""train.py with a fault on one rank: `ZECO_FAULT=NAME:RANK:STEP[:STEP…]`, injected before each STEP.

Or `ZECO_FAULT=none:0`. The ranks meet after their imports, so that a short `parallel.timeout_seconds` is enough.

For tests and `lab.fault_table`. Each fault is as real as possible within one process: out-of-memory is a failed
system allocation, a crash is a signal from the kernel. A fault creates the file `fault` in the working directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from tests.support.gate import meet
from zeco_train.system.command import quick_imports

with quick_imports():  # as train.py
    import torch

    from zeco_train import cli
    from zeco_train.system.signals import StopRequest
    from zeco_train.training.trainer import Trainer

_NAME, _RANK, *_STEPS = os.environ["ZECO_FAULT"].split(":")
_BAD_TENSOR = "model.layers.0.attn.o_proj"
_TAKEN: list[torch.Tensor] = []


def _memory(trainer: Trainer) -> None:
    """Limit the address space of this process, and use up what it has except for pieces below 1 MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))
    with contextlib.suppress(RuntimeError):
        while True:
            _TAKEN.append(torch.empty(1 << 20, dtype=torch.uint8))


def _hang(trainer: Trainer) -> None:
    """A read that never returns, as on a network file system whose server is gone."""

    def never() -> NoReturn:
        while True:
            time.sleep(1)

    trainer.loader.next = never  # type: ignore[method-assign]


def _crash(trainer: Trainer) -> None:
    ctypes.string_at(0)


def _bug(trainer: Trainer) -> None:
    raise OSError("the disk is on fire")


def _gradient(trainer: Trainer) -> None:
    """NaN in a gradient, after its reduction."""
    update = trainer.step.update

    def bad_update() -> Any:
        trainer.step.update = update  # type: ignore[method-assign]
        grad: Any = trainer.step.model.get_parameter(f"{_BAD_TENSOR}.weight").grad
        grad.to_local().fill_(torch.nan)
        return update()

    trainer.step.update = bad_update  # type: ignore[method-assign]


def _activation(trainer: Trainer) -> None:
    """NaN in the input of a layer, for the whole step."""
    module = trainer.step.model.get_submodule(_BAD_TENSOR)
    handle = module.register_forward_pre_hook(lambda _, inputs: (inputs[0] * torch.nan, *inputs[1:]))
    advance = trainer.progress.advance

    def last_of_step(*arguments: Any, **options: Any) -> None:
        handle.remove()
        trainer.progress.advance = advance  # type: ignore[method-assign]
        advance(*arguments, **options)

    trainer.progress.advance = last_of_step  # type: ignore[method-assign]


_FAULTS = {
    "memory": _memory,
    "hang": _hang,
    "crash": _crash,
    "bug": _bug,
    "gradient": _gradient,
    "activation": _activation,
}


def main() -> int:
    meet()
    if os.environ["RANK"] != _RANK:
        return cli.main(sys.argv[1:])
    if _NAME == "setting":
        return cli.main([*sys.argv[1:], "optim.lr=0.5"])
    whole = Trainer.train_step

    def train_step(self: Trainer, stop: StopRequest) -> Any:
        if str(self.progress.step + 1) in _STEPS:
            Path("fault").touch()
            _FAULTS[_NAME](self)
        return whole(self, stop)

    with mock.patch.object(Trainer, "train_step", train_step):
        return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
