"""Experiment trackers: `logger=none`, `logger=wandb` for Weights & Biases, `logger=tensorboard`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from zeco_train.errors import ConfigError

if TYPE_CHECKING:
    from zeco_train.tracking.starts import Start


class LoggerKind(Enum):
    """`none`: metrics.jsonl only. `wandb`, `tensorboard`: Weights & Biases, or TensorBoard's event files, as well."""

    none = "none"
    wandb = "wandb"
    tensorboard = "tensorboard"


class LoggerMode(Enum):
    """`offline`: files in the run's folder, for `wandb sync`. `online`: to the server. `disabled`: nothing."""

    offline = "offline"
    online = "online"
    disabled = "disabled"


# What has to be installed, and what brings it.
_PACKAGES = {
    LoggerKind.wandb: ("wandb", "wandb==0.31.*"),
    LoggerKind.tensorboard: ("tensorboard", "'zeco-train[tensorboard]', or tensorboard"),
}


@dataclass
class LoggerConfig:
    """Attributes:
    kind: which tracker.
    project, entity: as W&B has them; `entity` (a user or team) None is the account's default.
    group: None is MODEL-LENGTH, such as gla_1b-1M: runs that differ in how they were split.
    job_type: what kind of job the run is.
    tags: besides those of the run's own: sp=…, sp.size=…, seq_len=…, model=…, strategy=…, devices=….
    mode: `offline` unless told otherwise.
    timeout_seconds: the longest wait for W&B's server at the start, after which the run is tracked offline, and at the
        end, after which what is left stays in the run's folder.
    """

    kind: LoggerKind = LoggerKind.none
    project: str = "zeco-train"
    entity: str | None = None
    group: str | None = None
    job_type: str = "train"
    tags: list[str] = field(default_factory=list)
    mode: LoggerMode = LoggerMode.offline
    timeout_seconds: float = 60.0

    def validate(self) -> None:
        """Raise `ConfigError` for what the tracker would refuse, or if it is not installed.

        Every rank can judge this alone, so that no rank waits for another that has already failed.
        """
        if self.kind is LoggerKind.none:
            return
        if not 1 <= len(self.project) <= 128 or set(self.project) & set("/\\#?%:"):
            raise ConfigError("logger.project", self.project, "must have 1 to 128 characters, none of / \\ # ? % :")
        for name in ("group", "job_type"):
            value = getattr(self, name)
            if value is not None and not 1 <= len(value) <= 128:
                raise ConfigError(f"logger.{name}", value, "must have 1 to 128 characters")
        for tag in self.tags:
            if not 1 <= len(tag) <= 64:
                raise ConfigError("logger.tags", self.tags, "each must have 1 to 64 characters")
        if not 1 <= self.timeout_seconds <= 3600:
            raise ConfigError("logger.timeout_seconds", self.timeout_seconds, "must be from 1 to 3600")
        package, install = _PACKAGES[self.kind]
        # Python takes a folder named wandb, as runs leave it, for a package; only a real one has an origin.
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            problem = f"package {package} is not installed; pip install {install}, or logger=none"
            raise ConfigError("logger", self.kind.value, problem)


class ExperimentLogger(Protocol):
    """Where metrics go besides metrics.jsonl. `begin` comes first and once; nothing after it may end a run."""

    def begin(self, config: Mapping[str, Any], start: Start, run_id: str | None) -> str | None:
        """Begin, or go on with, a tracked run.

        Args:
            config: the resolved configuration as plain values.
            start: how this start of the run is laid out, and from which step it goes on.
            run_id: what `begin` returned when the run began (kept in its checkpoints), None for a new run.

        Returns:
            The run's id; None if this tracker has none.
        """

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a step."""

    def finish(self, exit_code: int = 0) -> None:
        """Hand over what is pending, and end; an `exit_code` ≠ 0 marks the run as failed. May be called again."""


def build_logger(config: LoggerConfig, run_dir: str | Path, rank: int) -> ExperimentLogger:
    """The configured tracker on rank 0; one that does nothing on the others."""
    if rank != 0:
        return NoLogger()
    match config.kind:
        case LoggerKind.wandb:
            from zeco_train.tracking.wandb_logger import WandbLogger

            return WandbLogger(config, Path(run_dir))
        case LoggerKind.tensorboard:
            from zeco_train.tracking.tensorboard_logger import TensorBoardLogger

            return TensorBoardLogger(Path(run_dir))
        case LoggerKind.none:
            return NoLogger()


class NoLogger:
    """Records nothing and keeps the run id, so that a run may be continued with and without its tracker."""

    def begin(self, config: Mapping[str, Any], start: Start, run_id: str | None) -> str | None:
        return run_id

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        pass

    def finish(self, exit_code: int = 0) -> None:
        pass
