"""The run's configuration: schema, composition from `configs/` with Hydra's compose API, and validation.

Each section's dataclass is defined in the module that it configures. No other module sees a `DictConfig`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.config import FIXED, DataConfig, check_config
from data.loader.masking import TaskConfig
from models.config import LanguageModelConfig
from models.mixer_registry import DEFAULT_CONFIG, check_document, describe_mixer, describe_mixers
from zeco_train.checkpoint.config import CheckpointConfig
from zeco_train.config import composing
from zeco_train.config.composing import MIXER, NOTHING, choose_files, compose_files, config_class, explain, stored_class
from zeco_train.config.help import Key, describe_groups, keys_of
from zeco_train.config.overrides import apply_overrides, check_groups, find_value, is_of, of_groups
from zeco_train.config.rules import check_attention, check_strategy, check_task
from zeco_train.config.rules import needs as attention_needs
from zeco_train.distributed.config import ParallelConfig
from zeco_train.errors import ConfigError
from zeco_train.sp.attention.method_registry import describe_methods
from zeco_train.sp.backend_registry import BACKENDS, SPConfig, describe_backends
from zeco_train.system.command import docstring
from zeco_train.system.numbers import check_least
from zeco_train.system.paths import check_path
from zeco_train.system.stored_values import check_values, find_unstorable, flatten, read_values
from zeco_train.tracking.loggers import LoggerConfig, LoggerKind
from zeco_train.training.config import TrainConfig
from zeco_train.training.optim.optimizer_registry import OptimConfig
from zeco_train.training.schedule import ScheduleConfig


@dataclass
class Config:
    """A whole run. `model` is of the class of its mixer; `defaults_of` has the types of its keys.

    Attributes:
        name: name of the run, and of its folder.
        run_dir: folder of the run; it goes on there if it has a checkpoint.
        seed: of the initial weights and of the data's order.
    """

    name: str = MISSING
    run_dir: str = MISSING
    seed: int = field(default=0, metadata=FIXED)
    train: TrainConfig = field(default_factory=TrainConfig)
    model: LanguageModelConfig = field(default_factory=DEFAULT_CONFIG, metadata=FIXED)
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
        check_strategy(self.parallel.strategy, self.train)
        if not self.data.reset_state_at_document:
            check_document(self.model, "data.seq_len", self.data.seq_len)
        check_path("run_dir", self.run_dir)
        if self.logger.kind is not LoggerKind.none and self.logger.timeout_seconds >= self.parallel.timeout_seconds:
            # The other ranks wait for rank 0 meanwhile and would time out.
            allowed = f"must be < parallel.timeout_seconds={self.parallel.timeout_seconds:g}"
            raise ConfigError("logger.timeout_seconds", self.logger.timeout_seconds, allowed)

    def identity(self) -> dict[str, Any]:
        """The settings that define model, data and numerics: those marked `FIXED`, for the life of a run's folder.

        `data.loader.batches.OpenedData.identity` adds those of the opened stores.
        """
        return dict(_fixed(self, self)) | {"data.labels_across_documents": self.data.has_labels_across}


def _fixed(config: Config, settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for entry in dataclasses.fields(settings):
        key, value, mark = f"{prefix}{entry.name}", getattr(settings, entry.name), entry.metadata.get("fixed")
        if mark == "always" or (mark == "if read" and unmet_need(key, config) is None):
            yield from flatten(to_plain(value), key, lists=False)
        elif dataclasses.is_dataclass(value):
            yield from _fixed(config, value, f"{key}.")


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
    """Compose `configs/train.yaml`, or a whole configuration `base`, with overrides KEY=VALUE and GROUP=OPTION.

    Raises:
        ConfigError: an unknown key or option, a value of the wrong type, one out of range, or one without effect.
    """
    return load_given(overrides, base)[0]


def load_given(overrides: list[str], base: Config | None = None) -> tuple[Config, dict[str, Any]]:
    """`load_config`, and the value of each key that the overrides set, without groups."""
    config, given = _compose(overrides, base)
    config.validate()
    # The run stores the configuration.
    if (found := find_unstorable(to_plain(config))) is not None:
        raise ConfigError(*found)
    # Only overrides are checked: files of `configs/` may set keys without effect.
    for key, value in given.items():
        if (needed := unmet_need(key, config)) is not None:
            raise ConfigError(key, value, f"would be ignored; it needs {needed}")
    return config, given


def unmet_need(key: str, config: Config) -> str | None:
    """The missing setting without which a key has no effect; None if none is missing.

    A section's `needs` yields (key or section in it, setting that it depends on, whether that is set).
    """
    section = key.partition(".")[0]
    needs = getattr(getattr(config, section, None), "needs", tuple)
    of_section = ((f"{section}.{name}", needed, is_met) for name, needed, is_met in needs())
    for name, needed, is_met in (*attention_needs(config.model), *of_section):
        if is_of(key, name) and not is_met:
            return needed
    return None


def read_config(path: Path) -> Config:
    """Read a run's stored configuration; `ConfigError` if it cannot be read, or is none."""
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
        return _to_config(OmegaConf.merge(defaults_of(stored_class(plain)), OmegaConf.create(plain)))
    except ConfigError as error:
        # An unknown mixer, or from a section's own checks in its constructor; the caller names the file.
        raise ValueError(str(error)) from error


