"""Experiment trackers on rank 0, and their settings, the section `logger`.

`logger=tensorboard` writes event files to `run_dir/tensorboard`. `logger=wandb` is Weights & Biases: its service
process writes everything to the run's folder first and uploads it from there, so after a lost connection unsent data is
still on disk, for `wandb sync`.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from bisect import insort
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from statistics import median
from textwrap import indent
from typing import Any

from zeco_train.errors import ConfigError
from zeco_train.system.files import write_durably, write_errors
from zeco_train.system.signals import REQUEUE_EXIT_CODE
from zeco_train.system.small_files import read_small
from zeco_train.tracking.metrics import Start

logger = logging.getLogger(__name__)


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


# Required package, and the argument of `pip install`.
_PACKAGES = {
    LoggerKind.wandb: ("wandb", "wandb==0.31.*"),
    LoggerKind.tensorboard: ("tensorboard", "'zeco-train[tensorboard]', or tensorboard"),
}


@dataclass
class LoggerConfig:
    """Settings of the experiment tracker.

    Attributes:
        kind: the tracker.
        project: W&B's project.
        entity: W&B's user or team; null: the account's default.
        group: W&B's group of runs; null: MODEL-LENGTH, such as gla_1b-1M, of runs that differ in their parallelism.
        job_type: W&B's job type.
        tags: W&B's tags of the run; added to the automatic ones: sp=…, sp.size=…, seq_len=…, model=…, strategy=…,
            devices=….
        mode: whether W&B sends data while the run lasts; `offline` by default: `wandb sync` sends them later.
        timeout_seconds: longest wait for W&B's server; at the start, after which the run is tracked offline, and at the
            end, after which unsent data stays in the run's folder.
    """

    kind: LoggerKind = LoggerKind.none
    project: str = "zeco-train"
    entity: str | None = None
    group: str | None = None
    job_type: str = "train"
    tags: list[str] = field(default_factory=list)
    mode: LoggerMode = LoggerMode.offline
    timeout_seconds: float = 60.0

    def needs(self) -> Iterator[tuple[str, str, bool]]:
        """Yield (key, setting it depends on, whether that is set)."""
        for name in ("project", "entity", "group", "job_type", "tags", "mode", "timeout_seconds"):
            yield name, "logger=wandb", self.kind is LoggerKind.wandb

    def validate(self) -> None:
        """Raise `ConfigError` for values that the tracker would reject, or if it is missing: on every rank alone."""
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
        # A folder named wandb, as created by runs, is found as a namespace package; only a real package has an origin.
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            problem = f"package {package} is not installed; pip install {install}, or logger=none"
            raise ConfigError("logger", self.kind.value, problem)


FOLDER = "tensorboard"


class ExperimentLogger:
    """Metrics sink besides metrics.jsonl: `begin` is first and once, and errors after it must not end the run.

    This one records nothing, but keeps the run id, so that a run can be resumed with or without its tracker.
    """

    def begin(self, config: Mapping[str, Any], start: Start, run_id: str | None) -> str | None:
        """Begin or resume a tracked run, by the id in its checkpoints; returns the id, None without ids."""
        return run_id

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a step."""

    def finish(self, exit_code: int = 0) -> None:
        """Flush and end; an `exit_code` ≠ 0 marks the run as failed. May be called again."""


class TensorBoardLogger(ExperimentLogger):
    """One event file per start of a run; each purges repeated steps from the earlier files."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / FOLDER
        self._writer: Any = None

    def begin(self, config: Mapping[str, Any], start: Start, run_id: str | None) -> str | None:
        """As `ExperimentLogger.begin`, without ids; raises `DataError` if the folder cannot be written."""
        from torch.utils.tensorboard import SummaryWriter

        with write_errors(self.folder):
            # Events of earlier files from `purge_step` on are discarded.
            self._writer = SummaryWriter(str(self.folder), purge_step=start.step + 1)
        for name, value in (("config", config), ("layout", start.layout.as_dict()), ("environment", start.environment)):
            # Indented, it is code in Markdown.
            self._writer.add_text(name, indent(json.dumps(value, indent=2, default=str), " " * 4), start.step)
        return run_id

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record a step's numbers. A failure is logged, and disables the logger."""
        if self._writer is None:
            return
        try:
            for name, value in metrics.items():
                if isinstance(value, int | float) and name != "step":
                    self._writer.add_scalar(name, value, step)
            # Flush every row, so that a kill loses none that metrics.jsonl has; rows are seconds apart.
            self._writer.flush()
        except Exception as error:
            self._give_up(f"did not record step {step}", error)

    def finish(self, exit_code: int = 0) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
        except Exception as error:
            self._give_up("did not finish", error)

    def _give_up(self, what: str, error: Exception) -> None:
        # The writer's thread has ended: further events would be lost silently.
        self._writer = None
        _warn("TensorBoard", what, error, " without it")


RATE = "tokens_per_second_per_device"
# As everywhere: the median over rows, without the first row of a start, which includes kernel compilation.
MEDIAN_RATE, MEDIAN_TOTAL_RATE = f"{RATE}_median", "tokens_per_second_median"
# Shares of a step's time; W&B's multi-run charts show metrics, but not ratios of them.
EXPOSED_SHARE, DATA_SHARE = "comm_exposed_share", "data_share"
# Stored in addition to the checkpoints, so that a run stopped before its first checkpoint resumes under the same id.
_RUN_ID_FILE = "wandb_run_id"
# Permanent server errors, for which a retry is useless: no account, no such team, no permission.
_REFUSALS = tuple(f"returned error {status}" for status in (400, 401, 403, 404))


