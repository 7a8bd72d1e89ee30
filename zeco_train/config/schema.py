"""The run's configuration: schema, composition from `configs/` with Hydra's compose API, and validation.

Each section's dataclass is defined in the module that it configures. `load_config` converts overrides to plain
dataclasses once; no other module sees a `DictConfig`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.config import LARGEST_COUNT, DataConfig, check_config
from data.masking import TaskConfig
from models.config import LanguageModelConfig
from models.registry import DEFAULT_CONFIG, check_document, describe_mixers
from zeco_train.checkpoint.checkpointer import CheckpointConfig
from zeco_train.checkpoint.files import HF_PREFIX
from zeco_train.config import composing
from zeco_train.config.attention_rules import check_attention
from zeco_train.config.attention_rules import needs as attention_needs
from zeco_train.config.composing import compose_file, compose_untyped, explain
from zeco_train.config.execution import Compile, CudaGraphs, skip_limit
from zeco_train.config.mixer_choice import KEY as MIXER_KEY
from zeco_train.config.mixer_choice import MixerChoice, choose_mixer, config_class, stored_class
from zeco_train.config.overrides import check_overrides, find_value, of_groups
from zeco_train.config.task_rules import check_task
from zeco_train.distributed.device import Device
from zeco_train.distributed.parallelize import ParallelConfig
from zeco_train.errors import ConfigError
from zeco_train.ops.linear import Matmul
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.slow_paths import Kernels
from zeco_train.sp.attention.registry import describe_methods
from zeco_train.sp.registry import BACKENDS, SPConfig, describe_backends
from zeco_train.system.numbers import check_least
from zeco_train.system.paths import check_path, path_problem, shown
from zeco_train.system.stored_values import check_values, find_unstorable, flatten, read_values
from zeco_train.tracking.logger_config import LoggerConfig, LoggerKind
from zeco_train.training.optim.registry import OptimConfig
from zeco_train.training.profiler import check_profile
from zeco_train.training.schedule import ScheduleConfig


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


@dataclass
class TrainConfig:
    """The training loop: length, precision, validation, memory, and policies.

    Attributes:
        steps: optimizer steps of the whole run.
        dtype: compute dtype; see `Dtype`.
        matmul: of the blocks' linear layers: `bf16` is the compute dtype, for `fp8` see `zeco_train.ops.linear`.
        device: type of the device.
        log_every: steps between two rows of metrics.jsonl.
        eval_every: steps between two validation losses (0: only at the end).
        eval_sequences: largest number of held-out sequences for a validation loss (0: no validation).
        segments: parts of a sequence, run through the model one after another; the last state of each is the initial
            state of the next. Memory is that of one part; the gradient is that of the whole sequence.
        recompute: activations that the backward pass recomputes.
        compile: whether to compile the blocks.
        cuda_graphs: `auto` replays steps as CUDA graphs on CUDA devices, where possible; `off` never. The same bits.
        kernels: of calls that kernels on GPUs do not serve; see `Kernels`.
        deterministic: runs repeat their bits on GPUs. The compiler of the blocks does not choose between kernels that
            round differently by measuring them, and FlashAttention adds up the gradients of queries in one order. Its
            backward pass takes more time, and memory: in fp32 the gradients of a layer's queries several times (132
            over the rank's heads on an H100 or H200).
        nonfinite: policy for steps whose loss or gradient norm is NaN or infinite. `stop` ends the run. `skip:N` skips
            up to N such steps in a row; data, step and learning rate advance, weights do not change.
        profile: START:STOP, the steps (counted from 1, STOP included) to profile; None: none.
        profile_ranks: the ranks to profile.
    """

    steps: int = 1000
    dtype: Dtype = Dtype.fp32
    matmul: Matmul = Matmul.bf16
    device: Device = Device.auto
    log_every: int = 10
    eval_every: int = 0
    eval_sequences: int = 16
    segments: int = 1
    recompute: Recompute = Recompute.none
    compile: Compile = Compile.auto
    cuda_graphs: CudaGraphs = CudaGraphs.auto
    kernels: Kernels = Kernels.auto
    deterministic: bool = False
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
    """A whole run. `name`: its name; `run_dir`: its folder; `seed`: of the initial weights and the data order.

    `model` is of the class of its mixer; `schema_of` has the types of its keys.
    """

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
        check_attention(self.model, self.sp, self.train.segments)
        check_task(self.task, self.model, self.data, self.train.segments)
        if not self.data.reset_state_at_document:
            check_document(self.model, "data.seq_len", self.data.seq_len)
        check_path("run_dir", self.run_dir)
        load = self.checkpoint.load
        if load is not None and (problem := path_problem(load.removeprefix(HF_PREFIX))) is not None:
            raise ConfigError("checkpoint.load", shown(load), problem)
        if self.logger.kind is not LoggerKind.none and self.logger.timeout_seconds >= self.parallel.timeout_seconds:
            # The other ranks wait for rank 0 meanwhile and would time out.
            allowed = f"must be < parallel.timeout_seconds={self.parallel.timeout_seconds:g}"
            raise ConfigError("logger.timeout_seconds", self.logger.timeout_seconds, allowed)

    def identity(self) -> dict[str, Any]:
        """The settings that define model, data and numerics; they cannot change during the life of a run's folder.

        `data.opening.OpenedData.identity` adds those of the opened stores.
        """
        data, task = to_plain(self.data), to_plain(self.task)
        of_task = task if self.task.is_masked else ("name",)
        return {
            "seed": self.seed,
            "train.dtype": self.train.dtype.value,
            "train.matmul": self.train.matmul.value,
            "optim.name": self.optim.name.value,
            **dict(flatten(to_plain(self.model), "model", lists=False)),
            **{f"data.{key}": data[key] for key in ("seq_len", "global_batch", "shuffle", "reset_state_at_document")},
            "data.labels_across_documents": self.data.has_labels_across,
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
    config, given = _compose_checked(overrides, base)
    config.validate()
    # The run stores the configuration.
    if (found := find_unstorable(to_plain(config))) is not None:
        raise ConfigError(*found)
    # Only overrides are checked: files of `configs/` may set keys without effect.
    for key, value in given.items():
        if (needed := unmet_need(key, config)) is not None:
            raise ConfigError(key, value, f"would be ignored; it needs {needed}")
    return config


def unmet_need(key: str, config: Config) -> str | None:
    """The missing setting without which a key has no effect; None if none is missing.

    From the `needs` of its section, and those of softmax layers.
    """
    section = key.partition(".")[0]
    needs = getattr(getattr(config, section, None), "needs", tuple)
    of_section = ((f"{section}.{name}", needed, is_met) for name, needed, is_met in needs())
    for name, needed, is_met in (*attention_needs(config.model), *of_section):
        if (key == name or key.startswith(f"{name}.")) and not is_met:
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
        schema = schema_of(stored_class(plain))
        config = _to_config(OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.create(plain)))
        if "labels_across_documents" not in (plain.get("data") or {}):
            # Of a run from before the key, which had all labels.
            config.data.labels_across_documents = True
        return config
    except ConfigError as error:
        # An unknown mixer, or from a section's own checks in its constructor; the caller names the file.
        raise ValueError(str(error)) from error


_SCHEMAS: dict[type, type[Config]] = {}


def schema_of(model: type[LanguageModelConfig]) -> type[Config]:
    """`Config` with a section `model` of this class, to check and compose; values are of class `Config` itself."""
    if model not in _SCHEMAS:
        section = ("model", model, field(default_factory=model))
        _SCHEMAS[model] = dataclasses.make_dataclass("Config", [section], bases=(Config,))
    return _SCHEMAS[model]


def check_keys(overrides: list[str]) -> dict[str, Any]:
    """`check_overrides` for a run's overrides, with the keys of the mixer that they choose.

    Raises:
        ConfigError: see `check_overrides`; or the mixer is unknown, or has no file of the size.
    """
    groups = group_options()
    return check_overrides(overrides, schema_of(_choose_mixer(overrides, groups).model), groups)


def _choose_mixer(overrides: list[str], groups: dict[str, list[str]]) -> MixerChoice:
    """Choose the mixer, after checks of those overrides that decide it."""
    # An unknown mixer comes before all else, since the meaning of the other keys depends on it.
    if (asked := find_value(overrides, MIXER_KEY)) is not None:
        config_class(asked)
    check_overrides(of_groups(overrides, groups), Config, groups)
    return choose_mixer(overrides, groups, compose_untyped)


def _compose_checked(overrides: list[str], base: Config | None = None) -> tuple[Config, dict[str, Any]]:
    """The configuration, without checks of ranges, and the keys that the overrides set."""
    groups = group_options()
    choice = _choose_mixer(overrides, groups) if base is None else MixerChoice(type(base.model), overrides)
    schema = schema_of(choice.model)
    given = check_overrides(overrides, schema, groups)
    if base is None:
        composed = compose_file("train", choice.overrides, schema)
    else:
        ConfigStore.instance().store(name="base", node=base)
        # Without a defaults list there is nothing to replace: a group's file is added on top of the base.
        added = [f"+{text}" if text.partition("=")[0] in groups else text for text in overrides]
        composed = compose_file("base", added, schema)
    try:
        return _to_config(composed), given
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, choice.overrides) from error


def _to_config(composed: Any) -> Config:
    """A composed configuration as `Config` itself rather than the class of `schema_of`."""
    values = OmegaConf.to_object(composed)
    assert isinstance(values, Config)
    return Config(**{section.name: getattr(values, section.name) for section in dataclasses.fields(Config)})


def group_options() -> dict[str, list[str]]:
    """The configuration groups and their options, `{"sp": ["dp", "lasp1", …], …}`."""
    # Other folders in `configs/` are not for runs, such as the recipes of `data.prepare`.
    names = ["experiment", *(section.name for section in dataclasses.fields(Config))]
    groups = [composing.CONFIG_DIR / name for name in sorted(names) if (composing.CONFIG_DIR / name).is_dir()]
    options = {
        group.name: sorted(path.relative_to(group).with_suffix("").as_posix() for path in group.rglob("*.yaml"))
        for group in groups
    }
    # A registered backend needs no file.
    return options | {"sp": list(BACKENDS)}


def describe(overrides: list[str]) -> str:
    """The text of `train.py --help`: groups with their options, and the configuration with `overrides` applied."""
    groups = "\n".join(f"  {name}={'|'.join(options)}" for name, options in group_options().items())
    config = OmegaConf.to_yaml(OmegaConf.create(to_plain(_compose_checked(overrides)[0])))
    return (
        "usage: torchrun --nproc-per-node N train.py [KEY=VALUE ...]      (python train.py ...: one rank)\n\n"
        f"Groups:\n{groups}\n\nMixers:\n{describe_mixers()}\n\nBackends:\n{describe_backends()}\n\n"
        f"Softmax layers (model.attn.every=N):\n{describe_methods()}\n\n"
        f"Keys, as this command line sets them:\n\n{config}"
    )
