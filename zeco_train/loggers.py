"""Experiment trackers: `logger=none`, or `logger=wandb` for Weights & Biases."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from zeco_train.errors import ConfigError

logger = logging.getLogger(__name__)

# Bounds, in seconds, on what waits for W&B's server. Offline, both take a fraction of a second.
_START_TIMEOUT = 60.0
_FINISH_TIMEOUT = 120.0


class LoggerKind(Enum):
    """`none`: metrics.jsonl only. `wandb`: Weights & Biases as well."""

    none = "none"
    wandb = "wandb"


class LoggerMode(Enum):
    """`offline`: files in the run's folder, for `wandb sync`. `online`: to the server. `disabled`: nothing."""

    offline = "offline"
    online = "online"
    disabled = "disabled"


@dataclass
class LoggerConfig:
    """Attributes:
    kind: which tracker.
    project, entity, group, tags: as W&B has them; `entity` (a user or team) None is the account's default.
    mode: `offline` unless told otherwise.
    """

    kind: LoggerKind = LoggerKind.none
    project: str = "zeco-train"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    mode: LoggerMode = LoggerMode.offline

    def validate(self) -> None:
        """Raise `ConfigError` for what W&B would refuse, or if it is not installed.

        Every rank can judge this alone, so that no rank waits for another that has already failed.
        """
        if self.kind is LoggerKind.none:
            return
        if not 1 <= len(self.project) <= 128 or set(self.project) & set("/\\#?%:"):
            raise ConfigError("logger.project", self.project, "must have 1 to 128 characters, none of / \\ # ? % :")
        for tag in self.tags:
            if not 1 <= len(tag) <= 64:
                raise ConfigError("logger.tags", self.tags, "each must have 1 to 64 characters")
        # Python takes a folder named wandb, as runs leave it, for a package; only a real one has an origin.
        spec = importlib.util.find_spec("wandb")
        if spec is None or spec.origin is None:
            problem = "package wandb is not installed; pip install wandb==0.31.*, or logger=none"
            raise ConfigError("logger", "wandb", problem)


class ExperimentLogger(Protocol):
    """Where metrics go besides metrics.jsonl. `start` comes first and once; nothing after it may end a run."""

    def start(self, config: Mapping[str, Any], run_id: str | None) -> str | None:
        """Begin, or go on with, a tracked run.

        Args:
            config: the resolved configuration as plain values.
            run_id: what `start` returned when the run began (kept in its checkpoints), None for a new run.

        Returns:
            The run's id; None if this tracker has none.
        """

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a step."""

    def finish(self, exit_code: int = 0) -> None:
        """Hand over what is pending, and end; an `exit_code` ≠ 0 marks the run as failed. May be called again."""


def build_logger(config: LoggerConfig, run_dir: str | Path, rank: int) -> ExperimentLogger:
    """The configured tracker on rank 0; one that does nothing on the others."""
    match config.kind:
        case LoggerKind.wandb if rank == 0:
            return WandbLogger(config, Path(run_dir))
        case _:
            return NoLogger()


class NoLogger:
    """Records nothing and keeps the run id, so that a run may be continued with and without its tracker."""

    def start(self, config: Mapping[str, Any], run_id: str | None) -> str | None:
        return run_id

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        pass

    def finish(self, exit_code: int = 0) -> None:
        pass


class WandbLogger:
    """Weights & Biases, writing to `run_dir/wandb`.

    Offline, each start of a run leaves one folder `offline-run-*`, all with the same run id; `wandb sync` uploads them.
    Metrics are plotted over their own `step`, not over W&B's counter of calls: that one only grows, and would drop
    the rows of steps which a resumed run does again.
    """

    def __init__(self, config: LoggerConfig, run_dir: Path) -> None:
        self.config, self.run_dir = config, run_dir
        self._run: Any = None
        self._warned = False

    def start(self, config: Mapping[str, Any], run_id: str | None) -> str | None:
        """As `ExperimentLogger.start`.

        Raises:
            ConfigError: W&B refuses to start, e.g. online without an account or a connection.
        """
        import wandb

        mode = self.config.mode
        # No console capture: it would put itself between the progress bar and the terminal.
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            init_timeout=_START_TIMEOUT,
            finish_timeout=_FINISH_TIMEOUT,
        )
        try:
            wandb.setup(settings=settings)
            # Asked here, since `init` would wait at a prompt while all other ranks wait for this one.
            if mode is LoggerMode.online and not wandb.login(prompt=False):
                raise ConfigError("logger.mode", "online", "W&B knows no account here; wandb login, or mode offline")
            self._run = wandb.init(
                project=self.config.project,
                entity=self.config.entity,
                group=self.config.group,
                tags=self.config.tags,
                name=self.run_dir.resolve().name,
                config=dict(config),
                dir=str(self.run_dir),
                id=run_id,
                resume="allow",
                mode=mode.value,
                settings=settings,
            )
            self._run.define_metric("*", step_metric="step")
        except (wandb.Error, OSError, ValueError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ConfigError("logger.mode", mode.value, f"W&B cannot start ({reason}); or logger=none") from error
        return run_id if mode is LoggerMode.disabled else self._run.id

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record a step's metrics. A failure is logged by name, the first time."""
        if self._run is None:
            return
        try:
            self._run.log({**metrics, "step": step})
        except Exception as error:
            # Whatever a tracker's client raises, it is not worth a training run.
            self._warn(f"did not record step {step}", error)

    def finish(self, exit_code: int = 0) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        import wandb

        # W&B would end its service process at the interpreter's exit, with a traceback if that process is dead.
        for end in (lambda: run.finish(exit_code=exit_code), lambda: wandb.teardown(exit_code)):
            try:
                end()
            except Exception as error:
                self._warn("did not finish", error)

    def _warn(self, what: str, error: Exception) -> None:
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "W&B %s: %s: %s; the run goes on, all metrics are in metrics.jsonl", what, type(error).__name__, error
        )
