"""Models in fp8 on any number of ranks, and the control: a scale of all tokens."""

from __future__ import annotations

import itertools
import pickle
from unittest import mock

import pytest
import torch
from torch import Tensor

from lab.exactness_matrix import TOLERANCE
from models import projections
from tests.sp.test_fp8 import MODELS, SPLIT, case_of, split, store, whole
from tests.support.distributed import run_distributed
from tests.support.sp_reference import build_scans
from tests.support.steps import Result, make_mesh, run_steps, worst
from zeco_train.distributed.config import Strategy
from zeco_train.ops.linear import Fp8Rows, quantise_rows
from zeco_train.ops.recompute import Recompute

__all__ = ["store"]

pytestmark = [pytest.mark.campaign, pytest.mark.numeric]

SPLITS = (
    ("chain/3", False, 1, Recompute.full, Strategy.zero3),
    ("lasp2", True, 1, Recompute.selective, Strategy.ddp),
    SPLIT,
)


def with_one_scale(*parts: Tensor) -> Fp8Rows:
    """Fp8Rows of one scale, that of the whole tensor: wrong on purpose."""
    x = torch.cat(parts, -1)
    rows, largest = quantise_rows(x), quantise_rows(x.reshape(1, -1)).scales
    return Fp8Rows((x / largest.to(x.dtype)).to(rows.values.dtype).contiguous(), largest.expand_as(rows.scales))


def whole_and_split_with_one_scale(rank: int, world_size: int, store: str, sp_size: int) -> Result:
    mesh, scans = make_mesh(rank, world_size, sp_size), build_scans(tuple(range(sp_size)))
    with mock.patch.object(projections, "quantise_rows", with_one_scale):
        return run_steps(case_of("gla"), scans["lasp2" if sp_size > 1 else "dp"], mesh, store)


@pytest.mark.parametrize("world_size", [2, 4])
def test_models_in_fp8_train_alike_on_any_number_of_ranks(world_size: int, store: str) -> None:
    cells = itertools.product(MODELS, (False, True))
    expected = run_distributed(whole, 1, store, {cell: case_of(*cell) for cell in cells})[0]
    run_distributed(split, world_size, store, pickle.dumps(expected), [*MODELS], SPLITS, timeout=1200)


def test_scale_of_all_tokens_would_depend_on_the_split(store: str) -> None:
    """The control: with such a scale, the check of the other tests fails."""
    one = run_distributed(whole_and_split_with_one_scale, 1, store, 1)[0]
    two = run_distributed(whole_and_split_with_one_scale, 2, store, 2)[0]
    assert worst(two, one)["losses"] > 1e3 * TOLERANCE