# By the class of the model; made once, which takes longer than all checks.
_DEFAULTS: dict[type, Any] = {}


def defaults_of(model: type[LanguageModelConfig]) -> Any:
    """`Config` with a section `model` of this class, as OmegaConf checks and fills it; not to be changed.

    Values are of class `Config` itself.
    """
    if model not in _DEFAULTS:
        section = ("model", model, field(default_factory=model))
        _DEFAULTS[model] = OmegaConf.structured(dataclasses.make_dataclass("Config", [section], bases=(Config,)))
    return _DEFAULTS[model]


def _compose(overrides: list[str], base: Config | None = None) -> tuple[Config, dict[str, Any]]:
    groups = group_options()
    # An unknown mixer comes before all else, since the meaning of the other keys depends on it.
    if (asked := find_value(overrides, MIXER)) is not None:
        config_class(asked)
    check_groups(overrides, groups, [section.name for section in dataclasses.fields(Config)], Config)
    if base is None:
        file, chosen, below = "train", choose_files(overrides, groups), {}
    else:
        # Without a defaults list there is nothing to replace: a group's file is added on top of the base.
        added = (text if text.startswith("+") else f"+{text}" for text in of_groups(overrides, groups))
        file, chosen, below = NOTHING, [*added], to_plain(base)
    composed, given = compose_files(file, chosen), dict[str, Any]()
    model = config_class(composed.mixer) if base is None else type(base.model)
    try:
        settings = OmegaConf.merge(defaults_of(model), below, composed.values)
        given = apply_overrides(overrides, settings, groups)
        return _to_config(settings), given
    except OmegaConfBaseException as error:
        raise explain(error, file, chosen, given) from error


def _to_config(composed: Any) -> Config:
    # As `Config` itself rather than the class of `defaults_of`.
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


def describe(arguments: list[str]) -> str:
    """The text of `train.py --help`: a line for each key, with the value that overrides among `arguments` give it.

    The other arguments are sections, or the beginnings of keys, whose keys are explained in full.

    Raises:
        ConfigError: one of them is neither.
    """
    overrides = [text for text in arguments if "=" in text]
    config, groups = _compose(overrides)[0], group_options()
    keys = [*keys_of(config)]
    names = [text for text in arguments if text not in overrides]
    for name in names:
        if not any(is_of(key.name, name) for key in keys):
            sections = ", ".join(section.name for section in dataclasses.fields(Config))
            raise ConfigError("--help", name, f"must be a section or a key, {sections}, or KEY=VALUE")
    if not names:
        return _describe_all(config, keys, groups)
    texts = [describe_mixer(config.model.mixer)] * ("model" in names)
    for name in names:
        section = name.partition(".")[0]
        texts.append("\n".join(key.whole for key in keys if is_of(key.name, name)))
        if name == section and section in groups:
            texts.append(f"Files of configs/{section}:\n{describe_groups({section: groups[section]})}")
        texts += _choices(name)
    return "\n\n".join(texts)


def _choices(section: str) -> list[str]:
    # What can be chosen in a section, by its own registry.
    if section == "model":
        return [f"Mixers (--help model model.mixer=NAME explains one):\n{describe_mixers()}"]
    if section == "sp":
        methods = f"Softmax layers (model.attn.every=N):\n{describe_methods()}"
        return [f"Backends:\n{describe_backends()}", methods]
    return []


def _describe_all(config: Config, keys: list[Key], groups: dict[str, list[str]]) -> str:
    texts = [
        "usage: torchrun --nproc-per-node N train.py [KEY=VALUE ...]      (python train.py ...: one rank)\n"
        "       python train.py --help [SECTION ...] [KEY=VALUE ...]      all that the keys of a section mean\n\n"
        "Keys are not completed in the shell: there is no Hydra's `-sc install=bash`.",
        f"Files of configs/ (GROUP=OPTION; +experiment=OPTION):\n{describe_groups(groups)}",
    ]
    for section in dataclasses.fields(config):
        value = getattr(config, section.name)
        of_section = [key.brief for key in keys if is_of(key.name, section.name)]
        if dataclasses.is_dataclass(value):
            title = docstring(type(value)).partition("\n")[0]
            texts += ["\n".join([f"{section.name}: {title}", *of_section]), *_choices(section.name)]
        else:
            texts[-1] += "\n\nThe run:" * (section.name == "name") + f"\n{of_section[0]}"
    return "\n\n".join(texts)
