"""Models with softmax layers train alike on one rank and on several: every scan of states, every method.

`python -m lab.hybrid_matrix` has each scan with each method and model, with and without documents.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from lab.hybrid_matrix import Row, Whole, case_of, compare, reference
from tests.support.distributed import run_distributed
from tests.support.sp_reference import TIMEOUT, build_scans
from tests.support.steps import make_mesh, run_steps, worst, write_documents
from zeco_train.collectives.wire import Transfer, Wire
from zeco_train.distributed.config import Strategy
from zeco_train.ops.recompute import Recompute
from zeco_train.sp.attention.method_registry import METHODS, build_attention

pytestmark = pytest.mark.numeric

# Each value of each axis.
ROWS: list[Row] = [
    ("gla, window", "lasp1", "all_gather", False, Recompute.none, Strategy.zero2),
    ("gla, wide window", "lasp2", "ulysses", True, Recompute.selective, Strategy.zero3),
    ("mamba2", "chain/3", "ring", True, Recompute.full, Strategy.hsdp),
    ("mamba2", "two_shot", "all_gather", True, Recompute.none, Strategy.ddp),
    ("gla, window", "doubling", "ring", True, Recompute.full, Strategy.zero2),
    ("gla, wide window", "chain/3", "all_gather", False, Recompute.selective, Strategy.zero2),
]


def sent(rank: int, world_size: int, store: str) -> dict[str, int]:
    """Bytes that all-to-alls of softmax attention send in a step, by recomputation."""
    mesh, states = make_mesh(rank, world_size, world_size), build_scans((0, 1), "lasp2")["lasp2"]
    method = build_attention(METHODS["all_gather"], dist.new_group(range(world_size)), TIMEOUT)
    scan = states.replaced(attention=method)
    found, send = dict.fromkeys((each.value for each in Recompute), 0), Wire.all_to_all
    for recompute in Recompute:

        def count(wire: Wire, into: Tensor, parts: Tensor, *rest: Any, kind: str = recompute.value) -> Transfer:
            found[kind] += parts.nbytes * ("softmax" in wire.operation)
            return send(wire, into, parts, *rest)

        with mock.patch.object(Wire, "all_to_all", count):
            run_steps(case_of("mamba2", False, recompute), scan, mesh, store)
    scan.drain()
    return found


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_documents(tmp_path_factory.mktemp("hybrids") / "store"))


@pytest.fixture(scope="module")
def expected(store: str) -> Whole:
    found = run_distributed(reference, 1, store)[0]
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_hybrids_train_alike_with_every_scan_and_method(store: str, expected: Whole) -> None:
    compare(2, store, expected, ROWS)


@pytest.mark.slow
def test_recomputation_fetches_no_keys_twice(store: str) -> None:
    for found in run_distributed(sent, 2, store):
        assert found["none"] > 0
        assert found["none"] == found["selective"] == found["full"]


@pytest.mark.slow
def test_windows_and_documents_change_gradients(expected: Whole) -> None:
    narrow, plain = expected["gla, window", False], expected["gla, wide window", False]
    assert worst(narrow, plain)["gradients"] > 1e-3
    assert worst(narrow, expected["gla, window", True])["gradients"] > 1e-3
