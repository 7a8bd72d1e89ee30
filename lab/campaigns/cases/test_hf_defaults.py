"""Keys that a config.json leaves out have the defaults of the library's class."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from models.formats.format import ModelFormat
from models.spec import ModelSpec
from tests.hf.test_config_json import FORMATS, HERE, NEEDED, class_of
from zeco_train.hf.config_json import StoredModel, from_config_json

pytestmark = pytest.mark.campaign


# Keys of files; all others are missing, and have the defaults of the library's class.
FILES: dict[str, list[dict[str, Any]]] = {
    "gla": [{}, {"hidden_size": 1024, "expand_k": 1.0}, {"hidden_ratio": 3}, {"hidden_ratio": None}],
    "retnet": [{}, {"hidden_size": 768}, {"hidden_ratio": 3}, {"hidden_ratio": None}, {"intermediate_size": 300}],
    "hgrn": [{}, {"hidden_size": 512, "expand_ratio": 2}, {"hidden_ratio": None}],
    "hgrn2": [
        {},
        {"hidden_size": 1024},
        {"hidden_size": 1024, "num_heads": 8},
        {"expand_ratio": 64},
        {"expand_ratio": None, "num_heads": 8},
        {"hidden_size": 256, "expand_ratio": 64, "num_heads": 4, "hidden_ratio": None},
    ],
    "gsa": [{}, {"hidden_size": 512, "num_slots": None}, {"num_heads": 8, "num_kv_heads": 2, "hidden_ratio": None}],
    "linear_attn": [{}, {"hidden_size": 512, "expand_v": 2.0}, {"num_heads": 8, "hidden_ratio": 2}],
    "gated_deltanet": [{}, {"num_v_heads": 12, "head_dim": 64}, {"use_gate": False, "hidden_ratio": None}],
    "delta_net": [{}, {"hidden_size": 512, "expand_v": 2.0}, {"num_heads": 8, "use_gate": True}],
    "kda": [{}, {"num_v_heads": 32, "expand_v": 0.5}, {"allow_neg_eigval": True, "intermediate_size": 300}],
    "mamba2": [{}, {"hidden_size": 256, "head_dim": 32, "num_heads": 16, "n_groups": 2}, {"conv_kernel": 3}],
}


# Null in their configuration, which the shapes of parameters show, or without a meaning for the model.
LEFT_OUT = {"intermediate_size", "hidden_ratio", "expand_ratio", "num_slots", "max_position_embeddings", "attn_mode"}
LEFT_OUT |= {"dt_limit"}


CASES = [(name, keys) for name, files in FILES.items() for keys in files]


def shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def check_equal(found: StoredModel, form: ModelFormat, theirs: Any) -> None:
    """The same parameters and the same numbers as their model has."""
    with torch.device("meta"):
        ours, model = ModelSpec(found.model).build(), class_of(form, "ForCausalLM")(theirs)
    names = {own: one.theirs[0] for one in found.tensors() for own in one.ours}
    assert {names[name]: shape for name, shape in shapes(ours).items()} == shapes(model)
    record: Mapping[str, Any] = form.write(found.model, 128)
    for key in (record.keys() & theirs.to_dict().keys()) - LEFT_OUT - {"time_step_limit"}:
        assert getattr(theirs, key) == record[key], key
    if form.model_type == "mamba2":
        assert tuple(theirs.time_step_limit) == found.model.time_step_limit


def test_every_format_has_files() -> None:
    """But for those whose keys have no default."""
    assert FILES.keys() == {name for name, one in FORMATS.items() if one.softmax_names is None}


@pytest.mark.parametrize(("name", "keys"), CASES)
def test_missing_keys_have_the_defaults_of_the_library(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """Also in files of `save_pretrained`, which leaves out keys that have the default of the class."""
    form, given = FORMATS[name], {"num_hidden_layers": 2, **NEEDED.get(name, {}), **keys}
    theirs = class_of(form, "Config")(**given)
    found = from_config_json({"model_type": form.model_type, **given}, HERE)
    check_equal(found, form, theirs)
    theirs.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    assert from_config_json({**record, "architectures": [form.architecture]}, HERE) == found
