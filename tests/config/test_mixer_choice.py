"""`model.mixer` chooses the token mixer: its file of `configs/model`, the class of section `model`, and its keys."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from models.config import LanguageModelConfig
from models.mixer_registry import MIXERS
from models.mixers.gla import GatedLinearAttention, GLAConfig
from zeco_train.config import composing
from zeco_train.config.schema import Config, config_of, describe, load_config, read_config, to_plain
from zeco_train.errors import ConfigError


@dataclass
class ToyConfig(LanguageModelConfig):
    """The keys of the toy mixer, of which GLA has none."""

    mixer: str = "toy"
    name: str = "toy_tiny"
    key_width: float = 0.5
    slots: int | None = None


class Toy(GatedLinearAttention):
    """A toy: GLA by another name."""

    config_class = ToyConfig  # type: ignore[assignment]
    title = ""

    def __init__(self, config: Any, *more: Any) -> None:
        shape = {name: getattr(config, name) for name in ("hidden_size", "num_layers", "num_heads")}
        super().__init__(GLAConfig(**shape, expand_k=config.key_width), *more)


@dataclass
class ToyBoxConfig(ToyConfig):
    """Of a mixer whose name begins with that of another."""

    mixer: str = "toy_box"


class ToyBox(Toy):
    """A box of toys."""

    config_class = ToyBoxConfig


# Of the registry with the mixers of this file.
NAMES = ", ".join([*MIXERS, "toy", "toy_box"])
FILES = {
    "toy_tiny": "mixer: toy\nname: toy_tiny\nvocab_size: 259\nkey_width: 1.0\n",
    "toy_1b": "mixer: toy\nname: toy_1b\nhidden_size: 1024\nnum_heads: 8\nslots: 64\n",
    "toy_box_tiny": "mixer: toy_box\nname: toy_box_tiny\n",
    # The rest of its keys, and its mixer, are those of another file.
    "toy_wide": "defaults: [toy_tiny, _self_]\nname: toy_wide\nhidden_size: 256\n",
    "own": "name: own\nhidden_size: 64\n",
    "toy_340m": "name: toy_340m\n",
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One copy of `configs/`: what is composed of unchanged files is kept."""
    configs = shutil.copytree(composing.CONFIG_DIR, tmp_path_factory.mktemp("toys") / "configs")
    for name, text in FILES.items():
        (configs / "model" / f"{name}.yaml").write_text(text)
    return configs


