"""Section `checkpoint`; apart from `checkpointer.py`, whose imports take a second, since `--help` needs it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from zeco_train.checkpoint.files import HF_PREFIX
from zeco_train.errors import ConfigError
from zeco_train.system.numbers import check_least
from zeco_train.system.paths import path_problem, shown

# `async` is a Python keyword, so not a class statement. See `CheckpointConfig`.
CheckpointMode = Enum("CheckpointMode", ["async", "sync"])


class Missing(Enum):
    """What to do if a run that had checkpoints has none any more."""

    refuse = "refuse"
    start_anew = "start_anew"


@dataclass
class CheckpointConfig:
    """When and how a run saves, and which weights it starts from.

    Attributes:
        every: steps between two checkpoints; 0: none by step count.
        minutes: time between two checkpoints; 0: none by time. With both set, whichever comes first; with neither, only
            at the end and on a stop signal.
        final: whether a run saves its last step, whatever `every` and `minutes` say; a stop signal always saves.
        keep: how many of the newest checkpoints to keep; 0 keeps all. The disk needs room for one more.
        mode: whether training waits for a save. async: it continues while a checkpoint is written; takes host memory
            for a rank's part of weights and optimizer state. sync: it waits. The last checkpoint is always waited for.
        load: a run's folder or one of its checkpoints, whose weights a *new* run starts from; or hf:PATH, a model in
            Hugging Face format, exported by this project or a model of flash-linear-attention.
        missing: what a run does whose checkpoint is missing, as when a disk is not mounted. refuse: exit with an error;
            start_anew: start at step 0.
    """

    every: int = 100
    minutes: float = 0.0
    final: bool = True
    keep: int = 2
    mode: CheckpointMode = CheckpointMode["async"]
    load: str | None = None
    missing: Missing = Missing.refuse

    def validate(self) -> None:
        check_least(self, "checkpoint", every=0, minutes=0, keep=0)
        if self.load is not None and (problem := path_problem(self.load.removeprefix(HF_PREFIX))) is not None:
            raise ConfigError("checkpoint.load", shown(self.load), problem)
