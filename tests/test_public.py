"""What `import zeco_train` offers: its names and signatures, what it imports, and folders of the same names."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zeco_train
from tests.support.commands import REPOSITORY
from tests.support.waiting import ENOUGH
from zeco_train import functional
from zeco_train.model import Model

PAGE = REPOSITORY / "docs" / "from_python.md"
# A change here is one of the public interface: it needs a line in CHANGELOG.md, and a new minor or major version.
# Signatures of the operators are zeco_train/functional.pyi, which tests/sp/test_functions.py compares.
SIGNATURES = {
    "load": "(path: 'str | os.PathLike[str]', *, device: 'str | torch.device' = 'auto', "
    "dtype: 'str | torch.dtype | None' = None) -> 'Model'",
    "open_store": "(path: 'str | Path') -> 'TokenStore'",
    "Model.encode": "(self, text: 'str') -> 'Tensor'",
    "Model.decode": "(self, ids: 'Tensor | Sequence[int]') -> 'str'",
    "Model.logits": "(self, ids: 'Ids', *, documents: 'Documents' = None) -> 'Tensor'",
    "Model.loss": "(self, text_or_ids: 'str | Ids', *, documents: 'Documents' = None) -> 'float'",
    "Model.generate": "(self, prompts: 'str | Sequence[str]', *, max_tokens: 'int' = 256, samples: 'int' = 1, "
    "temperature: 'float' = 1.0, top_k: 'int' = 0, top_p: 'float' = 1.0, seed: 'int' = 0, "
    "stop: 'str | Sequence[str]' = (), at_eos: 'bool' = True) -> 'list[Completion]'",
    "Completion": "(prompt: 'int', sample: 'int', text: 'str', tokens: 'list[int]', ended_by: 'str') -> None",
    "functional.connect": "(group: 'ProcessGroup | None' = None, *, backend: 'str' = 'zeco', "
    "timeout: 'timedelta' = datetime.timedelta(seconds=300)) -> 'Ranks'",
}
NAMES = ["Completion", "Model", "ZecoError", "__version__", "functional", "load", "open_store"]
FUNCTIONS = ["Ranks", "connect", "gla", "scalar_decay", "fixed_decay", "short_conv", "unmasked", "delta", "gated_delta"]
FUNCTIONS += ["kda", "hgrn", "gsa", "mamba1", "softmax_attention"]
STORE = ["path", "meta", "doc_offsets", "num_tokens", "vocab_size", "read", "close"]


def test_public_names_and_signatures_are_those_of_the_list() -> None:
    assert (zeco_train.__all__, functional.__all__) == (NAMES, FUNCTIONS)
    found = {name for name, member in vars(Model).items() if inspect.isfunction(member) and name[0] != "_"}
    assert found == {name.removeprefix("Model.") for name in SIGNATURES if name.startswith("Model.")}
    for name, signature in SIGNATURES.items():
        member: Any = zeco_train
        for part in name.split("."):
            member = getattr(member, part)
        assert (name, str(inspect.signature(member))) == (name, signature)
        assert inspect.getdoc(member), name
    assert all(name in dir(zeco_train) for name in NAMES)


def test_page_lists_every_public_name() -> None:
    section = PAGE.read_text().partition("## What is public")[2].partition("\n## ")[0]
    listed = {*re.findall(r"`([\w.]+)`", section)}
    attributes = ["path", "step", "device", "dtype", "vocab_size", "module"]
    wanted = {*NAMES, *(f"functional.{name}" for name in FUNCTIONS), *(f"store.{name}" for name in STORE)}
    assert listed >= {*wanted, *(f"model.{name}" for name in attributes)}
    assert listed >= {f"model.{name.removeprefix('Model.')}" for name in SIGNATURES if name.startswith("Model.")}


def test_unknown_names_are_refused_by_those_that_there_are() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'laod'; it has Completion, .* load, open_store$"):
        _ = zeco_train.laod


def run(code: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Code in a fresh interpreter, in a folder of a user."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=ENOUGH)


IMPORT = """
import sys, time
before, started = {*sys.modules}, time.process_time()
import zeco_train
seconds = time.process_time() - started
heavy = {name.partition(".")[0] for name in {*sys.modules} - before} - {*sys.stdlib_module_names, "zeco_train"}
assert not heavy and seconds <= 1, (heavy, seconds)
assert zeco_train.__version__ and zeco_train.ZecoError
assert "torch" not in sys.modules
"""


def test_import_takes_no_time_and_imports_nothing_heavy(tmp_path: Path) -> None:
    done = run(IMPORT, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


USE = """
import zeco_train
try:
    zeco_train.open_store("none")
except zeco_train.ZecoError as error:
    print(error)
"""


@pytest.mark.few(4, quick=2)
@pytest.mark.parametrize("name", ["data/__init__.py", "models/__init__.py", "data.py", "models.py"])
@pytest.mark.parametrize("imported", [False, True])
def test_module_of_the_user_is_named_that_is_in_the_way(name: str, imported: bool, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("of_the_user = 1\n")
    package = name.partition("/")[0].removesuffix(".py")
    # Theirs stays theirs.
    code = (f"import {package}\n" if imported else "") + USE + f"import {package}; print({package}.of_the_user)"
    done = run(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    line, theirs, _ = done.stdout.split("\n")
    assert line.startswith(f"package={package}: {tmp_path / name} is in the way of this project's package {package}; ")
    assert theirs == "1"


# As an editable install's: it comes after the folders of sys.path, in which namespace packages are found.
LATE = f"""
import sys, importlib.util
from importlib.machinery import PathFinder
from pathlib import Path
class Late:
    @staticmethod
    def find_spec(name, path=None, target=None):
        file = Path({str(REPOSITORY)!r}, name, "__init__.py")
        if path is None and file.is_file():
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(file.parent)])
sys.meta_path.insert(sys.meta_path.index(PathFinder) + 1, Late)
"""


@pytest.mark.parametrize("start", ["", LATE])
def test_folders_without_code_are_not_in_the_way(start: str, tmp_path: Path) -> None:
    for name in ("data", "models"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file.txt").touch()
    keep = "import sys; before = [*sys.path]\n" + USE + "assert sys.path == before"
    done = run(start + keep, tmp_path, **({"PYTHONPATH": ""} if start else {}))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("none: no such token store; ")


def test_imported_folder_of_the_user_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    done = run(LATE + "import data\n" + USE, tmp_path, PYTHONPATH="")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"package=data: {tmp_path / 'data'} is in the way")


FUNCTIONAL = """
import sys
from zeco_train import functional
import data, models
assert (data.of_the_user, models.of_the_user) == (1, 1)
import torch
o, _ = functional.gla(*(torch.zeros(1, 3, 1, 2) for _ in range(4)))
print(o.shape)
"""


@pytest.mark.slow
def test_functional_works_beside_packages_of_the_user(tmp_path: Path) -> None:
    for name in ("data", "models"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("of_the_user = 1\n")
    done = run(FUNCTIONAL, tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "torch.Size([1, 3, 1, 2])\n")
