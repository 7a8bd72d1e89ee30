"""Compiled code is loaded only from folders that other users cannot write."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from models.language_model import LanguageModel
from tests.support.commands import REPOSITORY
from tests.support.steps import TINY, make_mesh
from zeco_train.distributed.config import Strategy
from zeco_train.errors import ConfigError
from zeco_train.system import code_cache
from zeco_train.system.code_cache import default_folder, private_folder, use_private_caches
from zeco_train.training.build import build_model
from zeco_train.training.config import Compile, TrainConfig

VARIABLES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Unset the cache variables; home and /tmp are temporary folders."""
    for name in VARIABLES:
        # Set first, so that a value set by the code under test is restored.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(code_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / "home"


def test_default_folder_name_is_random_and_persistent(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = default_folder()
    assert re.fullmatch(r"zeco-cache-[0-9]+-[0-9a-f]{32}", first.name)
    assert default_folder() == first
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert default_folder() != first


def test_unstorable_default_folder_name_is_refused(home: Path) -> None:
    home.write_text("a file")
    with pytest.raises(ConfigError, match=r"^code cache=.*: its name cannot be kept there \(.*TORCHINDUCTOR_CACHE_DIR"):
        default_folder()
    home.unlink()
    (home / "zeco-train").mkdir(parents=True)
    (home / "zeco-train" / "code_cache").symlink_to("../../etc")
    with pytest.raises(ConfigError, match="must be a link to 32 hexadecimal digits"):
        default_folder()


def test_new_folder_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = private_folder("CACHE_DIR", tmp_path / "cache")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert private_folder("CACHE_DIR", tmp_path / "cache") == folder


def test_symlink_of_user_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to("real")
    assert private_folder("CACHE_DIR", tmp_path / "link") == tmp_path / "real"


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702, 0o1777])
def test_folders_writable_by_others_are_refused(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match=rf"^CACHE_DIR={folder}: others may write there \(mode {mode:o}\)"):
        private_folder("CACHE_DIR", folder)
    folder.chmod(0o700)


def test_folders_owned_by_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also through a symlink of the user, and a folder of the user through a symlink of another user."""
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("cache")
    user = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(code_cache.os, "geteuid", lambda: user + 1)
        for name in ("cache", "link"):
            with pytest.raises(ConfigError, match=f"the folder belongs to user {user}, "):
                private_folder("CACHE_DIR", tmp_path / name)
    if user == 0:
        os.lchown(tmp_path / "link", 1234, 1234)
        with pytest.raises(ConfigError, match="the link belongs to user 1234, "):
            private_folder("CACHE_DIR", tmp_path / "link")


def test_unusable_folder_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("gone")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    lines = {
        "file": "is no folder",
        "file/below": "cannot be made",
        "loop": "cannot be made",
        "nowhere": "cannot be made",
        "x" * 300: "cannot be made",
        "open/cache": "others may replace it",
    }
    for name, problem in lines.items():
        with pytest.raises(ConfigError, match=problem):
            private_folder("CACHE_DIR", tmp_path / name)


def test_cache_folders_by_environment_variable(tmp_path: Path) -> None:
    """By default only TORCHINDUCTOR_CACHE_DIR is set: the other defaults lie in the user's home."""
    use_private_caches()
    assert {name for name in VARIABLES if name in os.environ} == {"TORCHINDUCTOR_CACHE_DIR"}
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(default_folder() / "inductor")
    named = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    use_private_caches(tmp_path / "job", "CACHE_DIR")
    assert [Path(os.environ[name]) for name in VARIABLES] == [tmp_path / "job/triton", named, tmp_path / "job/cuda"]
    named.chmod(0o777)
    with pytest.raises(ConfigError, match=r"^TORCHINDUCTOR_CACHE_DIR=.*: others may write there"):
        use_private_caches()


def test_torch_sets_no_folder_of_its_own_before(tmp_path: Path, home: Path) -> None:
    """In a process in which no part of torch that does so has been imported yet."""
    code = """import os, torch
from zeco_train.config.schema import load_config
from zeco_train.training.checks import check_machine
check_machine(load_config(["train.compile=always"]), torch.device("cpu"))
print(os.environ["TORCHINDUCTOR_CACHE_DIR"])"""
    own = os.environ | {"TMPDIR": str(tmp_path), "CXX": sys.executable}
    found = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=REPOSITORY, env=own)
    assert found.strip() == str(default_folder() / "inductor")


def test_training_compiles_into_private_folder() -> None:
    mesh, config = make_mesh(0, 1, 1), TrainConfig(compile=Compile.always)
    try:
        with mock.patch.object(LanguageModel, "compile_parts"):
            build_model(TINY, config, Strategy.zero2, mesh, seed=0)
        cache = default_folder() / "inductor"
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache)
        cache.chmod(0o777)
        with pytest.raises(ConfigError, match="others may write there"):
            build_model(TINY, config, Strategy.zero2, mesh, seed=0)
    finally:
        dist.destroy_process_group()
