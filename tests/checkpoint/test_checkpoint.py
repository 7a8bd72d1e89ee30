"""Asynchronous saves: contents, schedule, failing storage, and signals during a save."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.staging import DefaultStager

from tests.support.commands import SMALL, run_here, snapshot, train_here
from tests.support.distributed import run_distributed
from tests.support.training import train
from tests.support.waiting import ENOUGH
from zeco_train import cli
from zeco_train.checkpoint import checkpointer as checkpoint
from zeco_train.checkpoint import writer as checkpoint_writer
from zeco_train.checkpoint.checkpointer import Checkpointer
from zeco_train.checkpoint.files import (
    FILES_AT_ONCE,
    PROGRESS_FILE,
    RECORD_FILE,
    RUN_FORMAT,
    Progress,
    complete_checkpoints,
    find_weights,
    link_latest,
    record_checkpoint,
    saved_checkpoints,
    set_aside,
)
from zeco_train.checkpoint.writer import CheckpointWriter
from zeco_train.errors import CheckpointError, DataError
from zeco_train.system.files import sync_file
from zeco_train.system.signals import REQUEUE_EXIT_CODE
from zeco_train.tracking import recorder
from zeco_train.tracking.metrics import read_metrics

pytestmark = pytest.mark.numeric

CHECKPOINT = CheckpointError.exit_code
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.name not in ("latest", "lock"))


@contextmanager
def late(owner: type, method: str, event: threading.Event | None = None, seconds: float = 0.0) -> Iterator[list[bool]]:
    """Let a method begin only after an event, and a pause; yields for each call whether the event came."""
    whole = getattr(owner, method)
    found: list[bool] = []

    def delayed(*args: Any, **kwargs: Any) -> Any:
        found.append(event is None or event.wait(ENOUGH))
        time.sleep(seconds)
        return whole(*args, **kwargs)

    with mock.patch.object(owner, method, delayed):
        yield found


def _train_in_both_modes(rank: int, world_size: int, folder: str) -> list[bool]:
    settings = ["train.steps=3", "checkpoint.every=2", "checkpoint.keep=0", "parallel=zero3", "train.eval_sequences=0"]
    settings += ["data.seq_len=96"]
    train(rank, world_size, f"{folder}/sync", *settings, "checkpoint.mode=sync")
    returned, third = threading.Event(), threading.Event()
    save, due = Checkpointer.save, Checkpointer.due

    def noted(*args: Any) -> None:
        save(*args)
        returned.set()

    def asked(self: Checkpointer, progress: Progress) -> bool:
        if progress.step == 3:
            third.set()
        return due(self, progress)

    # The state of step 2 is copied after its save has returned, and written after step 3. The late copy would hold the
    # weights of step 3 if that step did not wait for it.
    with (
        late(StateDictStager, "stage", returned, seconds=0.3) as copied,
        late(CheckpointWriter, "write_data", third) as written,
        mock.patch.object(Checkpointer, "save", noted),
        mock.patch.object(Checkpointer, "due", asked),
    ):
        train(rank, world_size, f"{folder}/async", *settings)
    return copied + written


@pytest.mark.slow
@pytest.mark.processes
def test_async_save_holds_state_of_its_step(tmp_path: Path) -> None:
    check_async_save(1, tmp_path)


def check_async_save(world_size: int, tmp_path: Path) -> None:
    """Its bits are those of a save that the run waits for."""
    folder = tmp_path / "runs"
    found = run_distributed(_train_in_both_modes, world_size, str(folder))[0]
    # A copy and a write of step 2, and a write of the last.
    assert len(found) >= 3
    assert all(found)
    log = (folder / "async" / "logs" / "rank_0.log").read_text()
    assert log.index("step 3: sequences") < log.index("checkpoint of step 2 complete")
    assert names(folder / "async") == [f"step_{step:08d}" for step in (2, 3)]
    for path in complete_checkpoints(folder / "async"):
        states = []
        for mode in ("sync", "async"):
            dcp_to_torch_save(folder / mode / "checkpoints" / path.name, tmp_path / "whole.pt")
            state = torch.load(tmp_path / "whole.pt")
            states.append({**state["model"], **state["optim"], "rng": state["rng"]})
        expected, found = states
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            same = torch.equal(value, found[key]) if torch.is_tensor(value) else value == found[key]
            assert same, (path.name, key)


def test_a_staged_tensor_is_a_storage_of_its_own_size() -> None:
    staged = checkpoint_writer._Staged(mock.Mock())
    whole = torch.arange(24.0).view(4, 6)
    for data in (whole, whole[:, ::2].t(), whole[1:2, :3].bfloat16(), whole.long()[0], torch.tensor(5.0)):
        found = staged.staged(data)
        assert torch.equal(found, data)
        assert (found.dtype, found.untyped_storage().nbytes()) == (data.dtype, data.nbytes)


@pytest.mark.gpu
def test_tensors_of_a_gpu_are_saved_through_one_buffer(tmp_path: Path) -> None:
    wide = torch.rand(1 << 14, 1 << 12, device="cuda")
    state = {"wide": wide, "turned": wide.t(), "narrow": wide[:8].bfloat16(), "one": wide[0, 0], "none": wide[:0]}
    state |= {str(n): wide + n for n in range(8)}
    final = tmp_path / "checkpoints" / "step_00000001"
    final.parent.mkdir()
    dcp.save(state, storage_writer=CheckpointWriter(final, "{}", 0))
    assert len([*final.glob("*.distcp")]) == 10  # 2.7 GB
    found = {name: torch.zeros_like(value, device="cpu") for name, value in state.items()}
    dcp.load(found, checkpoint_id=final)
    assert all(torch.equal(found[name], value.cpu()) for name, value in state.items())


@contextmanager
def failing(refuse: Callable[[str], bool]) -> Iterator[None]:
    """Make opening files for writing fail with ENOSPC where `refuse(path)`."""
    create = checkpoint_writer._HashingFileSystem.create_stream

    @contextmanager
    def create_stream(self: Any, path: Path, mode: str) -> Iterator[Any]:
        if refuse(str(path)):
            raise FULL
        with create(self, path, mode) as stream:
            yield stream

    with (
        mock.patch.object(checkpoint_writer._HashingFileSystem, "create_stream", create_stream),
        mock.patch.object(checkpoint_writer, "_RETRY_AFTER_SECONDS", (0.01, 0.02)),
    ):
        yield


@pytest.mark.slow
def test_transient_write_errors_are_retried(tmp_path: Path) -> None:
    left = {".distcp": 2, ".metadata": 1}

    def refuse(path: str) -> bool:
        for part, count in left.items():
            if part in path and count:
                left[part] -= 1
                return True
        return False

    with failing(refuse):
        outcome = train_here(f"run_dir={tmp_path / 'run'}", "train.steps=2", "checkpoint.every=1")
    assert outcome.code == 0, outcome.err
    assert outcome.err.count("trying again in") == 3
    assert names(tmp_path / "run") == ["step_00000001", "step_00000002"]


@pytest.mark.slow
def test_stagers_closed_by_torch_after_use_are_replaced(tmp_path: Path) -> None:
    """torch 2.11 closes them: the second asynchronous save of a run raised KeyError."""
    stage = DefaultStager._stage

    def once(stager: DefaultStager, *args: Any, **kwargs: Any) -> Any:
        staged = stage(stager, *args, **kwargs)
        stager._state_dict_stager.close()
        return staged

    with mock.patch.object(DefaultStager, "_stage", once), mock.patch.object(checkpoint, "_STAGERS_LAST", False):
        outcome = train_here(f"run_dir={tmp_path / 'run'}", "train.steps=5", "checkpoint.every=1", "checkpoint.keep=0")
    assert outcome.code == 0, outcome.err
    assert len(complete_checkpoints(tmp_path / "run")) == 5


def test_all_files_are_on_disk_whole_before_checkpoint_is_published(tmp_path: Path) -> None:
    """torch's fsync came before the last bytes left the buffer of `.metadata`."""
    fsync, rename = os.fsync, Path.rename
    synced: dict[int, int] = {}
    published: list[set[str]] = []

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size

    def checked(path: Path, target: Path) -> Path:
        if Path(target).name == "step_00000001":
            files = {file.name: file.stat() for file in path.iterdir()}
            published.append(set(files))
            assert {n: synced.get(f.st_ino) for n, f in files.items()} == {n: f.st_size for n, f in files.items()}
        return rename(path, target)

    with mock.patch("os.fsync", noted), mock.patch.object(Path, "rename", checked):
        outcome = train_here(f"run_dir={tmp_path / 'run'}", "train.steps=1")
    assert outcome.code == 0, outcome.err
    assert published == [{"__0_0.distcp", ".metadata", "run.json", "checksums.json"}]


