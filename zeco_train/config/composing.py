"""Merges the files of `configs/` by Hydra's compose API; which of them decides the token mixer.

Hydra gets no schema and no values of single keys: which keys there are depends on the mixer, which the merged files
name (`mixer: NAME` in `configs/model/{mixer}_{size}.yaml`; gla where there is no such line). `model.mixer=NAME` takes
the file of that mixer with the size of the chosen one, so that widths and the mixer's own keys are that mixer's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from models.config import LanguageModelConfig
from models.mixer_registry import DEFAULT_CONFIG, MIXERS
from zeco_train.config.overrides import REMOVED, find_value, of_groups
from zeco_train.errors import ConfigError
from zeco_train.sp.backend_registry import BACKENDS

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"
# What groups' files are added to that change a whole configuration, rather than `configs/train.yaml`.
NOTHING = "nothing"
GROUP = "model"
MIXER = f"{GROUP}.mixer"
# Of files and stored configurations that name no mixer.
_UNNAMED = DEFAULT_CONFIG.mixer
# Settings of Hydra itself, which nothing reads: their files take a fourth of the time.
_OWN = [f"~hydra/{name}" for name in ("launcher", "sweeper", "help", "hydra_help", "hydra_logging", "job_logging")]

ConfigStore.instance().store(name=NOTHING, node={})
for _name in BACKENDS:
    # A backend needs no file.
    ConfigStore.instance().store(group="sp", name=_name, node={"backend": _name})


class Composed(NamedTuple):
    """Merged files: their values, the mixer of their model, and the chosen file of `configs/model` ("": none)."""

    values: DictConfig
    mixer: Any
    option: str


def compose_files(file: str, chosen: Sequence[str]) -> Composed:
    """Merge a file of `configs/` (its name without suffix, or `NOTHING`) with the files of groups that `chosen` names.

    Raises:
        ConfigError: a file that is no YAML or names another that is not there, or an interpolation in `model.mixer`.
    """
    files = tuple((path, path.stat().st_mtime_ns) for path in sorted(CONFIG_DIR.rglob("*.yaml")))
    return _compose(files, file, tuple(chosen))


@lru_cache(maxsize=256)
def _compose(files: tuple[tuple[Path, int], ...], file: str, chosen: tuple[str, ...]) -> Composed:
    # Once for unchanged `files`: Hydra takes longer than all checks.
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            composed = compose(file, overrides=[*chosen, *_OWN], return_hydra_config=True)
        mixer = OmegaConf.select(composed, MIXER)
        values = OmegaConf.to_container(composed)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        field, value = _last(chosen)
        raise ConfigError(field, value, " ".join(str(error).split())) from error
    assert isinstance(values, dict)
    choices = values.pop("hydra")["runtime"]["choices"]
    merged = OmegaConf.create({str(key): value for key, value in values.items()})
    return Composed(merged, _UNNAMED if mixer is None else mixer, str(choices.get(GROUP, "")))


def explain(error: OmegaConfBaseException, file: str, chosen: Sequence[str], given: Mapping[str, Any]) -> ConfigError:
    """A one-line error for merged values that do not fit the schema, or have an interpolation that cannot be resolved.

    `file` and `chosen` as of `compose_files`; `given`: the values of single keys, which override the files'.
    """
    key, problem = error.full_key or "", (str(error).splitlines() or [type(error).__name__])[0]
    if key in given:
        return ConfigError(key, given[key], problem)
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        merged = GlobalHydra.instance().config_loader().compute_defaults_list(file, list(chosen), RunMode.RUN).defaults
    for one in reversed(merged):
        path = CONFIG_DIR / f"{one.config_path}.yaml"
        if not path.is_file():
            continue
        group, _, option = str(one.config_path).rpartition("/")
        if one.package and key == one.package:
            problem = "its first line must be: # @package _global_"
        elif not _sets(OmegaConf.load(path), key.removeprefix(f"{one.package}.") if one.package else key):
            continue
        else:
            problem = f"{key}: {REMOVED.get(key, problem)}"
        return ConfigError(group or "configs", option, f"configs/{one.config_path}.yaml: {problem}")
    return ConfigError(*_last(chosen), f"{key}: {problem}")


def _sets(values: Any, key: str) -> bool:
    for part in key.partition("[")[0].split("."):
        if not OmegaConf.is_dict(values) or part not in values.keys():  # noqa: SIM118 – `in` would resolve the value
            return False
        values = values._get_node(part)
    return True


def _last(chosen: Sequence[str]) -> tuple[str, str]:
    # Field and value of the file that was chosen last, for errors that name none.
    group, _, option = (chosen[-1] if chosen else "configs=train").partition("=")
    return group.lstrip("+"), option


def config_class(mixer: Any) -> type[LanguageModelConfig]:
    """The configuration class of the models with a mixer; `ConfigError` if there is none."""
    # Not `in MIXERS`, which raises for lists and mappings.
    if mixer not in list(MIXERS):
        raise ConfigError(MIXER, mixer, f"must be one of {', '.join(MIXERS)}")
    return MIXERS[mixer].config_class


def stored_class(plain: Mapping[str, Any]) -> type[LanguageModelConfig]:
    """The class of section `model` of a stored configuration; `ConfigError` for an unknown mixer."""
    section = plain.get(GROUP)
    return config_class(section.get("mixer") if isinstance(section, dict) else None)


def choose_files(overrides: Sequence[str], groups: Mapping[str, Collection[str]]) -> list[str]:
    """The overrides that choose files, with another file of `configs/model` if the mixer asked for is not its.

    Raises:
        ConfigError: an unknown mixer, a file that cannot be composed, or no file of the mixer with the size.
    """
    chosen = of_groups(overrides, groups)
    composed = compose_files("train", chosen)
    asked = find_value(overrides, MIXER)
    mixer = composed.mixer if asked is None else asked
    config_class(mixer)
    if mixer == (of_file := _mixer_of_file(composed.option)):
        return chosen
    option = _same_size(composed.option.removeprefix(f"{of_file}_"), mixer, groups[GROUP])
    replaced = of_groups(overrides, [GROUP])
    return [*(text for text in chosen if text not in replaced), f"{GROUP}={option}"]


def _same_size(size: str, mixer: str, options: Collection[str]) -> str:
    wanted = f"{mixer}_{size}"
    if wanted not in options:
        # The name of another mixer may begin with this one's.
        own = [name for name in options if name.startswith(f"{mixer}_") and _mixer_of_file(name) == mixer]
        sizes = ", ".join(name.removeprefix(f"{mixer}_") for name in own) or "none"
        raise ConfigError(MIXER, mixer, f"no configs/{GROUP}/{wanted}.yaml; sizes of {mixer}: {sizes}")
    if (found := _mixer_of_file(wanted)) != mixer:
        raise ConfigError(MIXER, mixer, f"configs/{GROUP}/{wanted}.yaml is of {found}; it needs a line mixer: {mixer}")
    return wanted


def _mixer_of_file(option: str) -> Any:
    return compose_files(f"{GROUP}/{option}", []).mixer
