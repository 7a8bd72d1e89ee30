"""What a run says and keeps when it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.checkpoint.test_resume import check_resume, folder, half_way
from tests.checkpoint.test_resume import test_resume_on_another_split_equals_uninterrupted_run as check_other_split
from tests.support.commands import train_here

# Fixtures.
__all__ = ["folder", "half_way"]
pytestmark = pytest.mark.campaign


def test_changed_settings_are_told_with_their_first_step(tmp_path: Path) -> None:
    run = [f"run_dir={tmp_path / 'run'}", "name=run", "checkpoint.every=0"]
    assert "from step" not in train_here(*run, "train.steps=1").out
    changed = ["train.steps=2", "optim.lr=1e-2", "optim.grad_clip=0", "sched=constant"]
    outcome = train_here(*run, *changed, "data.micro_batch=2")
    assert outcome.code == 0, outcome.err
    assert [line for line in outcome.out.splitlines() if line.startswith("from step 2 on: ")] == [
        "from step 2 on: train.steps=2, before 1",
        "from step 2 on: data.micro_batch=2, before 1",
        "from step 2 on: optim.lr=0.01, before 0.001",
        "from step 2 on: optim.grad_clip=0.0, before 1.0",
        "from step 2 on: sched.kind=constant, before cosine",
    ]


def test_run_goes_on_with_its_rule_of_labels(tmp_path: Path) -> None:
    """Null is the rule that the run began with, and for a new one that of its documents."""
    reset, key = ["data.reset_state_at_document=true", "checkpoint.every=0"], "labels_across_documents"
    old, new = (tmp_path / name for name in ("old", "new"))
    assert train_here(f"run_dir={old}", *reset, f"data.{key}=true", "train.steps=1").code == 0
    refused = train_here(f"run_dir={old}", *reset, f"data.{key}=false", "train.steps=2")
    assert refused.errors[0].startswith(f"data.{key}=False: the run in {old} has True and can only go on with that;")
    for run, steps, rule in ((old, 2, "true"), (new, 1, "false"), (new, 2, "false")):
        outcome = train_here(f"run_dir={run}", *reset, f"train.steps={steps}")
        assert outcome.code == 0, outcome.err
        assert f"  {key}: {rule}\n" in (run / "config.yaml").read_text()


def test_run_ended_before_first_checkpoint_starts_again(tmp_path: Path) -> None:
    settings = [f"run_dir={tmp_path / 'run'}", "train.steps=3", "checkpoint.every=100"]
    with mock.patch("zeco_train.training.trainer.Trainer.save", side_effect=KeyboardInterrupt):
        assert train_here(*settings).code == 130
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["lock"]
    outcome = train_here(*settings)
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("world_size", [2, 4])
def test_resume_is_bit_identical(world_size: int, tmp_path: Path) -> None:
    check_resume(world_size, tmp_path)


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [(2, ["sp=zeco", "parallel=ddp", "train.segments=2"]), (4, ["sp=lasp1", "sp.size=2", "parallel=hsdp"])],
    ids=["2 ranks, 2 segments", "other groups of 4"],
)
def test_resume_on_another_split_equals_uninterrupted_run(
    half_way: dict[str, Any], folder: Path, tmp_path: Path, world_size: int, overrides: list[str]
) -> None:
    check_other_split(half_way, folder, tmp_path, world_size, overrides)
