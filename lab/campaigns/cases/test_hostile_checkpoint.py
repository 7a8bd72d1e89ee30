"""Copies of checkpoints under higher steps."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from tests.checkpoint.test_hostile_checkpoint import (
    COMMANDS,
    DATA,
    EMBEDDING,
    Command,
    _edit,
    _field,
    _in_an_entry,
    _in_metadata,
    finished,
    run,
)
from tests.checkpoint.test_hostile_checkpoint import test_commands_refuse_pickled_code_in_checkpoint as refuse_code
from tests.checkpoint.test_hostile_checkpoint import test_inconsistent_checkpoint_files_are_refused as refuse_files
from tests.checkpoint.test_hostile_checkpoint import test_inconsistent_metadata_is_refused as refuse_metadata
from tests.support.commands import train_here
from zeco_train.checkpoint.files import CHECKSUMS_FILE, complete_checkpoints

# Fixtures.
__all__ = ["finished", "run"]
pytestmark = pytest.mark.campaign


def _twice(metadata: Metadata) -> None:
    entry: Any = metadata.state_dict_metadata[EMBEDDING]
    half = copy.deepcopy(entry.chunks[0])
    half.sizes = torch.Size([half.sizes[0] // 2, *half.sizes[1:]]) if half.sizes[0] % 2 == 0 else half.sizes
    entry.chunks = [half, half]


def _nothing_stored(metadata: Metadata) -> None:
    metadata.storage_data = {i: p for i, p in metadata.storage_data.items() if i.fqn != EMBEDDING}


def _link(name: str, target: str) -> Callable[[Path], None]:
    def link(checkpoint: Path) -> None:
        (checkpoint / name).unlink()
        (checkpoint / name).symlink_to(target)

    return link


def test_copy_with_higher_step_does_not_delete_new_checkpoints(finished: Path, tmp_path: Path) -> None:
    """With checkpoint.keep=1, each new checkpoint was deleted as older than the copy."""
    run = shutil.copytree(finished, tmp_path / "run", symlinks=True)
    folder = run / "checkpoints"
    keep = ["train.steps=6", "checkpoint.every=1", "checkpoint.keep=1"]
    shutil.copytree(folder / "step_00000002", folder / "step_00000099")
    outcome = train_here(*DATA, f"run_dir={run}", *keep)
    assert outcome.code == 0, outcome.err
    assert "damaged: run.json is of step 2; it is step_00000099.damaged now" in outcome.err
    names = {path.name for path in folder.iterdir()}
    assert names == {"step_00000006", "step_00000099.damaged", "latest", "lock"}
    # Likewise a copy that appears during a run at lower steps.
    shutil.copytree(folder / "step_00000006", folder / "step_00000098")
    with mock.patch(
        "zeco_train.checkpoint.checkpointer.damage_of", lambda path, mesh: None if path.name[-1] == "6" else "copy"
    ):
        assert train_here(*DATA, f"run_dir={run}", "train.steps=7", *keep[1:]).code == 0
    assert [path.name for path in complete_checkpoints(run)] == ["step_00000007"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_field("place.relative_path", "../step_00000002/__0_0.distcp"), "which is no file of the checkpoint's folder"),
        (_field("place.relative_path", "other.distcp"), "checksums.json has no entry for other.distcp"),
        (_field("place.offset", -1), "-1 is no number from 0"),
        (_field("place.length", 1 << 40), "__0_0.distcp has"),
        (_field("place.transform_descriptors", ("stream.zstd",)), "is stored transformed"),
        (_field("entry.size", torch.Size([1 << 40, 1 << 20])), "its chunks do not cover"),
        (_field("entry.size", "259, 32"), "no size"),
        (_field("entry.chunks", []), "its chunks do not cover"),
        (_field("entry.chunks", None), "no list of chunks"),
        (_field("chunk.offsets", torch.Size([1, 0])), "its chunks do not cover"),
        (_field("chunk.sizes", torch.Size([8])), "its chunks do not cover"),
        (_field("metadata.storage_data", None), "has no table of entries, or none of their places"),
        (_nothing_stored, "no file is named for its part at [0, 0]"),
        (_twice, "its chunks do not cover"),
    ],
)
def test_inconsistent_metadata_is_refused(change: Callable[[Metadata], None], problem: str, run: Path) -> None:
    refuse_metadata(change, problem, run)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_edit(CHECKSUMS_FILE, **{"run.json": "REMOVED"}), "checksums.json has no entry for run.json"),
        (_edit(CHECKSUMS_FILE, **{"__0_0.distcp": "REMOVED"}), "checksums.json has no entry for __0_0.distcp"),
        (_edit(CHECKSUMS_FILE, **{"/dev/zero": {"bytes": 0, "sha256": "0" * 64}}), "'/dev/zero', which is no file"),
        (_edit(CHECKSUMS_FILE, **{"..": {"bytes": 0, "sha256": "0" * 64}}), "'..', which is no file"),
        (_edit(CHECKSUMS_FILE, y={"bytes": -1, "sha256": "0" * 64}), "no size and SHA-256 of y"),
        (_edit(CHECKSUMS_FILE, x={"bytes": 0, "sha256": 7}), "no size and SHA-256 of x"),
        (_edit(CHECKSUMS_FILE, x=3), "no size and SHA-256 of x"),
        (_link("__0_0.distcp", "/dev/zero"), "__0_0.distcp is no regular file"),
        (_link("run.json", "/dev/zero"), "run.json"),
        (_edit("run.json", step="4"), "step='4' is no whole number"),
        (_edit("run.json", sequences=True), "sequences=True is no whole number"),
        (_edit("run.json", skipped=1.5), "skipped=1.5 is no whole number"),
        (_edit("run.json", logger_run_id=["x"]), "logger_run_id=['x'] is no text"),
        (_edit("run.json", tokens="REMOVED"), "tokens is missing"),
        (_edit("run.json", step=3), "run.json is of step 3"),
    ],
)
def test_inconsistent_checkpoint_files_are_refused(change: Callable[[Path], None], problem: str, run: Path) -> None:
    refuse_files(change, problem, run)


@pytest.mark.parametrize("attack", [_in_metadata, _in_an_entry])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_pickled_code_in_checkpoint(
    attack: Callable[[Path, Path], None], command: Command, run: Path, tmp_path: Path
) -> None:
    refuse_code(attack, command, run, tmp_path)