class WandbLogger(ExperimentLogger):
    """Weights & Biases, writing to `run_dir/wandb`.

    Offline, each start of a run leaves one folder `offline-run-*`, all with the same run id, which `wandb sync` joins.
    Metrics are plotted over their own `step`: W&B's call counter is monotonic, and would drop repeated steps.
    """

    def __init__(self, config: LoggerConfig, run_dir: Path) -> None:
        self.config, self.run_dir = config, run_dir
        self._run: Any = None
        self._warned = False
        self._rates: list[float] = []
        self._rows = self._devices = 0

    def begin(self, config: Mapping[str, Any], start: Start, run_id: str | None) -> str | None:
        """As `ExperimentLogger.begin`. If W&B's server cannot be reached, the run is tracked offline, with a warning.

        Raises:
            ConfigError: W&B refuses to start, e.g. online without an account.
        """
        if self.config.mode is LoggerMode.disabled:
            return run_id
        import wandb

        with suppress(OSError, ValueError):
            run_id = run_id or read_small(self.run_dir / _RUN_ID_FILE).decode().strip() or None
        self._devices = start.layout.devices
        try:
            self._run = self._init(self.config.mode, config, start, run_id)
            self._run.define_metric("*", step_metric="step")
            # Also in the summary, which multi-run charts read.
            self._run.summary.update(start.layout.as_dict())
        except (wandb.Error, OSError, ValueError) as error:
            mode = self.config.mode.value
            raise ConfigError("logger.mode", mode, f"W&B cannot start ({_reason(error)}); or logger=none") from error
        with suppress(OSError):
            write_durably(self.run_dir / _RUN_ID_FILE, f"{self._run.id}\n")
        return self._run.id

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record a step's metrics. Only the first failure is logged."""
        if self._run is None:
            return
        try:
            self._run.log({**metrics, **self._derived(metrics), "step": step})
        except Exception as error:
            # No error of a tracker's client may end a training run.
            self._warn(f"did not record step {step}", error)

    def finish(self, exit_code: int = 0) -> None:
        """End W&B's run and its service process. A failure is logged."""
        run, self._run = self._run, None
        if run is None:
            return
        import wandb

        # Otherwise W&B ends its service process at interpreter exit, with a traceback if that process is dead.
        ends = [lambda: run.finish(exit_code=exit_code), lambda: wandb.teardown(exit_code)]
        if exit_code == REQUEUE_EXIT_CODE:
            # Then W&B shows the run as preempted rather than failed.
            ends.insert(0, run.mark_preempting)
        for end in ends:
            try:
                end()
            except Exception as error:
                self._warn("did not finish", error)

    def _init(self, mode: LoggerMode, config: Mapping[str, Any], start: Start, run_id: str | None) -> Any:
        import wandb

        # No console capture: it would interfere with the progress bar.
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            init_timeout=self.config.timeout_seconds,
            finish_timeout=self.config.timeout_seconds,
        )
        wandb.setup(settings=settings)
        # Checked here, since `init` would block at a prompt while all other ranks wait.
        if mode is LoggerMode.online and not wandb.login(prompt=False, verify=False):
            raise ConfigError("logger.mode", "online", "W&B has no account here; wandb login, or mode offline")
        layout = start.layout
        try:
            return wandb.init(
                project=self.config.project,
                entity=self.config.entity,
                group=self.config.group or layout.group,
                job_type=self.config.job_type,
                tags=[*dict.fromkeys([*self.config.tags, *layout.tags])],
                name=self.run_dir.resolve().name,
                config={**config, "layout": layout.as_dict(), "environment": dict(start.environment)},
                # A resume may change the parallelism or the number of steps.
                allow_val_change=True,
                dir=str(self.run_dir),
                id=run_id,
                resume="allow",
                mode=mode.value,
                settings=settings,
            )
        except wandb.errors.CommError as error:
            if mode is LoggerMode.offline or any(sign in str(error) for sign in _REFUSALS):
                raise
            logger.warning(
                "W&B cannot be reached (%s); the run is tracked offline, in %s; wandb sync uploads it later",
                _reason(error),
                self.run_dir / "wandb",
            )
            # The service process still holds the run's id.
            wandb.teardown()
            return self._init(LoggerMode.offline, config, start, run_id)

    def _derived(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        found = {}
        if (rate := metrics.get(RATE)) is not None:
            self._rows += 1
            if self._rows > 1:
                insort(self._rates, rate)
            middle = median(self._rates or [rate])
            found = {MEDIAN_RATE: middle, MEDIAN_TOTAL_RATE: middle * self._devices}
        if seconds := metrics.get("step_seconds"):
            for share, name in ((EXPOSED_SHARE, "comm_exposed_seconds"), (DATA_SHARE, "data_seconds")):
                if metrics.get(name) is not None:
                    found[share] = metrics[name] / seconds
        return found

    def _warn(self, what: str, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            _warn("W&B", what, error)


def _warn(tracker: str, what: str, error: Exception, how: str = "") -> None:
    problem = f"{tracker} {what}: {type(error).__name__}: {error}"
    logger.warning("%s; the run goes on%s, all metrics are in metrics.jsonl", problem, how)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def build_logger(config: LoggerConfig, run_dir: str | Path, rank: int) -> ExperimentLogger:
    """The configured tracker on rank 0; a no-op on other ranks."""
    if rank != 0 or config.kind is LoggerKind.none:
        return ExperimentLogger()
    if config.kind is LoggerKind.tensorboard:
        return TensorBoardLogger(Path(run_dir))
    return WandbLogger(config, Path(run_dir))
