"""Recipes: data set, text field and amount for `python -m data.prepare --recipe NAME`.

A recipe is a YAML file of values, in configs/recipes or anywhere; command-line options override it.
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
    """Contents of a recipe file.

    Attributes:
        description: of the text.
        homepage: of the data set.
        licence: the terms in a few words; read them yourself.
        size: approximate amount of text.
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
    """Names of the bundled recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_recipe(name: str) -> Recipe:
    """Read a recipe by its name or its file.

    Raises:
        ConfigError: no such recipe, or a file whose fields or types do not match `Recipe`.
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
