"""The run's configuration: schema, composition from `configs/` with Hydra's compose API, and validation.

Each section's dataclass is defined in the module that it configures. `load_config` converts overrides to plain
dataclasses once; no other module sees a `DictConfig`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from data.config import LARGEST_COUNT, DataConfig, DataKind, check_config
from data.masking import TaskConfig
from models.config import LanguageModelConfig
from models.registry import DEFAULT_CONFIG, unmasked_mixers
from zeco_train.checkpoint.checkpointer import CheckpointConfig
from zeco_train.checkpoint.files import HF_PREFIX
from zeco_train.config.overrides import check_overrides
from zeco_train.distributed.device import Device
from zeco_train.distributed.parallelize import ParallelConfig
from zeco_train.errors import ConfigError
from zeco_train.ops.recompute import Recompute
from zeco_train.sp.registry import BACKENDS, SPConfig, describe_backends
from zeco_train.system.paths import check_path, path_problem, shown
from zeco_train.system.ranges import check_least
from zeco_train.system.stored_values import check_values, find_interpolation, read_values
from zeco_train.tracking.logger_config import LoggerConfig, LoggerKind
from zeco_train.training.nonfinite import skip_limit
from zeco_train.training.optim.registry import OptimConfig
from zeco_train.training.profiler import check_profile
from zeco_train.training.schedule import ScheduleConfig

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"


class Dtype(Enum):
    """Compute dtype. Master weights and optimizer state are fp32 for bf16 and fp32, fp64 for fp64."""

    bf16 = "bf16"
    fp32 = "fp32"
    fp64 = "fp64"

    @property
    def compute(self) -> torch.dtype:
        """The dtype of activations and matrix products."""
        return {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[self.value]

    @property
    def master(self) -> torch.dtype:
        """The dtype of master weights and optimizer state."""
        return torch.float64 if self is Dtype.fp64 else torch.float32


class Compile(Enum):
    """Whether to fuse the operations between matrix products with `torch.compile`. `auto`: on CUDA devices."""

    auto = "auto"
    always = "always"
    never = "never"


@dataclass
class TrainConfig:
    """The training loop: length, precision, validation, memory, and policies.

    Attributes:
        steps: optimizer steps of the whole run.
        dtype: compute dtype; see `Dtype`.
        device: type of the device.
        log_every: steps between two rows of metrics.jsonl.
        eval_every: steps between two validation losses (0: only at the end).
        eval_sequences: largest number of held-out sequences for a validation loss (0: no validation).
        segments: parts of a sequence, run through the model one after another; the last state of each is the initial
            state of the next. Memory is that of one part; the gradient is that of the whole sequence.
        recompute: activations that the backward pass recomputes.
        compile: whether to compile the blocks.
        nonfinite: policy for steps whose loss or gradient norm is NaN or infinite. `stop` ends the run. `skip:N` skips
            up to N such steps in a row; data, step and learning rate advance, weights do not change.
        profile: START:STOP, the steps (counted from 1, STOP included) to profile; None: none.
        profile_ranks: the ranks to profile.
    """

    steps: int = 1000
    dtype: Dtype = Dtype.fp32
    device: Device = Device.auto
    log_every: int = 10
    eval_every: int = 0
    eval_sequences: int = 16
    segments: int = 1
    recompute: Recompute = Recompute.none
    compile: Compile = Compile.auto
    nonfinite: str = "stop"
    profile: str | None = None
    profile_ranks: list[int] = field(default_factory=lambda: [0])

    def validate(self) -> None:
        """Raise `ConfigError` for a value out of range."""
        check_least(self, "train", steps=1, log_every=1, segments=1, eval_every=0, eval_sequences=0)
        if self.steps > LARGEST_COUNT:
            raise ConfigError("train.steps", self.steps, f"must be ≤ {LARGEST_COUNT}")
        skip_limit(self.nonfinite)
        check_profile(self.profile, self.profile_ranks, self.steps)

    def needs(self) -> Iterator[tuple[str, str, bool]]:
        """Keys that have an effect only with another setting: (key or section, that setting, whether it is set)."""
        yield "profile_ranks", "train.profile", self.profile is not None


@dataclass
class Config:
    """A whole run. `name`: its name; `run_dir`: its folder; `seed`: of the initial weights and the data order."""

    name: str = MISSING
    run_dir: str = MISSING
    seed: int = 0
    train: TrainConfig = field(default_factory=TrainConfig)
    model: LanguageModelConfig = field(default_factory=DEFAULT_CONFIG)
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    sp: SPConfig = field(default_factory=SPConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    sched: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)

    def validate(self) -> None:
        """Run all checks that need neither the data nor the world size; raises `ConfigError`."""
        for name in ("name", "run_dir"):
            if not getattr(self, name).strip():
                raise ConfigError(name, getattr(self, name), "must not be empty")
        check_least(self, seed=0)
        for section in dataclasses.fields(self):
            value = getattr(self, section.name)
            if hasattr(value, "validate"):
                value.validate()
        check_config(self.data)
        self._check_task()
        check_path("run_dir", self.run_dir)
        load = self.checkpoint.load
        if load is not None and (problem := path_problem(load.removeprefix(HF_PREFIX))) is not None:
            raise ConfigError("checkpoint.load", shown(load), problem)
        if self.logger.kind is not LoggerKind.none and self.logger.timeout_seconds >= self.parallel.timeout_seconds:
            # The other ranks wait for rank 0 meanwhile and would time out.
            allowed = f"must be < parallel.timeout_seconds={self.parallel.timeout_seconds:g}"
            raise ConfigError("logger.timeout_seconds", self.logger.timeout_seconds, allowed)

    def _check_task(self) -> None:
        """Check that the model reads what its task lets it read: a causal one earlier tokens, an unmasked one all."""
        if self.task.is_masked:
            if self.model.causal:
                problem = "a causal model would not read the tokens after a mask; set model.causal=false"
                raise ConfigError("task", "mlm", problem)
            if self.data.kind is DataKind.synthetic:
                raise ConfigError("task", "mlm", "data=synthetic has labels of its own; take another data=")
        if self.model.causal:
            return
        able = unmasked_mixers()
        if (decaying := next((name for name in self.model.mixer_counts() if name not in able), None)) is not None:
            allowed = f"the decays of {decaying} need an order; mixers without: {', '.join(able) or 'none yet'}"
            raise ConfigError("model.causal", "false", allowed)
        if not self.task.is_masked:
            raise ConfigError("model.causal", "false", "the model would read the token to predict; take task=mlm")
        if self.train.segments > 1:
            problem = "an unmasked model reads the whole sequence at once; must be 1 with model.causal=false"
            raise ConfigError("train.segments", self.train.segments, problem)
        if self.data.reset_state_at_document:
            problem = "an unmasked model reads the whole sequence; must be false with model.causal=false"
            raise ConfigError("data.reset_state_at_document", "true", problem)

    def identity(self) -> dict[str, Any]:
        """The settings that define model, data and numerics; they cannot change during the life of a run's folder.

        `data.opening.OpenedData.identity` adds those of the opened stores.
        """
        data, task = to_plain(self.data), to_plain(self.task)
        of_task = task if self.task.is_masked else ("name",)
        return {
            "seed": self.seed,
            "train.dtype": self.train.dtype.value,
            **{f"model.{key}": value for key, value in to_plain(self.model).items()},
            **{f"data.{key}": data[key] for key in ("seq_len", "global_batch", "shuffle", "reset_state_at_document")},
            **{f"task.{key}": task[key] for key in of_task},
        }


def to_plain(value: Any) -> Any:
    """A dataclass as dictionaries, lists, strings and numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return value


