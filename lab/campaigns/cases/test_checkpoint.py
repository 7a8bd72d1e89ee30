"""Ranks that leave at once after asynchronous saves, and clocks of ranks that drift."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.checkpoint.test_checkpoint import (
    check_async_save,
    check_failed_saves,
    check_signal_during_save,
    names,
)
from tests.support.distributed import run_distributed
from tests.support.training import train
from zeco_train.checkpoint import checkpointer as checkpoint
from zeco_train.checkpoint.checkpointer import Checkpointer

pytestmark = pytest.mark.campaign

ATTEMPTS = 5


def _save_and_leave(rank: int, world_size: int, folder: str) -> None:
    """Repeatedly join, save twice and leave at once."""
    dist.destroy_process_group()
    for attempt in range(ATTEMPTS):
        store = dist.FileStore(f"{folder}/store{attempt}", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        settings = ["train.steps=2", "checkpoint.every=1", "train.eval_sequences=0", "data.seq_len=48"]
        train(rank, world_size, f"{folder}/run{attempt}", *settings)
        dist.barrier()
        dist.destroy_process_group()


def _train_by_two_clocks(rank: int, world_size: int, folder: str) -> None:
    now, due = 0.0, Checkpointer.due

    def later(self: Checkpointer, progress: Any) -> bool:
        nonlocal now
        now += (25.0, 61.0)[rank]
        return due(self, progress)

    clock = mock.Mock(monotonic=lambda: now)
    with mock.patch.object(checkpoint, "time", clock), mock.patch.object(Checkpointer, "due", later):
        settings = ["train.steps=7", "checkpoint.every=0", "checkpoint.minutes=1", "data.seq_len=48"]
        train(rank, world_size, folder, *settings, "train.eval_sequences=0")


@pytest.mark.processes
def test_process_groups_end_cleanly_after_async_saves(tmp_path: Path) -> None:
    run_distributed(_save_and_leave, 2, str(tmp_path))
    assert len(list(tmp_path.glob("run*/checkpoints/step_00000002"))) == ATTEMPTS


@pytest.mark.processes
def test_save_interval_uses_clock_of_rank_0(tmp_path: Path) -> None:
    run_distributed(_train_by_two_clocks, 2, str(tmp_path / "clocks"))
    # At 75 s and 150 s by rank 0's clock; by rank 1's it would be every step.
    log = (tmp_path / "clocks" / "logs" / "rank_1.log").read_text()
    assert [step for step in range(8) if f"checkpoint of step {step} complete" in log] == [3, 6, 7]
    assert names(tmp_path / "clocks") == ["step_00000006", "step_00000007"]


@pytest.mark.processes
def test_async_save_holds_state_of_its_step_on_two_ranks(tmp_path: Path) -> None:
    check_async_save(2, tmp_path)


@pytest.mark.parametrize(("mode", "file"), [("async", ".metadata.tmp"), ("sync", "__0_0.distcp")])
def test_failed_saves_end_the_run_only_at_the_last_step(mode: str, file: str, tmp_path: Path) -> None:
    check_failed_saves(mode, file, tmp_path)


@pytest.mark.processes
def test_signal_during_save_of_an_earlier_step_keeps_both(tmp_path: Path) -> None:
    check_signal_during_save(3, [2, 3], tmp_path)