@pytest.fixture
def toys(configs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two more mixers, with files in a copy of `configs/`; returns the copy."""
    monkeypatch.setitem(MIXERS, "toy", Toy)
    monkeypatch.setitem(MIXERS, "toy_box", ToyBox)
    monkeypatch.setattr(composing, "CONFIG_DIR", configs)
    return configs


def _model(*overrides: str) -> tuple[type, str, str]:
    model = load_config([*overrides]).model
    return type(model), model.mixer, model.name


def _refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([*overrides])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.slow
def test_model_files_decide_the_configuration_class(toys: Path) -> None:
    assert _model() == (GLAConfig, "gla", "gla_tiny")
    assert _model("model=gla_1b") == (GLAConfig, "gla", "gla_1b")
    assert _model("model=own") == (GLAConfig, "gla", "own")
    assert _model("model=toy_1b") == (ToyConfig, "toy", "toy_1b")
    assert _model("model=toy_box_tiny") == (ToyBoxConfig, "toy_box", "toy_box_tiny")
    assert _model("model=toy_wide") == (ToyConfig, "toy", "toy_wide")
    assert type(load_config(["model=toy_1b"])) is Config


def test_keys_of_the_command_line_apply_to_the_chosen_mixer(toys: Path) -> None:
    model = load_config(["model.mixer=toy", "model=gla_1b", "model.slots=32", "model.num_layers=3"]).model
    assert isinstance(model, ToyConfig)
    assert (model.slots, model.num_layers, model.hidden_size, model.num_heads) == (32, 3, 1024, 8)


@pytest.mark.slow
def test_experiments_choose_mixer_and_size(toys: Path) -> None:
    experiment = toys / "experiment" / "toy.yaml"
    head = "# @package _global_\n"
    assert _model("+experiment=gla_1b_16k", "model.mixer=toy") == (ToyConfig, "toy", "toy_1b")
    experiment.write_text(f"{head}defaults:\n  - override /model: toy_1b\nmodel:\n  slots: 3\n")
    model = load_config(["+experiment=toy"]).model
    assert isinstance(model, ToyConfig)
    assert (model.name, model.slots) == ("toy_1b", 3)
    # The command line comes before the experiment.
    assert _model("+experiment=toy", "model=toy_tiny") == (ToyConfig, "toy", "toy_tiny")
    assert _refusal("+experiment=toy", "model.mixer=gla").endswith(
        "configs/experiment/toy.yaml: model.slots: Key 'slots' not in 'GLAConfig'"
    )
    # Read anew after a change, and by the same rule if the experiment sets the key itself.
    experiment.write_text(f"{head}model:\n  mixer: toy\n  slots: 4\n")
    model = load_config(["+experiment=toy", "model=gla_1b"]).model
    assert isinstance(model, ToyConfig)
    assert (model.name, model.hidden_size, model.slots) == ("toy_1b", 1024, 4)


@pytest.mark.few(quick=2)
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model.mixer=lstm"], f"model.mixer=lstm: must be one of {NAMES}"),
        (["model.mixer=[gla]"], f"model.mixer=['gla']: must be one of {NAMES}"),
        (["model=gla_1b", "model.mixer=toy_box"], "no configs/model/toy_box_1b.yaml; sizes of toy_box: tiny"),
        (["model=toy_1b", "model.slotz=1"], "model.slotz=1: unknown key of mixer toy; did you mean model.slots?"),
    ],
)
def test_mistakes_name_field_value_and_allowed(overrides: list[str], line: str, toys: Path) -> None:
    assert line in _refusal(*overrides)


@pytest.mark.slow
def test_files_with_an_unknown_mixer_or_key_are_refused(toys: Path) -> None:
    (toys / "model" / "odd_tiny.yaml").write_text("mixer: odd\n")
    assert _refusal("model=odd_tiny") == f"model.mixer=odd: must be one of {NAMES}"
    (toys / "model" / "odd_tiny.yaml").write_text("mixer: toy\nexpand_k: 1.0\n")
    assert re.fullmatch(
        r"model=odd_tiny: .*model/odd_tiny.yaml: .*'expand_k' not in 'ToyConfig'.*", _refusal("model=odd_tiny")
    )
    (toys / "model" / "odd_tiny.yaml").write_text("mixer: ${nope}\n")
    assert "'nope' not found" in _refusal("model=odd_tiny")


def test_class_accepts_only_its_own_mixer() -> None:
    with pytest.raises(ConfigError, match=r"^model.mixer=toy: must be gla in a GLAConfig$"):
        GLAConfig(mixer="toy")
    with pytest.raises(ConfigError, match=r"^model.mixer=gla: must be toy_box in a ToyBoxConfig$"):
        ToyBoxConfig(mixer="gla")


def test_help_names_mixers_and_the_chosen_ones_keys(toys: Path) -> None:
    text = describe(["model.mixer=toy"])
    assert "  model.mixer=gla             gated linear attention (Yang" in text
    assert "  model.mixer=toy             A toy: GLA by another name.\n" in text
    assert "  model.mixer=toy  " in text
    assert "  model.key_width=1.0\n" in text
    assert "model.expand_k" not in text


def test_stored_configurations_name_their_mixer(toys: Path, tmp_path: Path) -> None:
    config = load_config(["model.mixer=toy", "model.slots=2"])
    plain = to_plain(config)
    assert plain["model"]["mixer"] == config.identity()["model.mixer"] == "toy"
    assert config_of(plain) == config
    stored = tmp_path / "config.yaml"
    for mixer in ("lstm", ["gla"], {"gla": 1}, None):
        stored.write_text(yaml.safe_dump({**plain, "model": {**plain["model"], "mixer": mixer}}))
        with pytest.raises(ConfigError, match=rf"model.mixer=.*: must be one of {NAMES}\)$") as caught:
            read_config(stored)
        assert "\n" not in str(caught.value)
    stored.write_text(yaml.safe_dump({**plain, "model": {**plain["model"], "expand_k": 1.0}}))
    with pytest.raises(ConfigError, match="Key 'expand_k' not in 'ToyConfig'"):
        read_config(stored)
