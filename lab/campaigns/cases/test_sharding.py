"""Shards of any size, and what resumes from them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.test_resume import _forget
from tests.support.distributed import run_distributed
from tests.support.training import largest_difference, train

pytestmark = pytest.mark.campaign


_RUN = ["model=mamba2_tiny", "model.hidden_size=24", "model.num_heads=6", "model.head_dim=8", "model.state_size=5"]


_RUN += ["model.intermediate_size=0", "data.seq_len=96", "train.steps=4", "checkpoint.every=2", "checkpoint.keep=0"]


def _resumed(rank: int, world_size: int, folder: str, dtype: str, half_way: str) -> dict[str, Any]:
    """Four steps; with `half_way` the last two of them, from a copy of that run's checkpoint of step 2."""
    if half_way and rank == 0:
        shutil.copytree(half_way, folder)
        shutil.rmtree(Path(folder, "checkpoints", "step_00000004"))
    dist.barrier()
    split = ["parallel=zero3", "sp=lasp2", "sp.size=2"] if world_size == 2 else ["parallel=ddp", "sp=dp"]
    return train(rank, world_size, folder, *_RUN, f"train.dtype={dtype}", *split)


@pytest.mark.parametrize(
    ("dtype", "ranks"),
    [("bf16", 2), ("fp64", 1)],
    ids=["bf16", "fp64 on one rank"],
)
def test_training_resumes_from_a_checkpoint(dtype: str, ranks: int, tmp_path: Path) -> None:
    """Bit for bit on the same ranks; the masters of all parameters are stored in one dtype."""
    whole, resumed = str(tmp_path / "whole"), str(tmp_path / "resumed")
    unbroken = run_distributed(_resumed, 2, whole, dtype, "")[0]
    found = run_distributed(_resumed, ranks, resumed, dtype, whole)[0]
    assert [row["step"] for row in found["rows"]] == [1, 2, 3, 4]
    for name, expected in unbroken["parameters"].items():
        assert expected.dtype is (torch.float64 if dtype == "fp64" else torch.float32), name
        error = (found["parameters"][name] - expected).norm() / expected.norm()
        assert error <= (0 if ranks == 2 else 1e-9), name


def _resume(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """A run within groups of two, then resumed from step 2 within groups of each size."""
    steps = ["train.steps=6", "checkpoint.every=2", "checkpoint.keep=0", "data.global_batch=4"]
    common = ["train.dtype=fp64", "sp=lasp2", "sp.size=2", *steps]
    results = {"unbroken": train(rank, world_size, f"{folder}/2", *common, "parallel.shard_size=2")}
    for shard_size in (1, 2, 4):
        path = Path(folder, f"resumed_{shard_size}")
        dist.barrier()
        if rank == 0:
            shutil.copytree(Path(folder, "2"), path)
            _forget(path, 2)
        dist.barrier()
        results[str(shard_size)] = train(rank, world_size, path, *common, f"parallel.shard_size={shard_size}")
    return results


def test_checkpoints_resume_within_other_groups(tmp_path: Path) -> None:
    results = run_distributed(_resume, 4, str(tmp_path))[0]
    unbroken = results.pop("unbroken")
    assert [row["step"] for row in unbroken["rows"]] == [1, 2, 3, 4, 5, 6]
    for shard_size, resumed in results.items():
        assert len(resumed["sequence_ids"]) == 4
        for key in ("loss", "grad_norm", "val_loss"):
            error = largest_difference(resumed["rows"], unbroken["rows"], key)
            # Groups of other sizes add gradients up in another order.
            assert error <= (0 if shard_size == "2" else 1e-9), (shard_size, key)
