"""The run's configuration: schema, composition from `configs/` with Hydra's compose API, and validation.

Each section's dataclass is defined in the module that it configures. No other module sees a `DictConfig`. Below: rules
between sections.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.config import FIXED, DataConfig, DataKind, check_config
from data.loader.masking import TaskConfig
from data.store import TokenStore
from models.attn import AttnConfig
from models.config import LanguageModelConfig
from models.mixer_registry import (
    DEFAULT_CONFIG,
    check_document,
    describe_mixer,
    describe_mixers,
    longest_document,
    unmasked_mixers,
)
from zeco_train.checkpoint.config import CheckpointConfig
from zeco_train.config import composing
from zeco_train.config.composing import MIXER, NOTHING, choose_files, compose_files, config_class, explain, stored_class
from zeco_train.config.help import Key, describe_groups, keys_of
from zeco_train.config.overrides import apply_overrides, check_groups, find_value, is_of, of_groups
from zeco_train.distributed.config import ParallelConfig, Strategy
from zeco_train.errors import ConfigError
from zeco_train.sp.attention.method_registry import describe_methods
from zeco_train.sp.backend_registry import BACKENDS, SPConfig, describe_backends
from zeco_train.sp.exchange import check_softmax
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
    for name, needed, is_met in (*_attention_needs(config.model), *of_section):
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


# Of section `model.attn`: they choose the layers; the others shape them.
_CHOOSING = ("every", "offset", "layers")
# Layers that a message names.
_NAMED = 4


def check_attention(model: LanguageModelConfig, sp: SPConfig, segments: int) -> None:
    """Check that nothing cuts what softmax layers read, and that their heads can be spread over `sp.size` ranks."""
    if not (chosen := model.attn.chosen(model.num_layers)):
        return
    # The first ones, since a mistyped number of layers can be huge.
    named = ", ".join(map(str, itertools.islice(chosen, _NAMED))) + (", …" if len(chosen) > _NAMED else "")
    where = f"the model has softmax attention at layer{'s' if len(chosen) > 1 else ''} {named}"
    if not model.causal:
        raise ConfigError("model.causal", "false", f"softmax layers are causal for now, and {where}")
    if segments > 1:
        allowed = f"must be 1: segments need layers with a state of constant size, and {where}"
        raise ConfigError("train.segments", segments, allowed)
    if sp.size > 0:
        check_softmax(sp, model, sp.size)


def check_strategy(strategy: Strategy, train: TrainConfig) -> None:
    """Check that torch's own DDP is not asked for what it does not do here."""
    if strategy is not Strategy.torch_ddp:
        return
    for name, value, refused, allowed in (
        ("dtype", train.dtype.value, "bf16", "must be fp32 or fp64 with parallel=torch_ddp, which casts no weights"),
        ("matmul", train.matmul.value, "fp8", "must be bf16, the compute dtype, with parallel=torch_ddp"),
        ("compile", train.compile.value, "always", "must be auto or never with parallel=torch_ddp, which is eager"),
    ):
        if value == refused:
            raise ConfigError(f"train.{name}", value, allowed)


def _attention_needs(model: LanguageModelConfig) -> Iterator[tuple[str, str, bool]]:
    """Keys of several sections that have an effect only with softmax layers, as `needs` of one section."""
    has_softmax = bool(model.attn.chosen(model.num_layers))
    for name in ("sp.attention", *(f"model.attn.{entry.name}" for entry in dataclasses.fields(AttnConfig))):
        if name.rpartition(".")[2] not in _CHOOSING:
            yield name, "model.attn.every", has_softmax


def check_documents(
    model: LanguageModelConfig,
    data: DataConfig,
    seq_len: int,
    stores: Iterable[TokenStore],
    field: str = "data.seq_len",
) -> None:
    """Check that the model is defined for all documents of sequences of this length.

    All documents of the stores count, so all ranks find the same: in a batch only the rank with a document's end
    has its length, and the others would wait for it in a scan. No document continues from one sequence to the next.

    Raises:
        ConfigError: names `field`, the setting that holds the length, or the store with a document that is too long.
    """
    limit = longest_document(model)
    if limit is None or seq_len <= limit:
        return
    if not data.reset_state_at_document:
        check_document(model, field, seq_len)
    for store in stores:
        within = f"tokens of the longest document of {store.path} within {field}={seq_len}"
        check_document(model, within, min(store.longest_document(), seq_len))


def check_task(task: TaskConfig, model: LanguageModelConfig, data: DataConfig, segments: int) -> None:
    """Check that the model reads exactly what its task lets it read, and that nothing cuts an unmasked sequence."""
    if task.is_masked:
        if model.causal:
            problem = "a causal model would not read the tokens after a mask; set model.causal=false"
            raise ConfigError("task", "mlm", problem)
        if data.kind is DataKind.synthetic:
            raise ConfigError("task", "mlm", "data=synthetic has labels of its own; take another data=")
    if model.causal:
        return
    able = unmasked_mixers()
    if (decaying := next((name for name in model.mixer_counts() if name not in able), None)) is not None:
        allowed = f"the decays of {decaying} need an order; mixers without: {', '.join(able) or 'none yet'}"
        raise ConfigError("model.causal", "false", allowed)
    if not task.is_masked:
        raise ConfigError("model.causal", "false", "the model would read the token to predict; take task=mlm")
    if segments > 1:
        problem = "an unmasked model reads the whole sequence at once; must be 1 with model.causal=false"
        raise ConfigError("train.segments", segments, problem)
    if data.reset_state_at_document:
        problem = "an unmasked model reads the whole sequence; must be false with model.causal=false"
        raise ConfigError("data.reset_state_at_document", "true", problem)
    if not data.has_labels_across:
        problem = "labels of task=mlm are the tokens themselves; must be true or null"
        raise ConfigError("data.labels_across_documents", "false", problem)
