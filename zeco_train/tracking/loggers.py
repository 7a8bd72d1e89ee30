"""Experiment trackers, by the settings of `logger_config`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from zeco_train.tracking.logger_config import LoggerConfig, LoggerKind
from zeco_train.tracking.tensorboard_logger import TensorBoardLogger
from zeco_train.tracking.wandb_logger import WandbLogger

if TYPE_CHECKING:
    from zeco_train.tracking.starts import Start


class ExperimentLogger(Protocol):
    """Metrics sink besides metrics.jsonl. `begin` is called first and once; errors after it must not end the run."""

    def begin(self, config: Mapping[str, Any], start: Start, run_id: str | None) -> str | None:
        """Begin or resume a tracked run.

        Args:
            config: the resolved configuration as plain values.
            start: layout and first step of this start.
            run_id: returned by `begin` when the run began (stored in its checkpoints), None for a new run.

        Returns:
            The run's id; None if this tracker has no ids.
        """

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a step."""

    def finish(self, exit_code: int = 0) -> None:
        """Flush and end; an `exit_code` ≠ 0 marks the run as failed. May be called again."""


def build_logger(config: LoggerConfig, run_dir: str | Path, rank: int) -> ExperimentLogger:
    """The configured tracker on rank 0; a no-op on other ranks."""
    if rank != 0 or config.kind is LoggerKind.none:
        return NoLogger()
    if config.kind is LoggerKind.tensorboard:
        return TensorBoardLogger(Path(run_dir))
    return WandbLogger(config, Path(run_dir))


class NoLogger:
    """Records nothing, but keeps the run id, so that a run can be resumed with or without its tracker."""

    def begin(self, config: Mapping[str, Any], start: Start, run_id: str | None) -> str | None:
        """Return the run's id, unchanged."""
        return run_id

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Do nothing."""

    def finish(self, exit_code: int = 0) -> None:
        """Do nothing."""
