"""Provenance of results: the commit is that of this project's own source tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from zeco_train.system import environment


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


@pytest.mark.parametrize("folder", [".venv/lib/site-packages", "."])
def test_commit_of_surrounding_repository_is_not_recorded(
    folder: str, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed package in a virtual environment inside it, and one unpacked into it."""
    install(repository / folder, monkeypatch)
    found = environment.installation()
    assert (found["commit"], found["dirty"]) == ("", None)


def test_commit_of_repository_with_a_copy_is_not_recorded(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(repository / "copied", monkeypatch)
    git(repository, "add", ".")
    git(repository, "commit", "-m", "copy")
    assert environment.installation()["commit"] == ""
