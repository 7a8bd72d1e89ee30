"""Muon over strategies, scans and ranks."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.support.distributed import run_distributed
from tests.support.sp_reference import build_scans
from tests.support.steps import GLOBAL_BATCH, Case, Result, check, make_mesh, run_steps, write_documents
from tests.support.training import largest_difference, train
from tests.training.test_muon import SETTINGS
from zeco_train.distributed.config import Strategy

pytestmark = pytest.mark.campaign

BACKENDS = ("lasp1", "lasp2", "chain/3", "two_shot")


def _case(strategy: Strategy, steps: int, dp_size: int = 1) -> Case:
    # One micro-batch a step: Muon starts from the sum of their gradients, as AdamW does.
    return Case(strategy, micro_batch=GLOBAL_BATCH // dp_size, steps=steps, optim=SETTINGS)


def _reference(rank: int, world_size: int, store: str) -> dict[int, Result]:
    mesh, scan = make_mesh(rank, world_size, 1), build_scans((0,), "dp")["dp"]
    return {steps: run_steps(_case(Strategy.ddp, steps), scan, mesh, store) for steps in (10, 2)}


def _on_ranks(rank: int, world_size: int, store: str, sp_size: int, reference: bytes) -> None:
    expected: dict[int, Result] = pickle.loads(reference)
    mesh = make_mesh(rank, world_size, sp_size)
    # Creating process groups is collective: all ranks create all groups.
    scans = [build_scans(tuple(range(first, first + sp_size))) for first in range(0, world_size, sp_size)][mesh.dp_rank]
    # On four ranks the two sizes of groups have each half of the pairs of strategy and backend.
    half = range(1) if world_size == 2 else range(2) if sp_size == 4 else range(2, 4)
    for number, strategy in enumerate(Strategy):
        for turn in half:
            backend = BACKENDS[(number + turn) % len(BACKENDS)]
            # Each strategy takes ten steps on four ranks. Another backend changes the gradients only, and two use them.
            steps = 10 if turn == half[0] and (world_size == 4 or strategy is Strategy.zero2) else 2
            found = run_steps(_case(strategy, steps, mesh.dp_size), scans[backend], mesh, store)
            # The contract. Measured 2e-13 at most.
            check(found, expected[steps], 1e-9, f"{strategy}, {backend}")


@pytest.mark.parametrize(
    ("world_size", "sp_size"),
    [
        pytest.param(2, 2, marks=pytest.mark.campaign),
        pytest.param(4, 4, marks=pytest.mark.campaign),
        pytest.param(4, 2, marks=pytest.mark.campaign),
    ],
)
def test_ten_steps_equal_one_rank(world_size: int, sp_size: int, tmp_path: Path) -> None:
    """Losses, norms, gradients and parameters, for every strategy; on four ranks each with every backend."""
    store = str(write_documents(tmp_path / "store"))
    reference = pickle.dumps(run_distributed(_reference, 1, store)[0])
    run_distributed(_on_ranks, world_size, store, sp_size, reference)


def _train(rank: int, world_size: int, folder: str, *overrides: str) -> dict[str, Any]:
    arguments = ["optim=muon", "train.dtype=fp64", "train.steps=4", "train.eval_sequences=0", "checkpoint.every=2"]
    return train(rank, world_size, folder, *arguments, *overrides)


def test_resume_on_another_split_equals_unbroken_run(tmp_path: Path) -> None:
    run_dir, rest = str(tmp_path / "run"), "sched=constant"
    expected = run_distributed(_train, 1, str(tmp_path / "unbroken"), rest)[0]
    run_distributed(_train, 2, run_dir, rest, "parallel=zero3", "train.steps=2")
    resumed = run_distributed(_train, 2, run_dir, rest, "parallel=hsdp", "sp=lasp2")[0]
    assert len(resumed["sequence_ids"]) == 2
    for key in ("loss", "grad_norm"):
        assert largest_difference(resumed["rows"], expected["rows"], key) <= 1e-9, key
    for name, parameter in expected["parameters"].items():
        assert (resumed["parameters"][name] - parameter).norm() <= 1e-9 * parameter.norm(), name