def load_config(overrides: list[str], base: Config | None = None) -> Config:
    """Compose `configs/train.yaml` with command-line overrides in Hydra's syntax.

    Args:
        overrides: KEY=VALUE, or GROUP=OPTION for a file of `configs/`.
        base: a whole configuration to override, instead of `configs/train.yaml`.

    Raises:
        ConfigError: an unknown key or option, a value of the wrong type, one out of range, or one without effect.
    """
    given = check_overrides(overrides, Config, group_options())
    config = _compose(overrides, base)
    config.validate()
    # The run stores the configuration, and a stored one is refused if it has interpolations.
    if (found := find_interpolation(to_plain(config))) is not None:
        raise ConfigError(*found, "must not have ${ in it once it is resolved; config.yaml keeps values only")
    # Only overrides are checked: files of `configs/` may set keys without effect.
    for key, value in given.items():
        if (needed := unmet_need(key, config)) is not None:
            raise ConfigError(key, value, f"would be ignored; it needs {needed}")
    return config


def unmet_need(key: str, config: Config) -> str | None:
    """The missing setting without which a key has no effect, from each section's `needs`; None if none is missing."""
    section, _, rest = key.partition(".")
    needs = getattr(getattr(config, section, None), "needs", tuple)
    for name, needed, is_met in needs():
        if (rest == name or rest.startswith(f"{name}.")) and not is_met:
            return needed
    return None


