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


@pytest.mark.few(34, quick=17)
@pytest.mark.parametrize(
    ("override", "parts"),
    [
        # Unknown keys, groups and options.
        ("train.step=3", ["train.step=3: unknown key", "did you mean train.steps?"]),
        ("steps=3", ["steps=3: unknown key", "did you mean train.steps?"]),
        ("kind=wsd", ["did you mean data.kind or sched.kind or logger.kind?"]),
        ("train={stepz:3}", ["train.stepz=3: unknown key", "did you mean train.steps?"]),
        ("qwertz=1", ["qwertz=1: unknown key", "--help"]),
        ("hydra.run.dir=x", ["hydra.run.dir=x: ", "no hydra settings"]),
        ("sp=nonsense", ["sp=nonsense: must be one of dp, lasp1, lasp2, zeco"]),
        ("model=[gla_tiny]", ["model=[gla_tiny]: must be one of based_1b, "]),
        ("+experiment=nope", [f"experiment=nope: must be one of {', '.join(group_options()['experiment'])}"]),
        ("experiment=quickstart", ["write +experiment=quickstart"]),
        ("+sp=zeco", ["write sp=zeco"]),
        ("+train.steps=4", ["+train.steps=4: the key exists; write train.steps=4"]),
        ("sp@model=dp", ["argument=sp@model=dp: ", "write sp=dp"]),
        ("train=3", ["train=3: is a section; set its keys, such as train.steps"]),
        # Syntax.
        ("train.steps", ["argument=train.steps: must be KEY=VALUE"]),
        ("", ["must be KEY=VALUE"]),
        ("train.steps=[1", ["train.steps=[1: must be a whole number"]),
        ("logger.tags=[a(]", ["logger.tags=[a(]: must be a list [text, …]; text with special characters needs quotes"]),
        (
            "data.stores=[{path:a(}]",
            ["data.stores=[{path:a(}]: must be a list ", "; text with special characters needs"],
        ),
        ("~train.steps", ["argument=~train.steps: nothing can be deleted"]),
        ("train.steps=1,2", ["train.steps=1,2: takes one value"]),
        ("name=${nope}", ["name=${nope}: ", "'nope' not found"]),
        # Types.
        ("train.steps=1.5", ["train.steps=1.5: must be a whole number"]),
        ("train.steps=99999999999999999999", ["must fit into 64 bits"]),
        ("train.dtype=fp8", ["train.dtype=fp8: must be one of bf16, fp32, fp64"]),
        ("optim.lr=nan", ["optim.lr=nan: must be finite"]),
        ("optim.betas=[0.9]", ["optim.betas=[0.9]: must be a list [a number, a number]"]),
        ("logger.tags=fast", ["logger.tags=fast: must be a list [text, …]"]),
        ("data.reset_state_at_document=maybe", ["data.reset_state_at_document=maybe: must be true or false"]),
        ("data.stores=[a]", ["data.stores=[a]: must be a list [{path:…}, …] of sections with path, weight, name, "]),
        ("data.stores=[{pth:a}]", ["data.stores.0.pth=a: unknown key; allowed: path, weight, name, "]),
        ("data.stores=[{path:a},{weight:much}]", ["data.stores.1.weight=much: must be a number"]),
        ("data.stores=[{path:1e3}]", ["data.stores.0.path=1000.0: is a number; text that looks like one needs quotes"]),
        (
            "data.stores.0.weight=3",
            ["data.stores.0.weight=3: does not fit what it changes, as a number beyond the end of a list"],
        ),
        # Ranges.
        ("seed=-1", ["seed=-1: must be ≥ 0"]),
        ("name=", ["name=: must not be empty"]),
        ("train.steps=0", ["train.steps=0: must be ≥ 1"]),
        ("train.steps=10000000000", ["train.steps=10000000000: must be ≤ 1000000000"]),
        ("train.segments=128", ["data.seq_len=64: must be ≥ 128: ", "sp.size × train.segments = 1 × 128 = 128"]),
        ("train.profile='4:3'", ["train.profile=4:3: must be START:STOP"]),
        ("checkpoint.every=-1", ["checkpoint.every=-1: must be ≥ 0"]),
        ("optim.lr=1e31", ["optim.lr=1e+31: must be > 0 and ≤ 1e30"]),
        ("parallel.timeout_seconds=0", ["parallel.timeout_seconds=0.0: must be "]),
        ("sp.size=0", ["sp.size=0: must be ≥ 1, or -1"]),
        ("sp.all_scan.blocks=0", ["sp.all_scan.blocks=0: must be ≥ 1 and ≤ "]),
        ("model.num_heads=3", ["model.num_heads=3: must divide", "nearest: 2"]),
        ("model.num_layers=1000000000000", ["model=gla_tiny: ", "this machine has"]),
        ("data.seq_len=0", ["data.seq_len=0: must be positive", "nearest legal value: 1"]),
        ("data.micro_batch=0", ["data.micro_batch=0: must be positive"]),
        ("data.micro_batch=3", ["data.global_batch=4: ", "1 × 3 = 3; nearest legal values: 3, 6"]),
        ("data.validation_fraction=2", ["data.validation_fraction=2.0: allowed: 0 (none) to 0.5"]),
        ("train.profile=2:1001", ["train.profile=2:1001: STOP must be ≤ train.steps=1000"]),
        # Conflicting settings.
        ("data=tokens", ["data.path=", "needs the folder of a token store"]),
        ("data=mixture", ["data.stores=[]: data=mixture needs token stores, as in 'data.stores=[{path:STORE,"]),
        ("data.stores=[{path:a}]", ["data.stores=a: data=embedded takes none; use data=mixture"]),
        ("data.path=/tmp", ["data.path=/tmp: ", "data=embedded takes none"]),
        ("train.compile=always", ["train.compile=always: needs a C++ compiler on CPUs, and no-compiler is not there"]),
        ("train.device=cuda", ["train.device=cuda: 1 ranks on this machine, 0 CUDA devices"]),
    ],
)
def test_invalid_override_prints_one_error_line(
    override: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-compiler")
    if override == "train.device=cuda":
        monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    check_line(train_here(f"run_dir={tmp_path / 'run'}", override), CONFIG, *parts)
    assert not any(tmp_path.iterdir())


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("stores", "expected"),
    [
        (
            "[{path:a},{path:b,weight:0}]",
            "data.stores.1.weight=0.0: must be > 0; leave out a store that nothing is read",
        ),
        ("[{path:a,weight:nan}]", "data.stores.0.weight=nan: must be finite"),
        ("[{weight:1}]", "data.stores.0.path=: needs the folder of a token store; prepare one with"),
        ("[{path:a},{path:b/a}]", "data.stores.1.name=a: store 0 has it, too; give each a name of its own"),
        ("[{path:a,name:''}]", "data.stores.0.name=: must not be empty"),
        ("[{path:a,min_document_tokens:-1}]", "data.stores.0.min_document_tokens=-1: must be ≥ 0"),
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


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: {steps: 3\n", r"bad\.yaml.*line 2"),
        ("# @package _global_\ntrain:\n  stepz: 3\n", r"^experiment=bad: .*/bad\.yaml: train\.stepz: "),
        (
            "# @package _global_\ntrain:\n  steps: many\n",
            r"^experiment=bad: .*/bad\.yaml: train\.steps: ",
        ),
        ("train:\n  steps: 3\n", r"^experiment=bad: .*first line must be: # @package _global_$"),
        ("# @package _global_\ndefaults:\n  - override /sp: nope\n", r"Could not find 'sp/nope'"),
        ("# @package _global_\nname: ${nope}\n", r"'nope' not found"),
    ],
)
def test_invalid_experiment_file_is_reported(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = shutil.copytree(composing.CONFIG_DIR, tmp_path / "configs")
    (configs / "experiment" / "bad.yaml").write_text(text)
    monkeypatch.setattr(composing, "CONFIG_DIR", configs)
    with pytest.raises(ConfigError) as caught:
        load_config(["+experiment=bad"])
    assert re.search(expected, str(caught.value))
    assert "\n" not in str(caught.value)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("world_size", "overrides", "parts"),
    [
        (4, ["sp.size=3"], ["sp.size=3: must divide the world size 4: 1, 2, 4, or -1"]),
        (2, ["sp=dp", "sp.size=2"], ["sp.size=2: sp=dp ", "needs 1"]),
        (4, ["data.seq_len=15", "train.segments=4"], ["data.seq_len=15: must be ≥ 16", "sp.size × train.segments = 4"]),
        (2, ["train.profile='1:2'", "train.profile_ranks=[0,2]"], ["train.profile_ranks=[0, 2]: rank 2 must be < 2"]),
        (4, ["data.seq_len=2"], ["data.seq_len=2: must be ≥ 4: ", "for each of sp.size=4"]),
        (4, ["sp=dp", "data.global_batch=6"], ["data.global_batch=6: must be a multiple of", "legal values: 4, 8"]),
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
