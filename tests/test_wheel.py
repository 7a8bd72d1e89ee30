"""An installed wheel outside the checkout: all commands and configurations, beside user folders of the same names."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY
from zeco_train.__main__ import COMMANDS, describe

pytestmark = pytest.mark.processes
TINY = ["model.num_layers=1", "model.hidden_size=32", "data.seq_len=64", "train.eval_sequences=0", "train.steps=2"]
# Two commands in one process: the imports of each take seconds.
COMMANDS_OF_A_RUN = """
import sys
from zeco_train.__main__ import main
for sys.argv[1:] in (["generate", "runs/default", "--prompt=a", "--max-tokens=3"], ["export", "runs/default", "out"]):
    try:
        main()
    except SystemExit as end:
        assert end.code == 0, sys.argv
"""
FROM_PYTHON = """
import sys, torch, zeco_train
for path in sys.argv[1:]:
    model = zeco_train.load(path)
    assert model.loss("some text") > 0
    print(len(model.generate("a", max_tokens=3)[0].tokens))
zeco_train.functional.gla(*(torch.zeros(1, 3, 1, 2) for _ in range(4)))
"""


def _run(
    folder: Path, site: Path, *arguments: str, command: str | Path = sys.executable
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    return subprocess.run([command, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tracked files, installed without its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for name in filter(None, tracked.stdout.split("\0")):
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "source" / name).write_bytes((REPOSITORY / name).read_bytes())
    command = ["-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(folder / "source")]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("zeco_train-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.startswith(("tests", "lab", "launch", "docs"))]
        assert {"zeco_train/functional.pyi", "zeco_train/py.typed"} <= {*archive.namelist()}
    command = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile", "--target"]
    done = subprocess.run([sys.executable, *command, str(folder / "site"), str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's folder with packages of the same names, which fail at import."""
    for name in ("models", "data", "configs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not this one')\n")
    return tmp_path


@pytest.mark.slow
def test_wheel_trains_generates_and_exports(site: Path, home: Path) -> None:
    done = _run(home, site, "-m", "zeco_train", "train", *TINY, "sched=wsd", "sched.warmup_steps=1")
    assert done.returncode == 0, done.stderr
    assert "results in runs/default" in done.stdout
    done = _run(home, site, "-c", COMMANDS_OF_A_RUN)
    assert done.returncode == 0, done.stderr
    assert (home / "out" / "model.safetensors").exists()
    (home / "elsewhere").mkdir()
    done = _run(home / "elsewhere", site, "-c", FROM_PYTHON, "../runs/default", "../out")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "3\n3\n"), done
    done = _run(home, site, "-c", "import zeco_train; zeco_train.load('runs/default')")
    assert done.returncode == 1
    line = f"package=data: {home / 'data' / '__init__.py'} is in the way of this project's package data; "
    assert done.stderr.splitlines()[-1].startswith(f"zeco_train.errors.ConfigError: {line}")


def test_help_lists_every_command() -> None:
    done = _run(REPOSITORY, REPOSITORY, "-m", "zeco_train")
    assert (done.returncode, done.stdout, done.stderr) == (0, describe() + "\n", "")
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


def test_unknown_command_prints_one_error_line() -> None:
    done = _run(REPOSITORY, REPOSITORY, "-m", "zeco_train", "trian")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: command=trian: must be one of {', '.join(COMMANDS)}\n"
