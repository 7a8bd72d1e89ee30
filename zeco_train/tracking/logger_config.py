"""Settings of experiment trackers: `logger=none`, `logger=wandb` for Weights & Biases, `logger=tensorboard`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from zeco_train.errors import ConfigError


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
