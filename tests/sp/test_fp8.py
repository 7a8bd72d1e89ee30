"""With `train.matmul=fp8` models train alike on one rank and on several, and whatever is recomputed.

In fp64, where a sum in another order moves almost no number over a step of fp8. In fp32 it moves some.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.exactness_matrix import TOLERANCE, tiny
from lab.hybrid_matrix import HYBRIDS
from tests.support.distributed import run_distributed
from tests.support.sp_reference import TIMEOUT, build_scans
from tests.support.steps import GLOBAL_BATCH, Case, Result, check, make_mesh, run_steps, worst, write_documents
from zeco_train.distributed.config import Strategy
from zeco_train.ops.linear import Matmul
from zeco_train.ops.recompute import Recompute
from zeco_train.sp.attention.method_registry import METHODS, build_attention

pytestmark = pytest.mark.numeric

# A state's decays, a convolution and a stacked projection, and softmax layers.
MODELS = {"gla": tiny("gla"), "gated_deltanet": tiny("gated_deltanet"), "mamba2, hybrid": HYBRIDS["mamba2"]}
# (scan, documents, segments, recompute, strategy); lab/campaigns/cases/test_fp8.py has others.
SPLIT = ("two_shot", True, 1, Recompute.none, Strategy.zero2)


def case_of(model: str, documents: bool = False, **settings: Any) -> Case:
    batch = 1 if documents else GLOBAL_BATCH
    return Case(
        documents=documents, micro_batch=batch, model=MODELS[model], **{"matmul": Matmul.fp8, "steps": 2, **settings}
    )


def whole(rank: int, world_size: int, store: str, cases: dict[Any, Case]) -> dict[Any, Result]:
    mesh, scan = make_mesh(rank, world_size, 1), build_scans((0,), "dp")["dp"]
    return {key: run_steps(case, scan, mesh, store) for key, case in cases.items()}


def split(
    rank: int, world_size: int, store: str, expected: bytes, models: list[str], splits: Sequence[tuple[Any, ...]]
) -> None:
    """Sequences over ranks; and with documents whole ones on each rank, of sharded weights."""
    results: dict[tuple[str, bool], Result] = pickle.loads(expected)
    mesh, whole_mesh = make_mesh(rank, world_size, world_size), make_mesh(rank, world_size, 1)
    scans = build_scans(tuple(range(world_size)), *(row[0] for row in splits))
    alone = build_scans((rank,), "dp")["dp"]
    method = build_attention(METHODS["all_gather"], dist.new_group(range(world_size)), TIMEOUT)
    for model in models:
        for scan, documents, segments, recompute, strategy in splits:
            case = case_of(model, documents, segments=segments, recompute=recompute, strategy=strategy)
            where = f"{model}, {scan}, {strategy.value}, {recompute.value}, {world_size} ranks"
            found = run_steps(case, scans[scan].replaced(attention=method), mesh, store)
            check(found, results[model, documents], TOLERANCE, where)
    for strategy in (Strategy.ddp, Strategy.zero3) if world_size == GLOBAL_BATCH else ():
        case = case_of(models[0], True, strategy=strategy)
        check(run_steps(case, alone, whole_mesh, store), results[models[0], True], TOLERANCE, strategy.value)
    for used in scans.values():
        used.drain()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_documents(tmp_path_factory.mktemp("fp8") / "store"))


@pytest.fixture(scope="module")
def of_gla(store: str) -> dict[Any, Result]:
    """On one rank, with documents in each way of recomputation, and not in fp8."""
    cases = {("gla", True): case_of("gla", True), "bf16": case_of("gla", True, matmul=Matmul.bf16)}
    cases |= {each: case_of("gla", True, recompute=each) for each in Recompute if each is not Recompute.none}
    found = run_distributed(whole, 1, store, cases)[0]
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_gla_in_fp8_trains_alike_on_two_ranks(store: str, of_gla: dict[Any, Result]) -> None:
    expected = {("gla", True): of_gla["gla", True]}
    run_distributed(split, 2, store, pickle.dumps(expected), ["gla"], [SPLIT])


@pytest.mark.slow
def test_recomputation_in_fp8_has_the_same_bits(of_gla: dict[Any, Result]) -> None:
    plain = of_gla["gla", True]
    for result in (of_gla[Recompute.selective], of_gla[Recompute.full]):
        assert result.losses == plain.losses
        assert result.norms == plain.norms
        assert all(torch.equal(result.parameters[name], plain.parameters[name]) for name in plain.parameters)


@pytest.mark.slow
def test_fp8_changes_losses_by_its_rounding(of_gla: dict[Any, Result]) -> None:
    assert 1e-5 < worst(of_gla["gla", True], of_gla["bf16"])["losses"] < 0.1
