"""Every configuration error gives one line that names it, an exit code ≠ 0 and no run folder."""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path

import pytest

from tests.support.commands import SMALL, check_line, train_here
from zeco_train.config import composing
from zeco_train.config.schema import group_options, load_config
from zeco_train.errors import (
    CheckpointError,
    CommunicationError,
    ConfigError,
    DataError,
    NonFiniteError,
    OutOfMemoryError,
    ZecoError,
)
from zeco_train.lifecycle.join import Launch
from zeco_train.training.checks import join_ranks

CONFIG = ConfigError.exit_code


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        # Unknown keys, groups and options.
        ("train.step=3", ["train.step=3: unknown key", "did you mean train.steps?"]),
        ("steps=3", ["steps=3: unknown key", "did you mean train.steps?"]),
        ("checkpoint.async=true", ["checkpoint.async=true: unknown key; --help lists all"]),
        ("hydra.run.dir=x", ["hydra.run.dir=x: ", "no hydra settings"]),
        ("+experiment=nope", [f"experiment=nope: must be one of {', '.join(group_options()['experiment'])}"]),
        ("+train.steps=4", ["+train.steps=4: the key exists; write train.steps=4"]),
        # Syntax.
        ("", ["must be KEY=VALUE"]),
        ("train..steps=3", ["argument=train..steps=3: must be KEY=VALUE, as in train.steps=100"]),
        ("data.stores=[{path:a(}]", ["data.stores=[{path:a(}]: must be a list ", "; text with special characters"]),
        # Types.
        ("train.steps=1.5", ["train.steps=1.5: must be a whole number"]),
        ("optim.lr=nan", ["optim.lr=nan: must be finite"]),
        ("data.stores=[a]", ["data.stores=[a]: must be a list [{path:…}, …] of sections with path, weight, name, "]),
        ("data.stores=[{path:1e3}]", ["data.stores.0.path=1000.0: is a number; text that looks like one needs quotes"]),
        # Ranges.
        ("name=", ["name=: must not be empty"]),
        ("checkpoint.every=-1", ["checkpoint.every=-1: must be ≥ 0"]),
        ("sp.all_scan.blocks=0", ["sp.all_scan.blocks=0: must be ≥ 1 and ≤ "]),
        # Conflicting settings.
        ("data.stores=[{path:a}]", ["data.stores=a: data=embedded takes none; use data=mixture"]),
    ],
)
def test_invalid_override_prints_one_error_line(override: str, parts: list[str], tmp_path: Path) -> None:
    check_line(train_here(f"run_dir={tmp_path / 'run'}", override), CONFIG, *parts)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("stores", "expected"),
    [
        ("[{path:a},{path:b,weight:0}]", "data.stores.1.weight=0.0: must be > 0; leave out a store"),
        ("[{weight:1}]", "data.stores.0.path=: needs the folder of a token store; prepare one with"),
        ("[{path:a,name:''}]", "data.stores.0.name=: must not be empty"),
    ],
)
def test_invalid_mixture_stores_are_refused(stores: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["data=mixture", f"data.stores={stores}"])
    assert str(caught.value).startswith(expected)


def test_mixture_store_is_overridden_by_index() -> None:
    stores = load_config(["data=mixture", "data.stores=[{path:a},{path:b}]", "data.stores.1.weight=3"]).data.stores
    assert [store.weight for store in stores] == [1.0, 3.0]
    with pytest.raises(ConfigError, match=r"data\.stores\.2\.weight"):
        load_config(["data=mixture", "data.stores=[{path:a},{path:b}]", "data.stores.2.weight=3"])


def test_invalid_experiment_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = shutil.copytree(composing.CONFIG_DIR, tmp_path / "configs")
    (configs / "experiment" / "bad.yaml").write_text("train: {steps: 3\n")
    monkeypatch.setattr(composing, "CONFIG_DIR", configs)
    with pytest.raises(ConfigError) as caught:
        load_config(["+experiment=bad"])
    assert re.search(r"bad\.yaml.*line 2", str(caught.value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("world_size", "overrides", "parts"),
    [
        (4, ["sp.size=3"], ["sp.size=3: must divide the world size 4: 1, 2, 4, or -1"]),
        (4, ["data.seq_len=15", "train.segments=4"], ["data.seq_len=15: must be ≥ 16", "sp.size × train.segments = 4"]),
        (4, ["data.seq_len=2"], ["data.seq_len=2: must be ≥ 4: ", "for each of sp.size=4"]),
    ],
)
def test_invalid_split_is_refused_on_every_rank(world_size: int, overrides: list[str], parts: list[str]) -> None:
    for rank in range(world_size):
        # Raised before any rank waits for another.
        with pytest.raises(ConfigError) as caught:
            join_ranks(load_config([*SMALL, *overrides]), Launch(rank, world_size, rank))
        for part in parts:
            assert part in str(caught.value)


def test_help_prints_usage_and_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (["--help"], ["-h", "sp=lasp2", "data=tokens"]):
        outcome = train_here(*arguments)
        assert (outcome.code, outcome.err) == (0, "")
        assert "usage: torchrun" in outcome.out
        assert "  sp=dp | lasp1 | lasp2 | zeco\n" in outcome.out
        assert "  data.seq_len=64  " in outcome.out
    assert "  sp.backend=lasp2  " in outcome.out
    assert not any(tmp_path.iterdir())


def test_errors_survive_pickling() -> None:
    errors: list[ZecoError] = [
        ConfigError("field", 1, "allowed"),
        DataError("subject", "problem", "remedy"),
        CheckpointError("checkpoint"),
        NonFiniteError("loss"),
        CommunicationError(1, "operation", "problem", peer=2),
        OutOfMemoryError(1, "step 3", "20 MiB"),
    ]
    for error in errors:
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
