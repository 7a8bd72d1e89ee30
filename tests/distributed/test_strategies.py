"""ZeRO-1 and torch's DDP train as `ddp` does, on any ranks, with every optimizer, in segments, with recomputation."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.distributed import run_distributed
from tests.support.sp_reference import RecordedExchange
from tests.support.steps import Case, Result, make_mesh, run_steps, worst, write_documents
from zeco_train.distributed.config import Strategy
from zeco_train.ops.recompute import Recompute
from zeco_train.sp.backend_registry import SPConfig
from zeco_train.sp.exchange import connect, local_exchange
from zeco_train.training.optim.optimizer_registry import OptimConfig, OptimizerName

pytestmark = pytest.mark.numeric

# Three sequences for each of one or three ranks, or two for each of two or four: several micro-batches.
BATCH = 12
# Settings of the cases, over each strategy.
FEW: list[dict[str, Any]] = [
    {"recompute": Recompute.full, "segments": 2},
    {"optim": OptimConfig(name=OptimizerName["muon"], lr=1e-2), "documents": True},
]
ALL: list[dict[str, Any]] = [
    {"recompute": recompute, "segments": segments, "documents": documents, "optim": OptimConfig(name=name, lr=1e-2)}
    for recompute, segments, documents in (
        (Recompute.none, 1, False),
        (Recompute.selective, 2, True),
        (Recompute.full, 4, True),
        (Recompute.full, 1, True),
    )
    for name in OptimizerName
]


def _train(rank: int, world_size: int, store: str, sp_size: int, cases: list[tuple[Strategy, int, Any]]) -> Any:
    mesh = make_mesh(rank, world_size, sp_size)
    results = []
    for strategy, shard_size, settings in cases:
        exchange = local_exchange() if sp_size == 1 else connect(SPConfig(), mesh.scan_groups, mesh.timeout)
        case = Case(strategy, shard_size=shard_size, global_batch=BATCH, **settings)
        results.append(run_steps(case, RecordedExchange(exchange), mesh, store))
    return results


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_documents(tmp_path_factory.mktemp("strategies") / "store"))


@pytest.mark.parametrize(
    ("world_size", "sp_size", "settings"),
    [
        (4, 2, FEW),
        *(
            pytest.param(world_size, sp_size, ALL, marks=pytest.mark.campaign)
            for world_size, sp_size in ((1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4))
        ),
    ],
)
def test_losses_and_parameters_are_those_of_ddp(
    world_size: int, sp_size: int, settings: list[dict[str, Any]], store: str
) -> None:
    strategies = [(Strategy.zero1, -1), (Strategy.torch_ddp, -1)]
    strategies += [(Strategy.zero1, 2)] * (world_size == 4)
    for own in settings:
        cases = [(strategy, size, own) for strategy, size in ((Strategy.ddp, -1), *strategies)]
        by_rank = run_distributed(_train, world_size, store, sp_size, cases)
        expected: Result = by_rank[0][0]
        for number, (strategy, size, _) in enumerate(cases[1:], 1):
            for results in by_rank:
                errors = worst(results[number], expected)
                # Sums over ranks are regrouped; measured: 4e-14 at most.
                assert max(errors.values()) <= 1e-12, (strategy, size, own, errors)
            held = [results[number].held for results in by_rank]
            copies = {1: 1, -1: 1 if strategy is Strategy.zero1 else world_size}.get(size, world_size // size)
            assert sum(held) == copies * expected.held, (strategy, size)
