"""Run folders: locked by one process, shared by all ranks, with the configuration and command line of the run."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest
import torch
from omegaconf import OmegaConf

from tests.support.commands import SMALL, snapshot, train_here
from tests.support.distributed import run_distributed
from zeco_train.config.schema import load_config
from zeco_train.errors import CheckpointError, ConfigError, ZecoError
from zeco_train.lifecycle.join import Launch
from zeco_train.lifecycle.logs import close_logging
from zeco_train.tracking import run_folder
from zeco_train.tracking.run_folder import RunFolder
from zeco_train.training.checks import join_ranks
from zeco_train.training.opening import open_run

IDENTITY = {"seed": 0, "model.mixer": "gla"}
STARTS = 10


def _begun(path: Path, identity: Mapping[str, object] = IDENTITY) -> RunFolder:
    folder = RunFolder(path, identity)
    folder.begin({"seed": 0}, [])
    return folder


def _start_at_once(path: Path) -> tuple[list[RunFolder], list[Exception]]:
    """Open and begin `path` from many threads; a lock belongs to an open file, so threads exclude each other.

    Returns:
        The folders that were opened, and the errors of the other starts.
    """
    gate, winners, errors = threading.Barrier(STARTS), [], []

    def start() -> None:
        gate.wait()
        try:
            winners.append(_begun(path))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(STARTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return winners, errors


@pytest.mark.processes
def test_only_one_of_concurrent_starts_gets_folder(tmp_path: Path) -> None:
    expected = "another process is training there; end it first"
    for attempt in range(10):
        path = tmp_path / str(attempt)
        for _ in ("new", "resumed"):
            winners, errors = _start_at_once(path)
            assert len(winners) == 1
            assert [str(error) for error in errors] == [f"run_dir={path}: {expected}"] * (STARTS - 1)
            winners[0].release()


def test_refused_start_leaves_folder_unchanged(tmp_path: Path) -> None:
    run, empty, new = tmp_path / "run", tmp_path / "empty", tmp_path / "new"
    _begun(run).release()
    empty.mkdir()
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match="seed=1: the run in"):
        RunFolder(run, IDENTITY | {"seed": 1})
    for path in (run, empty, new):
        # A start that is refused after taking the lock.
        RunFolder(path, IDENTITY).release()
    assert snapshot(tmp_path) == before


def test_file_system_without_locks_gives_warning(tmp_path: Path) -> None:
    run = tmp_path / "run"
    no_locks = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    with mock.patch("fcntl.flock", side_effect=no_locks):
        outcome = train_here(f"run_dir={run}", "train.steps=1")
    assert outcome.code == 0, outcome.err
    warning = f"run_dir={run}: this file system has no locks (Function not implemented), so a second start"
    assert [warning in line for line in outcome.err.splitlines()] == [True]
    assert warning in (run / "logs" / "rank_0.log").read_text()


def _open_own_folders(rank: int, world_size: int, folder: str) -> list[str]:
    """Open runs in a different folder on each rank, as on local disks of two nodes; returns the errors."""
    messages = []
    run_folder._SECONDS_TO_APPEAR = 0.5
    for name in ("new", "run"):
        arguments = [*SMALL, f"run_dir={folder}/{rank}/{name}"]
        config = load_config(arguments)
        mesh = join_ranks(config, Launch(rank, world_size, rank))
        try:
            open_run(config, arguments, mesh)
        except ZecoError as error:
            messages.append(str(error))
    close_logging()
    return messages


@pytest.mark.slow
def test_folder_on_node_local_disk_is_refused(tmp_path: Path) -> None:
    for rank in range(2):
        outcome = train_here(f"run_dir={tmp_path / str(rank) / 'run'}", "train.steps=1")
        assert outcome.code == 0, outcome.err
    before = snapshot(tmp_path)
    problem = "is not the same folder on rank 1; name one on a file system that all nodes share"
    expected = [f"run_dir={tmp_path / '1' / name}: {problem}" for name in ("new", "run")]
    assert run_distributed(_open_own_folders, 2, str(tmp_path)) == [expected, expected]
    assert snapshot(tmp_path) == before


def test_command_line_is_recorded_for_replay_and_configuration_resolved(tmp_path: Path) -> None:
    run, arguments = tmp_path / "a run", ["name='two  words'", "train.steps=1", "optim.betas=[0.9, 0.95]"]
    arguments += [f"run_dir='{run}'", "train.device=auto", "sp.size=-1"]
    for number in (1, 2):
        outcome = train_here(*arguments)
        assert outcome.code == 0, outcome.err
        lines = (run / "overrides.txt").read_text().splitlines()
        assert [shlex.split(line) for line in lines] == [[*SMALL, *arguments]] * number
        config = OmegaConf.load(run / "config.yaml")
        assert (config.sp.size, config.train.device) == (1, "cuda" if torch.cuda.is_available() else "cpu")
    assert not (run / "config.1.yaml").exists()


def test_tokenizer_is_identified_by_digest_not_path(tmp_path: Path) -> None:
    def of(path: str, digest: str) -> dict[str, object]:
        return {**IDENTITY, "data.tokenizer": {"kind": "huggingface", "path": path, "sha256": digest}}

    for path in ("/old", "/new"):
        _begun(tmp_path, of(path, "a")).release()
    with pytest.raises(CheckpointError, match=r"^data\.tokenizer=.* or remove that one, which has no checkpoint yet$"):
        RunFolder(tmp_path, of("/old", "b"))


def test_model_weights_are_not_kept_with_tokenizer(tmp_path: Path) -> None:
    model = tmp_path / "model"
    for name in ("tokenizer.json", "tokenizer.model", "config.json", "model.safetensors", "original/a.pth", ".git/a"):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).touch()
    folder = _begun(tmp_path / "run")
    folder.keep_tokenizer(model)
    folder.release()
    kept = {path.name for path in (tmp_path / "run" / "tokenizer").rglob("*") if path.is_file()}
    assert kept == {"tokenizer.json", "tokenizer.model", "config.json"}


def test_write_errors_name_run_folder(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    folder = RunFolder(tmp_path / "run", IDENTITY)
    with (
        mock.patch.object(run_folder, "write_durably", side_effect=full),
        pytest.raises(ConfigError, match=r"run: cannot be written \(No space left on device\); name another folder"),
    ):
        folder.begin({}, [])
    folder.release()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "overrides.txt", "lock", "logs/rank_0.log", "profile/.rank_0_steps_1_2.json", "wandb"]
)
@pytest.mark.parametrize("exists", [True, False])
def test_links_out_of_the_folder_are_refused(name: str, exists: bool, tmp_path: Path) -> None:
    run, private = tmp_path / "run", tmp_path / "private"
    _begun(run).release()
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(private)
    if exists:
        private.write_text("mine")
    with pytest.raises(
        ConfigError, match=f"{name} is a link out of the folder, as only checkpoints may be; remove the link"
    ):
        RunFolder(run, IDENTITY)
    assert private.read_text() == "mine" if exists else not private.exists()


def _link_checkpoints(run: Path, to: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to(to)


def test_checkpoints_may_be_a_link_of_one_run(tmp_path: Path) -> None:
    """The folder of checkpoints has a mark of its run: another run would load and delete them."""
    first, second, disk = tmp_path / "first", tmp_path / "second", tmp_path / "disk"
    for run in (first, second):
        _begun(run).release()
    (first / "wandb" / "run-1" / "logs").mkdir(parents=True)
    (first / "wandb" / "latest-run").symlink_to("run-1")
    (first / "wandb" / "run-1" / "logs" / "debug-core.log").symlink_to(tmp_path / "cache.log")
    (first / "checkpoints").rename(disk)
    (first / "checkpoints").symlink_to(disk)
    _begun(first).release()
    _link_checkpoints(second, disk)
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=rf"second: its checkpoints are those of the run in {first}; remove the link"):
        _begun(second)
    assert snapshot(tmp_path) == before
    # A run that was moved keeps its checkpoints.
    moved = first.rename(tmp_path / "moved")
    _begun(moved).release()
    assert (disk / "lock").read_text() == str(moved)


@pytest.mark.parametrize("mark", ["", "\0", "elsewhere"])
def test_checkpoints_inside_another_run_are_refused(mark: str, tmp_path: Path) -> None:
    """As versions without marks left them."""
    first, second = tmp_path / "first", tmp_path / "second"
    for run in (first, second):
        _begun(run).release()
    (first / "checkpoints" / "lock").write_text(mark)
    _link_checkpoints(second, first / "checkpoints")
    with pytest.raises(ConfigError, match=rf"second: its checkpoints are those of the run in {first}"):
        _begun(second)
    assert (first / "checkpoints" / "lock").read_text() == mark


def test_checkpoints_that_are_a_link_to_other_files_are_refused(tmp_path: Path) -> None:
    run, private = tmp_path / "run", tmp_path / "private"
    _begun(run).release()
    private.mkdir()
    (private / "thesis.txt").touch()
    _link_checkpoints(run, private)
    with pytest.raises(ConfigError, match=r"run: its checkpoints are a link to a folder with thesis\.txt"):
        _begun(run)
    assert [path.name for path in private.iterdir()] == ["thesis.txt"]


def test_checkpoints_in_use_and_locks_that_are_links_are_refused(tmp_path: Path) -> None:
    run, other, private = tmp_path / "run", tmp_path / "other", tmp_path / "private"
    folder = _begun(run)
    _begun(other).release()
    _link_checkpoints(other, run / "checkpoints")
    with pytest.raises(ConfigError, match="other: another process saves in its checkpoints; end it first"):
        _begun(other)
    folder.release()
    (run / "checkpoints" / "lock").unlink()
    (run / "checkpoints" / "lock").symlink_to(private)
    with pytest.raises(ConfigError, match="cannot be written"):
        _begun(run)
    assert not private.exists()