def test_rank_writes_and_reads_several_files_and_says_how_far_it_is(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def refuse(path: str) -> bool:
        return path.endswith("__0_1_0.distcp")

    def sync_slowly(path: Path) -> None:
        time.sleep(0.05)
        sync_file(path)

    with (
        mock.patch.object(checkpoint_writer, "sync_file", sync_slowly),
        mock.patch.object(checkpoint_writer, "_BYTES_OF_FILE", 18_000),
        mock.patch.object(checkpoint_writer, "_SECONDS_TO_REPORT", (0.0, 0.01)),
    ):
        # torch's own threads would leave out what is in the other files, and go on.
        with failing(refuse):
            assert train_here(f"run_dir={run}", "train.steps=1").code == CHECKPOINT
        assert names(run) == []
        outcome = train_here(f"run_dir={run}", "train.steps=2", "checkpoint.missing=start_anew")
    assert outcome.code == 0, outcome.err
    (path,) = complete_checkpoints(run)
    sizes = [file.stat().st_size for file in path.glob("__0_*_0.distcp")]
    assert len(sizes) == FILES_AT_ONCE
    assert sum(sizes) < 4 * min(sizes) * len(sizes), sizes
    lines = [line for line in outcome.out.splitlines() if line.startswith(("writing checkpoint: ", "checkpoint writt"))]
    assert re.fullmatch(r"writing checkpoint: \S+B of 301kB, \S+B/s", lines[0])
    assert re.fullmatch(r"checkpoint written: 301kB in \d+\.\d s, \S+B/s", lines[-1])
    # The same numbers from one file and from several.
    assert train_here(f"run_dir={run}", "train.steps=3").code == 0
    assert train_here(f"run_dir={tmp_path / 'one'}", "train.steps=3").code == 0
    rows = [read_metrics(folder / "metrics.jsonl")[-1] for folder in (run, tmp_path / "one")]
    assert rows[0]["loss"] == rows[1]["loss"]


@pytest.mark.few(quick=2)
@pytest.mark.parametrize(("every", "saved"), [(2, ["step_00000002"]), (3, ["step_00000003"]), (0, [])])
def test_last_step_is_saved_by_choice(every: int, saved: list[str], tmp_path: Path) -> None:
    outcome = train_here(f"run_dir={tmp_path}", "train.steps=3", f"checkpoint.every={every}", "checkpoint.final=false")
    assert outcome.code == 0, outcome.err
    assert names(tmp_path) == saved
    assert ("not saved (checkpoint.final=false)" in outcome.out) == (every != 3)


def test_chart_that_fails_beside_last_save_is_drawn_after_it(tmp_path: Path) -> None:
    drawn = [DataError("loss.png", "cannot be written (No space left on device)"), None]
    with mock.patch.object(recorder, "plot_run", side_effect=drawn) as plot:
        outcome = run_here(cli.main, *SMALL, f"run_dir={tmp_path}", "train.steps=1")
    assert (outcome.code, plot.call_count, names(tmp_path)) == (0, 2, ["step_00000001"])


@pytest.mark.slow
def test_older_checkpoints_are_kept_while_new_name_is_not_on_disk(tmp_path: Path) -> None:
    """With checkpoint.keep=1, a power loss could have left the run without any."""

    def refuse(folder: Path) -> None:
        if complete_checkpoints(folder.parent)[-1].name == "step_00000002":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    settings = [f"run_dir={tmp_path / 'run'}", "checkpoint.every=1", "checkpoint.keep=1"]
    with mock.patch.object(checkpoint_writer, "sync_folder", refuse):
        outcome = train_here(*settings, "train.steps=2")
        assert outcome.code == 0, outcome.err
        assert names(tmp_path / "run") == ["step_00000001", "step_00000002"]
        expected = "step_00000002 is complete, but its name may not be on disk yet, so older ones are kept: "
        assert outcome.err.count(expected) == 1
        # The next save makes its own name durable, and then removes both.
        assert train_here(*settings, "train.steps=3").code == 0
    assert names(tmp_path / "run") == ["step_00000003"]


@pytest.mark.slow
def test_old_checkpoint_that_is_a_link_is_unlinked_only(tmp_path: Path) -> None:
    """Its removal failed and left a link under a temporary name, on which every later save failed."""
    folder, disk = tmp_path / "run" / "checkpoints", tmp_path / "disk"
    settings = [f"run_dir={tmp_path / 'run'}", "checkpoint.every=1", "checkpoint.keep=1"]
    assert train_here(*settings, "train.steps=1").code == 0
    (folder / "step_00000001").rename(disk)
    (folder / "step_00000001").symlink_to(disk)
    # As a save that failed leaves one.
    (folder / "step_00000000.tmp").symlink_to(disk)
    before = snapshot(disk)
    outcome = train_here(*settings, "train.steps=3")
    assert outcome.code == 0, outcome.err
    assert "saving failed" not in outcome.err
    assert "is complete, but" not in outcome.err
    assert names(tmp_path / "run") == ["step_00000003"]
    assert snapshot(disk) == before


@pytest.mark.slow
def test_failed_saves_end_the_run_only_at_the_last_step(tmp_path: Path) -> None:
    check_failed_saves("async", "__0_0.distcp", tmp_path)


def check_failed_saves(mode: str, file: str, tmp_path: Path) -> None:
    """Two saves that cannot write a file, and a last one that can write nothing."""
    run = tmp_path / "run"
    settings = [f"run_dir={run}", "checkpoint.every=1", f"checkpoint.mode={mode}", "checkpoint.keep=0"]
    with failing(lambda path: path.endswith((f"step_00000002.tmp/{file}", f"step_00000003.tmp/{file}"))):
        outcome = train_here(*settings, "train.steps=4")
    assert outcome.code == 0, outcome.err
    for step in (2, 3):
        text = (
            f"step_{step:08d}: saving failed: rank 0: OSError: [Errno 28] No space left on device; the last complete "
        )
        assert f"{text}checkpoint is step_00000001; the run goes on" in outcome.err
    assert names(run) == ["step_00000001", "step_00000004"]
    assert len(read_metrics(run / "metrics.jsonl")) == 4
    before = snapshot(run / "checkpoints")
    with failing(lambda path: True):
        outcome = train_here(*settings, "train.steps=6")
    assert outcome.code == CHECKPOINT
    assert len(outcome.errors) == 1
    assert "step_00000006: saving failed: rank 0: OSError: " in outcome.errors[0]
    assert outcome.errors[0].endswith("the last complete checkpoint is step_00000004")
    assert snapshot(run / "checkpoints") == before


@pytest.mark.slow
@pytest.mark.processes
def test_signal_during_save_keeps_it_and_saves_last_step(tmp_path: Path) -> None:
    check_signal_during_save(2, [2], tmp_path)


def check_signal_during_save(at: int, expected: list[int], tmp_path: Path) -> None:
    """A signal at a step, of which or before which the save in progress is."""
    due, done = Checkpointer.due, threading.Event()

    def told(self: Checkpointer, progress: Any) -> bool:
        answer = due(self, progress)
        if progress.step == at:
            assert (self._save is None) == (at == 2)
            done.set()
            signal.raise_signal(signal.SIGTERM)
        return answer

    with mock.patch.object(Checkpointer, "due", told), late(CheckpointWriter, "write_data", done):
        outcome = train_here(f"run_dir={tmp_path / 'run'}", "train.steps=9", "checkpoint.every=2")
    assert outcome.code == REQUEUE_EXIT_CODE, outcome
    assert f"SIGTERM after step {at}: saved" in outcome.out
    assert names(tmp_path / "run") == [f"step_{step:08d}" for step in expected]


@pytest.mark.processes
@pytest.mark.slow
def test_nonfinite_step_waits_for_save_in_progress(tmp_path: Path) -> None:
    """A non-finite loss ends the run only after the save in progress is complete."""
    settings = ["optim.lr=1e30", "optim.grad_clip=0", "sched.warmup_steps=0", "checkpoint.every=1"]
    with late(CheckpointWriter, "write_data", seconds=1.0):
        outcome = train_here(f"run_dir={tmp_path / 'run'}", "train.steps=9", *settings)
    steps = len(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert f"step {steps + 1}: " in outcome.errors[0]
    assert complete_checkpoints(tmp_path / "run")[-1].name == f"step_{steps:08d}"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A 4 MB tmpfs; only root can mount it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True)
    if made.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {made.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def _fill(path: Path, leave: int) -> None:
    """Fill the disk except for `leave` bytes."""
    disk = os.statvfs(path.parent)
    path.write_bytes(bytes(disk.f_bavail * disk.f_frsize - leave))


def _free_after_failed_save(rank: int, world_size: int, run: str, filler: str) -> None:
    settle = Checkpointer.settle

    def free(self: Checkpointer) -> None:
        settle(self)
        if self._saved_at is None and rank == 0:
            Path(filler).unlink(missing_ok=True)

    with (
        mock.patch.object(Checkpointer, "settle", free),
        mock.patch.object(checkpoint_writer, "_RETRY_AFTER_SECONDS", (0.2, 0.4)),
    ):
        train(rank, world_size, run, *SMALL, "checkpoint.every=3", "train.steps=9")


@pytest.mark.processes
@pytest.mark.slow
def test_full_disk_skips_saves_until_space_is_free(small_disk: Path) -> None:
    run, filler = small_disk / "run", small_disk / "filler"
    settings = [f"run_dir={run}", "checkpoint.every=3"]
    assert train_here(*settings, "train.steps=3").code == 0
    _fill(filler, leave=100_000)
    first = run / "checkpoints" / "step_00000003"
    before = snapshot(first)
    run_distributed(_free_after_failed_save, 2, str(run), str(filler))
    log = (run / "logs" / "rank_0.log").read_text()
    assert "No space left on device; the last complete checkpoint is step_00000003; the run goes on" in log
    assert (names(run), snapshot(first)) == (["step_00000003", "step_00000009"], before)
    _fill(filler, leave=100_000)
    before, further = snapshot(run / "checkpoints"), [*settings, "train.steps=11"]
    with mock.patch.object(checkpoint_writer, "_RETRY_AFTER_SECONDS", (0.01, 0.02)):
        check_last = train_here(*further, "checkpoint.every=0")
    assert check_last.code == CHECKPOINT
    assert "saving failed" in check_last.errors[0]
    assert snapshot(run / "checkpoints") == before
    filler.unlink()
    outcome = train_here(*further)
    assert outcome.code == 0, outcome.err
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == list(range(1, 12))


def test_damaged_and_foreign_folders_are_not_checkpoints(tmp_path: Path) -> None:
    """Checkpoints set aside as damaged, repeatedly, and user folders; `latest` resolves to the checkpoint it names."""
    folder = tmp_path / "checkpoints"
    sound, damaged = folder / "step_00000002", folder / "step_00000004"
    for name in ("step_00000004.damaged", "step_00000004.damaged.2"):
        damaged.mkdir(parents=True)
        assert set_aside(damaged).name == name
    sound.mkdir()
    (sound / PROGRESS_FILE).write_text(json.dumps({"format": RUN_FORMAT, **asdict(Progress(2))}))
    (folder / "step_00000002 of May 3").mkdir()
    assert complete_checkpoints(tmp_path) == [sound]
    (folder / "latest").symlink_to(sound.name)
    assert find_weights(str(folder / "latest")) == sound


def test_latest_that_is_a_folder_is_renamed(tmp_path: Path) -> None:
    """A copy with links followed has one."""
    (tmp_path / "latest").mkdir()
    (tmp_path / "step_00000002").mkdir()
    link_latest(tmp_path / "step_00000002")
    assert {path.name: path.is_symlink() for path in tmp_path.iterdir()} == {
        "latest": True,
        "latest.damaged": False,
        "step_00000002": False,
    }


def test_only_what_the_run_has_saved_is_removed(tmp_path: Path) -> None:
    """Neither checkpoints that a user has put there, nor folders with similar names."""
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 4, 9):
        (folder / f"step_{step:08}").mkdir(parents=True)
    for name in ("step_00000003.tmp", "step_by_step.tmp"):
        (folder / name).mkdir()
    (tmp_path / RECORD_FILE).write_text('{"step": 1, "saved": [1]}')
    record_checkpoint(tmp_path, 4)
    writer = CheckpointWriter(folder / "step_00000004", "", 1)
    writer._drop_old()
    assert names(tmp_path) == [
        "step_00000002",
        "step_00000003.tmp",
        "step_00000004",
        "step_00000009",
        "step_by_step.tmp",
    ]
    CheckpointWriter(folder / "step_00000010", "", 1)._make_folder()
    assert names(tmp_path)[1:] == ["step_00000004", "step_00000009", "step_00000010.tmp", "step_by_step.tmp"]
    # Removed, as a damaged one has to be.
    (tmp_path / RECORD_FILE).unlink()
    assert [path.name for path in saved_checkpoints(tmp_path)] == ["step_00000002", "step_00000004", "step_00000009"]
