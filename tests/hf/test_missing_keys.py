"""A config.json without some keys is read as the library's configuration class reads it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from models.formats.format import ModelFormat
from models.formats.format_registry import FORMATS as ALL_FORMATS
from models.spec import ModelSpec
from zeco_train.errors import ConfigError
from zeco_train.hf.config_json import StoredModel, from_config_json

HERE = Path("model")
# Others need keys that have no default.
FORMATS = {one.model_type: one for one in ALL_FORMATS if one.softmax_names is None}
# What each format needs besides its type: we do not support the default feature map of fla's linear attention.
NEEDED: dict[str, dict[str, Any]] = {"linear_attn": {"feature_map": "elu"}}
# Keys of files; all others are missing.
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
    "linear_attn": [{}, {"hidden_size": 512, "expand_v": 2.0}, {"num_heads": 8, "hidden_ratio": 2}],
    "gated_deltanet": [{}, {"num_v_heads": 12, "head_dim": 64}, {"use_gate": False, "hidden_ratio": None}],
    "delta_net": [{}, {"hidden_size": 512, "expand_v": 2.0}, {"num_heads": 8, "use_gate": True}],
    "kda": [{}, {"num_v_heads": 32, "expand_v": 0.5}, {"allow_neg_eigval": True, "intermediate_size": 300}],
    "mamba2": [{}, {"hidden_size": 256, "head_dim": 32, "num_heads": 16, "n_groups": 2}, {"conv_kernel": 3}],
}
# Null in their configuration, which the shapes of parameters show, or without a meaning for the model.
LEFT_OUT = {"intermediate_size", "hidden_ratio", "expand_ratio", "max_position_embeddings", "attn_mode", "dt_limit"}
CASES = [(name, keys) for name, files in FILES.items() for keys in files]


def config_of(fla: ModelFormat, keys: Mapping[str, Any]) -> Any:
    package = importlib.import_module("transformers" if fla.library == "transformers" else "fla.models")
    return getattr(package, fla.architecture.replace("ForCausalLM", "Config"))(**keys)


def shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def check_equal(found: StoredModel, fla: ModelFormat, theirs: Any) -> None:
    """The same parameters and the same numbers as their model has."""
    package = importlib.import_module("transformers" if fla.library == "transformers" else "fla.models")
    with torch.device("meta"):
        ours, model = ModelSpec(found.model).build(), getattr(package, fla.architecture)(theirs)
    names = {own: one.theirs[0] for one in found.tensors() for own in one.ours}
    assert {names[name]: shape for name, shape in shapes(ours).items()} == shapes(model)
    written = fla.write(found.model, 128)
    for key in (written.keys() & theirs.to_dict().keys()) - LEFT_OUT - {"time_step_limit"}:
        assert getattr(theirs, key) == written[key], key
    if fla.model_type == "mamba2":
        assert tuple(theirs.time_step_limit) == found.model.time_step_limit


def test_every_format_has_files() -> None:
    assert FILES.keys() == FORMATS.keys()


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "keys"), CASES)
def test_missing_keys_have_the_defaults_of_the_library(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """Also in files of `save_pretrained`, which leaves out keys that have the default of the class."""
    fla, given = FORMATS[name], {"num_hidden_layers": 2, **NEEDED.get(name, {}), **keys}
    theirs = config_of(fla, given)
    found = from_config_json({"model_type": fla.model_type, **given}, HERE)
    check_equal(found, fla, theirs)
    theirs.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    assert from_config_json({**record, "architectures": [fla.architecture]}, HERE) == found


@pytest.mark.parametrize(
    "keys",
    [
        *({"expand_ratio": ratio} for ratio in (None, 0, -128, 4096)),
        {"expand_ratio": 0, "num_heads": 8},
        {"hidden_size": 96, "expand_ratio": 40},
        {"hidden_size": 96, "num_heads": 8},
    ],
)
def test_heads_of_hgrn2_that_no_key_determines_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        from_config_json({"model_type": "hgrn2", **keys}, HERE)
    # The default of the ratio holds.
    assert f"expand_ratio={keys.get('expand_ratio', 128)}" in str(caught.value)
