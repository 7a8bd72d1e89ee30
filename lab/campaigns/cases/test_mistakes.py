"""More mistakes in a configuration, of kinds that the gate has one of."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.config import test_mistakes as gate
from zeco_train.config import composing
from zeco_train.config.schema import load_config
from zeco_train.errors import ConfigError

pytestmark = pytest.mark.campaign


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train={stepz:3}", ["train.stepz=3: unknown key", "did you mean train.steps?"]),
        ("sp=nonsense", ["sp=nonsense: must be one of dp, lasp1, lasp2, zeco"]),
        ("+sp=zeco", ["write sp=zeco"]),
        ("train=3", ["train=3: is a section; set its keys, such as train.steps"]),
        ("logger.tags=[a(]", ["logger.tags=[a(]: must be a list [text, …]; text with special characters needs quotes"]),
        ("train.steps=1,2", ["train.steps=1,2: takes one value"]),
        ("train.steps=99999999999999999999", ["must fit into 64 bits"]),
        ("logger.tags=fast", ["logger.tags=fast: must be a list [text, …]"]),
        ("data.stores=[{pth:a}]", ["data.stores.0.pth=a: unknown key; allowed: path, weight, name, "]),
        ("seed=-1", ["seed=-1: must be ≥ 0"]),
        ("train.steps=10000000000", ["train.steps=10000000000: must be ≤ 1000000000"]),
        ("parallel.timeout_seconds=0", ["parallel.timeout_seconds=0.0: must be "]),
        ("data=tokens", ["data.path=", "needs the folder of a token store"]),
        ("train.compile=always", ["train.compile=always: needs a C++ compiler on CPUs, and no-compiler is not there"]),
        ("kind=wsd", ["did you mean data.kind or sched.kind or logger.kind?"]),
        ("qwertz=1", ["qwertz=1: unknown key", "--help"]),
        ("model=[gla_tiny]", ["model=[gla_tiny]: must be one of based_1b, "]),
        ("experiment=quickstart", ["write +experiment=quickstart"]),
        ("sp@model=dp", ["argument=sp@model=dp: ", "write sp=dp"]),
        ("train.steps", ["argument=train.steps: must be KEY=VALUE"]),
        ("train.steps=[1", ["train.steps=[1: must be a whole number"]),
        ("~train.steps", ["argument=~train.steps: nothing can be deleted"]),
        ("name=${nope}", ["name=${nope}: ", "'nope' not found"]),
        ("train.dtype=fp8", ["train.dtype=fp8: must be one of bf16, fp32, fp64"]),
        ("optim.betas=[0.9]", ["optim.betas=[0.9]: must be a list [a number, a number]"]),
        ("data.reset_state_at_document=maybe", ["data.reset_state_at_document=maybe: must be true or false"]),
        ("data.stores=[{path:a},{weight:much}]", ["data.stores.1.weight=much: must be a number"]),
        (
            "data.stores.0.weight=3",
            ["data.stores.0.weight=3: does not fit what it changes, as a number beyond the end of a list"],
        ),
        ("train.steps=0", ["train.steps=0: must be ≥ 1"]),
        ("train.segments=128", ["data.seq_len=64: must be ≥ 128: ", "sp.size × train.segments = 1 × 128 = 128"]),
        ("optim.lr=1e31", ["optim.lr=1e+31: must be > 0 and ≤ 1e30"]),
        ("sp.size=0", ["sp.size=0: must be ≥ 1, or -1"]),
        ("model.num_heads=3", ["model.num_heads=3: must divide", "nearest: 2"]),
        ("data.micro_batch=0", ["data.micro_batch=0: must be positive"]),
        ("data.validation_fraction=2", ["data.validation_fraction=2.0: allowed: 0 (none) to 0.5"]),
        ("data=mixture", ["data.stores=[]: data=mixture needs token stores, as in 'data.stores=[{path:STORE,"]),
        ("data.path=/tmp", ["data.path=/tmp: ", "data=embedded takes none"]),
        ("train.device=cuda", ["train.device=cuda: 1 ranks on this machine, 0 CUDA devices"]),
    ],
)
def test_invalid_override_prints_one_error_line(
    override: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.test_invalid_override_prints_one_error_line(override, parts, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("stores", "expected"),
    [
        ("[{path:a,weight:nan}]", "data.stores.0.weight=nan: must be finite"),
        ("[{path:a},{path:b/a}]", "data.stores.1.name=a: store 0 has it, too; give each a name of its own"),
        ("[{path:a,min_document_tokens:-1}]", "data.stores.0.min_document_tokens=-1: must be ≥ 0"),
    ],
)
def test_invalid_mixture_stores_are_refused(stores: str, expected: str) -> None:
    gate.test_invalid_mixture_stores_are_refused(stores, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
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


@pytest.mark.parametrize(
    ("world_size", "overrides", "parts"),
    [
        (2, ["sp=dp", "sp.size=2"], ["sp.size=2: sp=dp ", "needs 1"]),
        (2, ["train.profile='1:2'", "train.profile_ranks=[0,2]"], ["train.profile_ranks=[0, 2]: rank 2 must be < 2"]),
        (4, ["sp=dp", "data.global_batch=6"], ["data.global_batch=6: must be a multiple of", "legal values: 4, 8"]),
    ],
)
def test_invalid_split_is_refused_on_every_rank(world_size: int, overrides: list[str], parts: list[str]) -> None:
    gate.test_invalid_split_is_refused_on_every_rank(world_size, overrides, parts)