def read_config(path: Path) -> Config:
    """Read a run's stored configuration; keys that an older run lacks get their defaults.

    Raises:
        ConfigError: it cannot be read, or is not a run's configuration.
    """
    try:
        return config_of(read_values(path))
    except (OSError, OmegaConfBaseException, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError("config.yaml", path, f"cannot be read as a run's configuration ({reason})") from error


def config_of(plain: Any) -> Config:
    """The inverse of `to_plain`.

    Raises:
        ValueError, OmegaConfBaseException: not a configuration, or it has interpolations, which are not resolved.
    """
    if not isinstance(plain, dict):
        raise ValueError("not a mapping")
    check_values(plain)
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(plain)))
    except ConfigError as error:
        # From a section's own checks in its constructor; the caller names the file.
        raise ValueError(str(error)) from error
    assert isinstance(config, Config)
    return config


def _compose(overrides: list[str], base: Config | None = None) -> Config:
    store, primary = ConfigStore.instance(), "train"
    store.store(name="schema", node=Config)
    for name in BACKENDS:
        store.store(group="sp", name=name, node={"backend": name})
    if base is not None:
        primary = "base"
        store.store(name=primary, node=base)
        # Without a defaults list there is nothing to replace: a group's file is added on top of the base.
        groups = group_options()
        overrides = [f"+{text}" if text.partition("=")[0] in groups else text for text in overrides]
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            composed = compose(primary, overrides=overrides)
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise _explain(error, overrides) from error
    assert isinstance(config, Config)
    return config


def group_options() -> dict[str, list[str]]:
    """The configuration groups and their options, `{"sp": ["dp", "lasp1", …], …}`."""
    # Other folders in `configs/` are not for runs, such as the recipes of `data.prepare`.
    names = ["experiment", *(section.name for section in dataclasses.fields(Config))]
    groups = [CONFIG_DIR / name for name in sorted(names) if (CONFIG_DIR / name).is_dir()]
    options = {
        group.name: sorted(path.relative_to(group).with_suffix("").as_posix() for path in group.rglob("*.yaml"))
        for group in groups
    }
    # A registered backend needs no file.
    return options | {"sp": list(BACKENDS)}


def describe(overrides: list[str]) -> str:
    """The text of `train.py --help`: groups with their options, and the configuration with `overrides` applied."""
    groups = "\n".join(f"  {name}={'|'.join(options)}" for name, options in group_options().items())
    check_overrides(overrides, Config, group_options())
    config = OmegaConf.to_yaml(OmegaConf.create(to_plain(_compose(overrides))))
    return (
        "usage: torchrun --nproc-per-node N train.py [KEY=VALUE ...]      (python train.py ...: one rank)\n\n"
        f"Groups:\n{groups}\n\nBackends:\n{describe_backends()}\n\nKeys, as this command line sets them:\n\n{config}"
    )


def _explain(error: Exception, overrides: list[str]) -> ConfigError:
    """A one-line error for what `check_overrides` cannot detect: interpolations, and errors in files of `configs/`."""
    text = str(error).strip() or type(error).__name__
    full_key = re.search(r"full_key: (\S+)", text)
    key = full_key[1] if full_key else ""
    if file := re.match(r"In '([^']+)': (?:\w+ raised while composing config:\s*)?(.+)", text):
        group, _, option = file[1].rpartition("/")
        problem = f"{key}: {file[2]}" if key else file[2]
        if group and key == group:
            problem = "its first line must be: # @package _global_"
        return ConfigError(group or "configs", option, f"configs/{file[1]}.yaml: {problem}")
    for override in overrides:
        name, _, value = override.partition("=")
        if key and name.lstrip("+") == key:
            return ConfigError(key, value, text.splitlines()[0])
    if merged := re.match(r"Error merging override ([\w.]+)=(.*)", text):
        return ConfigError(merged[1], merged[2], "does not fit what it changes, as a number beyond the end of a list")
    return ConfigError("configuration", " ".join(overrides), " ".join(text.split()))
