"""More mistakes about mixers, and more ways to choose one."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.mixers.gla import GLAConfig
from tests.config import test_mixer_choice as gate
from tests.config.test_mixer_choice import NAMES, ToyConfig, _model, configs, toys
from zeco_train.config.schema import load_config

# Fixtures.
__all__ = ["configs", "toys"]
pytestmark = pytest.mark.campaign


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model={mixer:lstm}"], f"model.mixer=lstm: must be one of {NAMES}"),
        (["model.mixer=null"], f"model.mixer=null: must be one of {NAMES}"),
        (["+model.mixer=toy"], "+model.mixer=toy: the key exists; write model.mixer=toy"),
        (["model.mixer=toy", "model=gla_125m"], "no configs/model/toy_125m.yaml; sizes of toy: 1b, tiny, wide"),
        (["model=gla_340m", "model.mixer=toy"], "configs/model/toy_340m.yaml is of gla; it needs a line mixer: toy"),
        (["model.mixer=toy", "model.expand_k=1"], "model.expand_k=1: unknown key of mixer toy; "),
        (["model.slots=1"], "model.slots=1: unknown key of mixer gla; "),
        (["model.mixer=toy", "model.slots=many"], "model.slots=many: must be a whole number or null"),
    ],
)
def test_mistakes_name_field_value_and_allowed(overrides: list[str], line: str, toys: Path) -> None:
    gate.test_mistakes_name_field_value_and_allowed(overrides, line, toys)


def test_mixer_takes_its_file_of_the_chosen_size(toys: Path) -> None:
    tiny = load_config(["model.mixer=toy"]).model
    assert tiny == ToyConfig(key_width=1.0)
    assert _model("model.mixer=toy", "model=gla_1b") == (ToyConfig, "toy", "toy_1b")
    assert _model("model=toy_1b", "model.mixer=toy") == (ToyConfig, "toy", "toy_1b")
    assert _model("model=toy_box_tiny", "model.mixer=toy") == (ToyConfig, "toy", "toy_tiny")
    assert load_config(["model={mixer:toy,key_width:0.25}"]).model == ToyConfig(key_width=0.25)
    assert _model("model.mixer=toy", "model.mixer=gla") == (GLAConfig, "gla", "gla_tiny")
    wide = load_config(["model=toy_wide", "model.mixer=toy"]).model
    assert (wide.name, wide.hidden_size) == ("toy_wide", 256)
