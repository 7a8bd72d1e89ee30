"""Models with softmax layers train alike on one rank and on several: every scan of states with every method.

`python -m lab.hybrid_matrix` has each of these pairs with each model, with and without documents.
"""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from lab.exactness_matrix import PLAIN
from lab.hybrid_matrix import HYBRIDS, Row, Whole, case_of, compare, reference
from tests.support.covering import cover_pairs, pairs_of
from tests.support.distributed import run_distributed
from tests.support.sp_reference import TIMEOUT, build_scans
from tests.support.steps import make_mesh, run_steps, worst, write_documents
from zeco_train.collectives.wire import Transfer, Wire
from zeco_train.distributed.config import Strategy
from zeco_train.ops.recompute import Recompute
from zeco_train.sp.attention.method_registry import METHODS, build_attention

pytestmark = pytest.mark.numeric

# Without the strategy, which changes from row to row.
AXES = [*HYBRIDS], [*PLAIN], [*METHODS], [False, True], [*Recompute]
PAIRS: list[Row] = [(*row, each) for row, each in zip(cover_pairs(*AXES), itertools.cycle(Strategy), strict=False)]


def sent(rank: int, world_size: int, store: str) -> dict[str, int]:
    """Bytes that all-to-alls of softmax attention send in three steps, by recomputation."""
    mesh, states = make_mesh(rank, world_size, world_size), build_scans((0, 1), "lasp2")["lasp2"]
    method = build_attention(METHODS["all_gather"], dist.new_group(range(world_size)), TIMEOUT)
    scan = states.replaced(attention=method)
    found, send = dict.fromkeys((each.value for each in Recompute), 0), Wire.all_to_all
    for recompute in Recompute:

        def count(wire: Wire, into: Tensor, parts: Tensor, *rest: Any, kind: str = recompute.value) -> Transfer:
            found[kind] += parts.nbytes * ("softmax" in wire.operation)
            return send(wire, into, parts, *rest)

        with mock.patch.object(Wire, "all_to_all", count):
            run_steps(case_of("mamba2", False, 3, recompute), scan, mesh, store)
    scan.drain()
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_documents(tmp_path_factory.mktemp("hybrids") / "store"))


@pytest.fixture(scope="module")
def expected(store: str) -> Whole:
    found = run_distributed(reference, 1, store)[0]
    assert isinstance(found, dict)
    return found


def test_pairs_have_each_value_with_each_of_another_axis() -> None:
    """Every scan with every method, and so on, in a fifth of the cells of `hybrid_matrix`."""
    found = set().union(*(pairs_of(row[:-1]) for row in PAIRS))
    of_axes = itertools.combinations(enumerate(AXES), 2)
    assert found == {(i, j, a, b) for (i, these), (j, those) in of_axes for a in these for b in those}
    assert len(PAIRS) < 20


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_hybrids_train_alike_with_every_scan_and_method(world_size: int, store: str, expected: Whole) -> None:
    """For one step: gradients of every pair, and the losses before and after an update."""
    compare(world_size, store, expected, PAIRS, 1)


@pytest.mark.slow
def test_recomputation_fetches_no_keys_twice(store: str) -> None:
    for found in run_distributed(sent, 2, store):
        assert found["none"] > 0
        assert found["none"] == found["selective"] == found["full"]


@pytest.mark.slow
def test_windows_and_documents_change_losses(expected: Whole) -> None:
    narrow, plain = expected["gla, window", False, 3], expected["gla, wide window", False, 3]
    assert worst(narrow, plain)["losses"] > 1e-3
    assert worst(narrow, expected["gla, window", True, 3])["losses"] > 1e-3
