"""Provenance of results: the commit is that of this project's own source tree. And the threads of a process."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from zeco_train.system import command, environment


def git(folder: Path, *arguments: str) -> str:
    own = ["-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *own, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "other.py").touch()
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "other")
    return folder


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the package lie in a folder; returns its file that asks git."""
    file = folder / "zeco_train" / "system" / "environment.py"
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.setattr(environment, "__file__", str(file))
    return file


def test_commit_of_own_source_tree_is_recorded(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = install(repository, monkeypatch)
    git(repository, "add", ".")
    git(repository, "commit", "-m", "package")
    commit = git(repository, "rev-parse", "HEAD")
    assert environment.installation()["commit"] == commit
    file.write_text("changed")
    assert environment.installation()["commit"] == f"{commit}+"


@pytest.mark.parametrize(("folder", "is_tracked"), [(".venv/lib/site-packages", False), (".", False), ("copied", True)])
def test_commit_of_surrounding_repository_is_not_recorded(
    folder: str, is_tracked: bool, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed package in a virtual environment inside it, one unpacked into it, and a copy that it tracks."""
    install(repository / folder, monkeypatch)
    if is_tracked:
        git(repository, "add", ".")
        git(repository, "commit", "-m", "copy")
    found = environment.installation()
    assert (found["commit"], found["dirty"]) == ("", None)


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that may use 12 cores, whose user has set nothing."""
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "LOCAL_WORLD_SIZE")
    for name in (*names, "TORCHELASTIC_RUN_ID", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "WORLD_SIZE"):
        # Set first, so that what the function sets is gone after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)))
    monkeypatch.setattr(command, "_CONTROL_GROUP", Path("none"))
    return monkeypatch


def chosen() -> tuple[str | None, str | None]:
    command.choose_variables()
    return os.environ.get("OMP_NUM_THREADS"), os.environ.get("OMP_WAIT_POLICY")


def test_ranks_divide_the_cores_that_they_may_use(variables: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert chosen() == ("12", "passive")
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    for ranks, threads in (("5", "2"), ("20", "1"), ("0", "12"), ("x", "12")):
        variables.delenv("OMP_NUM_THREADS")
        variables.setenv("LOCAL_WORLD_SIZE", ranks)
        assert chosen() == (threads, "passive")
    variables.setattr(command, "_CONTROL_GROUP", tmp_path)
    (tmp_path / "cpu").mkdir()
    for name, text, cores in (
        ("cpu/cpu.cfs_period_us", "100000\n", 12),
        ("cpu/cpu.cfs_quota_us", "-1\n", 12),
        ("cpu/cpu.cfs_quota_us", "650000\n", 6),
        ("cpu.max", "max 100000\n", 6),
        ("cpu.max", "250000 100000\n", 2),
        ("cpu.max", "50000 100000\n", 1),
    ):
        (tmp_path / name).write_text(text)
        assert command.available_cores() == cores, (name, text)


def test_settings_of_the_user_stay(variables: pytest.MonkeyPatch) -> None:
    variables.setenv("OMP_NUM_THREADS", "3")
    variables.setenv("GOMP_SPINCOUNT", "7")
    for name, value in (("PYTORCH_CUDA_ALLOC_CONF", "backend:native"), ("WORLD_SIZE", "2")):
        variables.setenv(name, value)
        assert chosen() == ("3", None)
        assert "PYTORCH_ALLOC_CONF" not in os.environ
        variables.delenv(name)


@pytest.mark.parametrize(("own", "threads"), [({}, "6"), ({"OMP_NUM_THREADS": "1"}, "1")])
def test_one_thread_of_torchrun_is_no_setting_of_the_user(
    own: dict[str, str], threads: str, variables: pytest.MonkeyPatch
) -> None:
    """torchrun sets it for its ranks where its own environment has none."""
    with subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], **own}) as launcher:
        variables.setattr(os, "getppid", lambda: launcher.pid)
        for name, value in (("OMP_NUM_THREADS", "1"), ("TORCHELASTIC_RUN_ID", "a"), ("LOCAL_WORLD_SIZE", "2")):
            variables.setenv(name, value)
        assert chosen() == (threads, "passive")
        launcher.kill()
