"""The command for a folder of Hugging Face, and pytest's option: both compare a model over ranks of their own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.attach_models import save
from tests.support.commands import REPOSITORY
from tests.support.distributed import run_distributed
from zeco_train.attach import AttachError, proof
from zeco_train.attach.__main__ import build, main

# Without torch or this project's parts; by the entry point where the project is installed with it.
OPTION = """
import sys
from importlib.metadata import entry_points
import pytest
known = {point.value for point in entry_points(group="pytest11")}
own = [] if "zeco_train.pytest_plugin" in known else ["-p", "zeco_train.pytest_plugin"]
sys.argv = ["pytest", "-q", *own, "-p", "no:cacheprovider", *sys.argv[1:]]
code = pytest.main(sys.argv[1:])
if "--zeco-verify" not in sys.argv:
    assert not {"torch", "zeco_train.attach", "zeco_train.errors"} & sys.modules.keys()
sys.exit(code)
"""
OWN_TEST = """
import pytest

def make():
    import transformers
    import torch
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2))

def broken():
    model = make()
    model.model.rotary_emb.register_forward_hook(lambda module, args, out: (out[0].roll(1, 1), out[1]))
    return model

def test_mine(zeco_verify):
    zeco_verify(make, tokens=33)
    with pytest.raises(pytest.fail.Exception, match="first wrong output: model.rotary_emb"):
        zeco_verify(broken, tokens=33, documents=[False])
"""


@pytest.mark.processes
def test_option_of_pytest_imports_nothing_unless_given_and_then_compares(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(OWN_TEST)
    # A project may have packages of these names.
    for name in ("models", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not this one')\n")
    for options, result in (([], "1 skipped"), (["--zeco-verify"], "1 passed")):
        command = [sys.executable, "-c", OPTION, *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert result in done.stdout


def test_option_is_known_to_an_installed_pytest() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    assert re.search(r'\[project.entry-points.pytest11\]\nzeco = "zeco_train\.pytest_plugin"', text)


def collected(rank: int, size: int, work: Callable[..., None], timeout: Any) -> list[Any]:
    found: list[Any] = []
    work(rank, size, timeout, found.append)
    return found


@pytest.fixture
def on_forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a command are forked from the tests' process with imports, which saves each of them 4 s."""

    def rows(work: Any, size: int, count: int, timeout: Any, imports: Any) -> Iterator[Any]:
        yield from run_distributed(collected, size, work, timeout)[0]

    monkeypatch.setattr(proof, "rows_of_own_ranks", rows)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    changes: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    run_distributed(save, 1, "qwen3_next", changes, str(folder))
    return folder


@pytest.fixture(autouse=True)
def _hidden_packages_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command hides fla from transformers in its process, which is this one here."""
    monkeypatch.setitem(sys.modules, "fla", None)


@pytest.fixture
def folder(stored: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stored, tmp_path / "model")


@pytest.mark.numeric
@pytest.mark.usefixtures("on_forked_ranks")
def test_command_shows_a_table_of_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder), "tokens=70", "ranks=3", "dtype=bf16"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Qwen3NextForCausalLM with its weights, 3 ranks, 70 tokens\n\nwhole sequences\nlayer")
    assert out.count("Qwen3NextGatedDeltaNet") == out.count("Qwen3NextAttention") == 2
    assert out.endswith("\nexact\n")
    assert not err
    (folder / "model.safetensors").unlink()
    assert main(["verify", str(folder), "tokens=70", "documents=true"]) == 0
    assert capsys.readouterr().out.startswith("Qwen3NextForCausalLM with random weights, 2 ranks")


def wrong(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model_type": "none"}, "has no model for it"),
        ({"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}, "model_type": "own"}, "no model"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 of config.json: more than 10,000"),
        ({"vocab_size": 1 << 40}, " of 2: RuntimeError: "),
        ({"hidden_size": "x"}, "has no model for it"),
    ],
)
def test_a_strangers_folder_is_data(
    changes: dict[str, Any], line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "own.py").write_text("raise SystemExit('ran')\n")
    wrong(folder, **changes)
    assert main(["verify", str(folder)]) == AttachError.exit_code
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert line in err


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"moe_intermediate_size": 24},
            r"experts\.down_proj has the shape \[6, 32, 16\], config\.json asks for \[6, 32, 24\]",
        ),
        ({"num_hidden_layers": 1, "layer_types": ["linear_attention"]}, r"has model\.layers\.1.* does not describe"),
        ({"attention_bias": True}, r"layers\.1\.self_attn\.k_proj\.bias is missing, which config\.json asks for"),
    ],
)
def test_weights_are_those_of_the_configuration(changes: dict[str, Any], problem: str, folder: Path) -> None:
    wrong(folder, **changes)
    with pytest.raises(AttachError, match=problem):
        build(folder, "fp32", 0, has_weights=True)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["prove"], "command=prove"),
        (["verify"], "must be a folder"),
        (["verify", "ranks=2"], "FOLDER=ranks=2"),
        (["verify", "none", "ranks=0"], "ranks=0"),
        (["verify", "none", "tokens=3"], "tokens=3"),
        (["verify", "none", "dtype=fp8"], "dtype=fp8"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert line in capsys.readouterr().err
