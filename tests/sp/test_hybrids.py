"""Models with softmax layers train alike on one rank and on several: every scan of states with every method."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from models.attn import AttnConfig
from models.config import LanguageModelConfig
from tests.exactness_matrix import PLAIN, TOLERANCE, tiny
from tests.support.distributed import run_distributed
from tests.support.sp_reference import TIMEOUT, build_scans
from tests.support.steps import GLOBAL_BATCH, Case, Result, check, make_mesh, run_steps, worst, write_documents
from zeco_train.collectives.wire import Transfer, Wire
from zeco_train.distributed.parallelize import Strategy
from zeco_train.ops.recompute import Recompute
from zeco_train.sp.attention.registry import METHODS, build_attention

pytestmark = pytest.mark.numeric

# Of two shards of 120 tokens and four of 60, a window within a shard, and one wider than any; and no window.
ATTN = AttnConfig(every=2, num_heads=4, num_kv_heads=2, head_dim=6, qk_norm=True, gate=True)
HYBRIDS: dict[str, LanguageModelConfig] = {
    "gla, window": dataclasses.replace(tiny("gla"), attn=dataclasses.replace(ATTN, window=50)),
    "gla, wide window": dataclasses.replace(tiny("gla"), attn=dataclasses.replace(ATTN, window=150)),
    "mamba2": dataclasses.replace(tiny("mamba2"), attn=dataclasses.replace(ATTN, offset=0)),
}
Row = tuple[str, str, str, bool, Recompute, Strategy]
# (model, scan, method, documents, recompute, strategy): each value meets several of the others.
COVERING: list[Row] = [
    ("mamba2", "lasp1", "all_gather", True, Recompute.full, Strategy.zero2),
    ("gla, window", "lasp2", "ulysses", True, Recompute.full, Strategy.zero3),
    ("mamba2", "chain/3", "ring", True, Recompute.full, Strategy.hsdp),
    ("gla, wide window", "two_shot", "ring", False, Recompute.none, Strategy.ddp),
    ("gla, window", "doubling", "all_gather", False, Recompute.selective, Strategy.hsdp),
    ("mamba2", "two_shot", "ulysses", False, Recompute.none, Strategy.zero3),
    ("gla, wide window", "chain/3", "ring", True, Recompute.full, Strategy.zero2),
]


def _all() -> list[Row]:
    cells = itertools.product(HYBRIDS, PLAIN, METHODS, (False, True))
    return [(*cell, recompute, Strategy.zero2) for cell, recompute in zip(cells, itertools.cycle(Recompute))]


# Results on one rank by model, documents and number of steps.
Whole = dict[tuple[str, bool, int], Result]


def _case(model: str, documents: bool, steps: int, recompute: Recompute = Recompute.none, **settings: Strategy) -> Case:
    # Gradients of two micro-batches are added in the cases with documents.
    batch = 1 if documents else GLOBAL_BATCH
    return Case(
        documents=documents, micro_batch=batch, steps=steps, model=HYBRIDS[model], recompute=recompute, **settings
    )


def reference(rank: int, world_size: int, store: str) -> Whole:
    mesh, scan = make_mesh(rank, world_size, 1), build_scans((0,))["dp"]
    cells = itertools.product(HYBRIDS, (False, True), (1, 3))
    return {cell: run_steps(_case(*cell), scan, mesh, store) for cell in cells}


def sharded(rank: int, world_size: int, store: str, expected: bytes, rows: list[Row], steps: int) -> None:
    whole: Whole = pickle.loads(expected)
    mesh, scans = make_mesh(rank, world_size, world_size), build_scans(tuple(range(world_size)))
    methods = {
        name: build_attention(spec, dist.new_group(range(world_size)), TIMEOUT) for name, spec in METHODS.items()
    }
    for model, scan, method, documents, recompute, strategy in rows:
        scans[scan].attention = methods[method]
        result = run_steps(_case(model, documents, steps, recompute, strategy=strategy), scans[scan], mesh, store)
        where = f"{model}, {scan}, {method}, {recompute.value}, {strategy.value}, {world_size} ranks"
        check(result, whole[model, documents, steps], TOLERANCE, f"{where}{', documents' * documents}")
    for used in scans.values():
        used.drain()
    dist.barrier()  # keep ranks alive until their peers have received everything


def sent(rank: int, world_size: int, store: str) -> dict[str, int]:
    """Bytes that all-to-alls of softmax attention send in three steps, by recomputation."""
    mesh, scan, spec = make_mesh(rank, world_size, world_size), build_scans((0, 1))["lasp2"], METHODS["all_gather"]
    scan.attention = build_attention(spec, dist.new_group(range(world_size)), TIMEOUT)
    found, send = dict.fromkeys((each.value for each in Recompute), 0), Wire.all_to_all
    for recompute in Recompute:

        def count(wire: Wire, into: Tensor, parts: Tensor, *rest: Any, kind: str = recompute.value) -> Transfer:
            found[kind] += parts.nbytes * ("softmax" in wire.operation)
            return send(wire, into, parts, *rest)

        with mock.patch.object(Wire, "all_to_all", count):
            run_steps(_case("mamba2", False, 3, recompute), scan, mesh, store)
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


def test_covering_rows_have_every_scan_method_recomputation_and_strategy() -> None:
    _, scans, methods, _, recomputes, strategies = (set(column) for column in zip(*COVERING, strict=True))
    assert (scans, methods) == ({*PLAIN}, {*METHODS})
    assert (recomputes, strategies) == ({*Recompute}, {*Strategy})


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_hybrids_train_alike_for_three_steps(world_size: int, store: str, expected: Whole) -> None:
    # With fewer heads of keys than ranks, too.
    run_distributed(sharded, world_size, store, pickle.dumps(expected), COVERING, 3)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_hybrids_train_alike_with_every_scan_and_method(world_size: int, store: str, expected: Whole) -> None:
    """For one step: gradients of every pair, and the losses before and after an update."""
    run_distributed(sharded, world_size, store, pickle.dumps(expected), _all(), 1, timeout=1800)


@pytest.mark.slow
def test_recomputation_fetches_no_keys_twice(store: str) -> None:
    for found in run_distributed(sent, 2, store):
        assert found["none"] > 0
        assert found["none"] == found["selective"] == found["full"]


def test_windows_and_documents_change_losses(expected: Whole) -> None:
    narrow, plain = expected["gla, window", False, 3], expected["gla, wide window", False, 3]
    assert worst(narrow, plain)["losses"] > 1e-3
    assert worst(narrow, expected["gla, window", True, 3])["losses"] > 1e-3
