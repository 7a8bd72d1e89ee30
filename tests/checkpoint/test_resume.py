"""Resume: bit-identical on the same split, within 1e-9 (fp64) on another; `checkpoint.load`; `checkpoint.keep`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import snapshot
from tests.support.distributed import on_ranks, run_distributed
from tests.support.training import largest_difference, train
from zeco_train.checkpoint.files import complete_checkpoints
from zeco_train.errors import CheckpointError

pytestmark = pytest.mark.numeric

STEPS = ["train.steps=3", "checkpoint.every=1", "checkpoint.keep=0", "train.eval_sequences=1"]
STEPS += ["data.seq_len=240", "data.global_batch=2"]


def _forget(run_dir: Path, step: int) -> None:
    """Make the run look as if it had been killed after the checkpoint of `step`."""
    for path in complete_checkpoints(run_dir):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)


def _resume_on_the_same_split(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    overrides = ["sp=zeco", f"sp.size={min(2, world_size)}", "parallel=zero3", *STEPS]
    results = {"unbroken": train(rank, world_size, f"{folder}/same", *overrides)}
    # Twice from step 2: an earlier resume must leave no trace.
    for name in ("once", "twice"):
        torch.distributed.barrier()
        if rank == 0:
            _forget(Path(folder, "same"), 2)
        torch.distributed.barrier()
        torch.manual_seed(1234)  # the RNG state before a resume must not matter
        results[name] = train(rank, world_size, f"{folder}/same", *overrides)
    return results


def _train_half_way(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Train in fp64; other splits resume this run from step 1."""
    return train(rank, world_size, f"{folder}/fp64", "train.dtype=fp64", "sp=lasp2", "parallel=zero2", *STEPS)


def _resume_on_another_split(rank: int, world_size: int, folder: str, overrides: list[str]) -> dict[str, Any]:
    return train(rank, world_size, folder, "train.dtype=fp64", *STEPS, *overrides)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def half_way(folder: Path) -> dict[str, Any]:
    return run_distributed(_train_half_way, 2, str(folder))[0]


def test_resume_is_bit_identical(tmp_path: Path) -> None:
    check_resume(1, tmp_path)


def check_resume(world_size: int, tmp_path: Path) -> None:
    """One rank, a sequence-parallel group of two, or two groups; every start appends its metrics rows."""
    runs = run_distributed(_resume_on_the_same_split, world_size, str(tmp_path))[0]
    unbroken = runs["unbroken"]
    for name in ("once", "twice"):
        resumed = runs[name]
        assert resumed["sequence_ids"] == unbroken["sequence_ids"][2:]
        for key in ("loss", "grad_norm", "lr", "tokens", "val_loss"):
            assert [row.get(key) for row in resumed["rows"]] == [row.get(key) for row in unbroken["rows"]], (name, key)
        for parameter, value in unbroken["parameters"].items():
            assert torch.equal(resumed["parameters"][parameter], value), (name, parameter)
    lines = (tmp_path / "same" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "overrides"), [(1, ["sp=dp"])])
def test_resume_on_another_split_equals_uninterrupted_run(
    half_way: dict[str, Any], folder: Path, tmp_path: Path, world_size: int, overrides: list[str]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(folder / "fp64", run_dir)
    _forget(run_dir, 1)
    resumed = run_distributed(_resume_on_another_split, world_size, str(run_dir), overrides)[0]
    assert len(resumed["sequence_ids"]) == 2
    for key in ("loss", "grad_norm", "val_loss"):
        # The guaranteed tolerance between splits in fp64.
        assert largest_difference(resumed["rows"], half_way["rows"], key) <= 1e-9, key


@pytest.mark.slow
@on_ranks(1)
def test_resume_sets_damaged_aside_and_uses_new_settings(rank: int, world_size: int, tmp_path: Path) -> None:
    short = ["train.steps=4", "checkpoint.every=2", "checkpoint.keep=0", "train.eval_sequences=0", "data.seq_len=96"]
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    first = train(rank, world_size, run, *short)
    # Flip one bit of the newest checkpoint: its size is unchanged, and loading it would raise no error.
    with (checkpoints / "step_00000004" / "__0_0.distcp").open("r+b") as file:
        file.seek(2000)
        byte = file.read(1)
        file.seek(2000)
        file.write(bytes([byte[0] ^ 1]))
    train(rank, world_size, run, *short, "train.steps=2")
    assert (checkpoints / "latest").resolve() == (checkpoints / "step_00000002").resolve(strict=True)
    again = train(rank, world_size, run, *short, "optim.weight_decay=0.7", "optim.betas=[0.5,0.6]")
    assert again["sequence_ids"] == first["sequence_ids"][2:]
    (checkpoints / "step_00000004" / "run.json").unlink()
    (checkpoints / "step_00000002" / "__0_0.distcp").unlink()
    before = snapshot(checkpoints)
    # It must not restart from scratch: that would silently discard the run.
    with pytest.raises(CheckpointError, match=r"step_00000004: damaged: run.json is missing; there is no sound one"):
        train(rank, world_size, run, *short, "train.steps=6")
    assert snapshot(checkpoints) == before
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["latest", "lock", "step_00000002", "step_00000004", "step_00000004.damaged"]
    log = (run / "logs" / "rank_0.log").read_text()
    damage = "step_00000004: damaged: __0_0.distcp is not what was written (SHA-256); it is step_00000004.damaged now, "
    assert damage in log
    assert "and the run goes on from step_00000002: 2 steps are done again" in log
    checkpoint = complete_checkpoints(run)[-1]
    groups = torch.distributed.checkpoint.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {key: None for key in groups if key.endswith((".weight_decay", ".betas"))}
    torch.distributed.checkpoint.load(state, checkpoint_id=str(checkpoint))
    assert {value for key, value in state.items() if key.endswith(".weight_decay")} == {0.7, 0.0}
    assert all(list(value) == [0.5, 0.6] for key, value in state.items() if key.endswith(".betas"))


@pytest.mark.slow
@on_ranks(1)
def test_keep_limits_checkpoints_and_load_reads_weights(rank: int, world_size: int, tmp_path: Path) -> None:
    keep = ["train.steps=4", "checkpoint.every=1", "checkpoint.keep=2", "data.seq_len=96", "train.eval_sequences=0"]
    first = train(rank, world_size, tmp_path / "first", *keep)
    load = [f"checkpoint.load='{tmp_path / 'first'}'", "optim.lr=1e-20", "optim.weight_decay=0", "train.steps=1"]
    loaded = train(rank, world_size, tmp_path / "loaded", *load, "data.seq_len=48", "seed=7")
    with pytest.raises(CheckpointError, match="the run's configuration makes it"):
        train(rank, world_size, tmp_path / "other", *load, "model.hidden_size=96")
    names = [path.name for path in complete_checkpoints(tmp_path / "first")]
    assert names == ["step_00000003", "step_00000004"]
    assert sorted(path.name for path in (tmp_path / "first" / "checkpoints").iterdir()) == ["latest", "lock", *names]
    assert (tmp_path / "first" / "checkpoints" / "latest").readlink() == Path(names[-1])
    for parameter, value in first["parameters"].items():
        # One step with a negligible learning rate changes no fp32 value.
        assert torch.equal(loaded["parameters"][parameter], value), parameter
    assert [row["step"] for row in loaded["rows"]] == [1]
