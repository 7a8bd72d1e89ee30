"""Composition of the files of `configs/` with overrides, by Hydra's compose API."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from zeco_train.config.mixer_choice import KEY as MIXER_KEY
from zeco_train.config.mixer_choice import Composed
from zeco_train.errors import ConfigError
from zeco_train.sp.registry import BACKENDS

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"


def compose_file(file: str, overrides: Sequence[str], schema: type | None, **options: bool) -> DictConfig:
    """Compose a file of `configs/` with overrides; without a schema values of any type are taken.

    Raises:
        ConfigError: see `explain`.
    """
    _store(schema, tuple(BACKENDS))
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            return compose(file, overrides=list(overrides), **options)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise explain(error, overrides) from error


@lru_cache(maxsize=1)
def _store(schema: type | None, backends: tuple[str, ...]) -> None:
    """Tell Hydra the schema, None for any values, and the backends; nothing if it knows them already."""
    store = ConfigStore.instance()
    store.store(name="schema", node={} if schema is None else schema)
    for name in backends:
        store.store(group="sp", name=name, node={"backend": name})


def compose_untyped(file: str, overrides: Sequence[str]) -> Composed:
    """Compose a file without a schema, which depends on the result."""
    files = tuple((path, path.stat().st_mtime_ns) for path in sorted(CONFIG_DIR.rglob("*.yaml")))
    return _read_choice(files, file, tuple(overrides))


@lru_cache(maxsize=256)
def _read_choice(files: tuple[tuple[Path, int], ...], file: str, overrides: tuple[str, ...]) -> Composed:
    """`compose_untyped`, once for unchanged `files`: composing takes longer than all other checks."""
    composed = compose_file(file, overrides, None, return_hydra_config=True)
    try:
        mixer = OmegaConf.select(composed, MIXER_KEY)
    except OmegaConfBaseException as error:
        raise explain(error, overrides) from error
    return Composed(mixer, str(composed.hydra.runtime.choices.get("model")))


def explain(error: Exception, overrides: Sequence[str]) -> ConfigError:
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
