"""Recipes: which data set, which of its fields and how much of it; `python -m data.prepare --recipe NAME`.

A recipe is a YAML file of values, in configs/recipes or anywhere; every option on the command line goes before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeco_train.errors import ConfigError
from zeco_train.system.paths import check_path

FOLDER = Path(__file__).resolve().parents[1] / "configs" / "recipes"


@dataclass
class Recipe:
    """What a recipe's file says.

    Attributes:
        description: what the text is.
        homepage: where it is described.
        licence: under which terms, in a few words; read them yourself.
        size: how much there is, about.
        dataset, config, split, data_dir, data_files, revision, streaming: as in `DatasetSpec`.
        text_field: the field with the text.
        tokenizer: "bytes", or a tokenizer's name on the hub or path.
        min_tokens, validation_fraction: as in `PrepareOptions`.
    """

    description: str
    homepage: str
    licence: str
    size: str
    dataset: str
    tokenizer: str
    text_field: str = "text"
    config: str | None = None
    split: str = "train"
    data_dir: str | None = None
    data_files: str | None = None
    revision: str | None = None
    streaming: bool = True
    min_tokens: int = 1
    validation_fraction: float = 0.0


def recipe_names() -> list[str]:
    """The recipes that come with the program."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_recipe(name: str) -> Recipe:
    """Read a recipe by its name or its file.

    Raises:
        ConfigError: no such recipe, or a file that has not the fields of `Recipe`, or not their types.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from zeco_train.system.stored_values import read_values

    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    check_path("--recipe", path)
    if not path.is_file():
        raise ConfigError("--recipe", name, f"allowed: {', '.join(recipe_names())}, or the path of a .yaml file")
    try:
        values: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Recipe), read_values(path)))
    except (OmegaConfBaseException, ValueError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError("--recipe", name, f"{path}: {reason}") from error
    assert isinstance(values, Recipe)
    return values
