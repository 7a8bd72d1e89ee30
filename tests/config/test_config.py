"""Every YAML file composes, and its values reach the config."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from data.sources.hugging_face import recipe_names
from models.mixer_registry import MIXERS
from tests.support.unmasked import UnmaskedMixer
from zeco_train.config import composing
from zeco_train.config.composing import CONFIG_DIR
from zeco_train.config.overrides import REMOVED
from zeco_train.config.schema import group_options, load_config, to_plain
from zeco_train.errors import ConfigError
from zeco_train.sp.backend_registry import Backend, SPConfig
from zeco_train.system.stored_values import flatten

OPTIONS = [(group, option) for group, options in group_options().items() for option in options]


@pytest.mark.few(5, quick=3)
@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes(group: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {
        "data=tokens": ["data.path=store"],
        "data=mixture": ["data.stores=[{path:store}]"],
        "task=mlm": ["model.causal=false"],
    }
    if f"{group}={option}" == "task=mlm":
        monkeypatch.setitem(MIXERS, "gla", UnmaskedMixer)
    prefix = "+" if group == "experiment" else ""
    config = to_plain(load_config([f"{prefix}{group}={option}", *needs.get(f"{group}={option}", [])]))
    if group == "experiment":
        assert config["name"] == option
        return
    if group == "sp":  # a registered backend has no file
        assert config["sp"] == to_plain(SPConfig(Backend[option]))
        return
    # Every value of the file reaches the config.
    written = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / group / f"{option}.yaml"))
    arrived = dict(flatten(config[group], lists=False))
    for key, value in flatten(written, lists=False):
        assert arrived[key] == value or key in ("path", "stores"), (key, arrived[key], value)


def test_all_yaml_files_are_options() -> None:
    found = {path.relative_to(CONFIG_DIR) for path in CONFIG_DIR.rglob("*.yaml")}
    # Recipes are read by `data.prepare` and are not a config group of a run.
    found -= {Path("recipes", f"{name}.yaml") for name in recipe_names()}
    files = {Path(group, f"{option}.yaml") for group, option in OPTIONS if group != "sp"}
    assert found == {Path("train.yaml"), *files}


def test_command_line_overrides_set_config_fields() -> None:
    keys: dict[str, Any] = {"name": "n", "seed": 3, "sp.size": 2, "parallel.strategy": "hsdp", "checkpoint.every": 9}
    keys |= {"data.path": "p", "data.seq_len": 128, "data.global_batch": 6, "data.micro_batch": 2}
    keys |= {"train.steps": 7, "train.dtype": "bf16", "train.log_every": 2, "train.segments": 1}
    groups = ["sp=lasp2", "logger=wandb", "data=tokens", "model=gla_1b"]
    found = dict(flatten(to_plain(load_config([*groups, *(f"{key}={value}" for key, value in keys.items())]))))
    of_groups = {"sp.backend": "lasp2", "logger.kind": "wandb", "logger.mode": "offline", "data.kind": "tokens"}
    of_groups |= {"model.name": "gla_1b", "model.hidden_size": 2048, "run_dir": "runs/n"}
    assert found | keys | of_groups == found


def test_text_that_looks_like_a_number_arrives_as_written() -> None:
    config = load_config(["name=1234e5", "checkpoint.load=007", "logger=wandb", "logger.tags=[a,'2']"])
    assert (config.name, config.checkpoint.load, config.logger.tags) == ("1234e5", "007", ["a", "2"])


def test_removed_keys_tell_what_replaces_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "train.warm=3: went in 0.3; set sched.warmup_steps"
    monkeypatch.setitem(REMOVED, "train.warm", line.partition(": ")[2])
    with pytest.raises(ConfigError) as caught:
        load_config(["train.warm=3"])
    assert str(caught.value) == line
    configs = shutil.copytree(CONFIG_DIR, tmp_path / "configs")
    (configs / "experiment" / "old.yaml").write_text("# @package _global_\ntrain:\n  warm: 3\n")
    monkeypatch.setattr(composing, "CONFIG_DIR", configs)
    with pytest.raises(ConfigError) as caught:
        load_config(["+experiment=old"])
    assert caught.value.field == "experiment"
    assert str(caught.value).endswith(f"train.warm: {REMOVED['train.warm']}")


def test_identity_does_not_depend_on_the_split() -> None:
    base = load_config([]).identity()
    fixed = {"seed", "train.dtype", "train.matmul", "optim.name", "task.name", "data.seq_len", "data.global_batch"}
    fixed |= {f"data.{key}" for key in ("shuffle", "reset_state_at_document", "labels_across_documents")}
    assert {key for key in base if not key.startswith("model.")} == fixed
    may_change = ["sp=lasp1", "sp.size=1", "parallel=zero3", "train.steps=5", "train.log_every=3", "checkpoint.every=1"]
    how = ["train.segments=4", "train.recompute=full", "train.compile=always", "train.profile='1:2'"]
    assert load_config([*may_change, *how, "logger=wandb", "data.micro_batch=2", "name=x"]).identity() == base
    data = ("data.seq_len=64", "data.global_batch=4", "data.shuffle=documents")
    for change in ("seed=1", "train.dtype=fp64", "model.num_layers=2", *data):
        assert load_config([change]).identity() != base, change


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data=tokens", "data.path=x", "data.validation_fraction=0.1"], "it needs data=embedded"),
        (
            ["data=tokens", "data.path=x", "data.cache_dir=y"],
            "it needs data=embedded, data.shuffle=documents or data.min_document_tokens",
        ),
        (["sp.backend=dp", "sp.all_scan.blocks=2"], "it needs sp=zeco"),
        (["sched.decay_fraction=0.1"], "it needs sched=wsd"),
    ],
)
def test_settings_without_effect_are_refused(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    assert str(caught.value).endswith(f": would be ignored; {expected}")
    given = overrides[-1].partition("=")[0]
    assert caught.value.field == ("sp.all_scan.blocks" if given == "sp" else given)


def test_settings_with_effect_are_accepted() -> None:
    for overrides in (
        ["data.validation_fraction=0.1", "data.cache_dir=y"],
        ["sp.all_scan.algorithm=chain", "sp.all_scan.blocks=2"],
        ["sched=wsd", "sched.decay_fraction=0.1", "sched.min_ratio=0.1"],
        ["logger=wandb", "logger.mode=online", "logger.tags=[a]"],
        # Set by a file, not by the user.
        ["sp=zeco", "sp.backend=lasp2"],
    ):
        load_config(overrides)
