"""`parallel.shard_size`: shards within fewer ranks than the world change what a rank holds, and no result."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.distributed import run_distributed
from tests.support.sp_reference import RecordedExchange
from tests.support.steps import Case, Result, make_mesh, run_steps, worst, write_documents
from zeco_train.config.schema import load_config
from zeco_train.distributed.config import ParallelConfig, Strategy, count_shards
from zeco_train.errors import ConfigError
from zeco_train.sp.backend_registry import SPConfig
from zeco_train.sp.exchange import connect, local_exchange
from zeco_train.training.optim.optimizer_registry import OptimConfig, OptimizerName

pytestmark = pytest.mark.numeric

BATCH = 4
# Strategy, shard size, sp size, segments, optimizer.
GRID = [(Strategy.zero2, shard_size, sp_size, 1, "adamw") for shard_size in (1, 2, 4) for sp_size in (1, 2, 4)]
FEW = [(Strategy.zero3, 2, 4, 1, "adamw")]
OTHERS = [
    (Strategy.zero2, -1, 2, 1, "adamw"),
    (Strategy.zero3, 2, 4, 2, "adamw"),
    (Strategy.hsdp, 2, 4, 1, "adamw"),
    (Strategy.hsdp, 4, 2, 2, "muon"),
    (Strategy.zero2, 2, 1, 1, "muon"),
    (Strategy.zero3, 1, 2, 1, "muon"),
]


def _train(rank: int, world_size: int, store: str, cases: list[Any]) -> list[Result]:
    """A step of each case."""
    results = []
    for strategy, shard_size, sp_size, segments, optimizer in cases:
        mesh = make_mesh(rank, world_size, sp_size)
        exchange = local_exchange() if sp_size == 1 else connect(SPConfig(), mesh.scan_groups, mesh.timeout)
        settings: dict[str, Any] = {"shard_size": shard_size, "segments": segments, "global_batch": BATCH, "steps": 1}
        case = Case(strategy, **settings, optim=OptimConfig(name=OptimizerName[optimizer], lr=1e-2))
        results.append(run_steps(case, RecordedExchange(exchange), mesh, store))
    return results


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_documents(tmp_path_factory.mktemp("shards") / "store"))


@pytest.mark.slow  # tests/distributed/test_parallelize.py has the norms of three layers
@pytest.mark.parametrize(
    "cases",
    [FEW, pytest.param(GRID, marks=pytest.mark.campaign), pytest.param(OTHERS, marks=pytest.mark.campaign)],
    ids=["few", "zero2", "others"],
)
def test_losses_and_norms_are_those_of_one_rank(cases: list[Any], store: str) -> None:
    optimizers = sorted({case[-1] for case in cases})
    alone = [(Strategy.zero2, 1, 1, 1, optimizer) for optimizer in optimizers]
    expected = dict(zip(optimizers, run_distributed(_train, 1, store, alone)[0], strict=True))
    by_rank = run_distributed(_train, 4, store, cases)
    for number, case in enumerate(cases):
        reference, held = expected[case[-1]], [results[number].held for results in by_rank]
        for results in by_rank:
            errors = worst(results[number], reference)
            # The contract. Measured 3e-15 at most.
            assert max(errors["losses"], errors["norms"]) <= 1e-9, case
        # Each group of `shard_size` adjacent ranks holds the model once.
        shard_size = case[1] if case[1] > 0 else 4
        groups = [sum(held[first : first + shard_size]) for first in range(0, 4, shard_size)]
        assert groups == [reference.held] * (4 // shard_size), case


def test_mistakes_name_the_size() -> None:
    for arguments, message in (
        (["parallel=ddp", "parallel.shard_size=2"], "parallel.shard_size=2: ddp shards nothing"),
        (["parallel.shard_size=0"], "parallel.shard_size=0: must be ≥ 1, or -1 for the strategy's default"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}"):
            load_config(arguments)
    with pytest.raises(ConfigError, match=r"^parallel.shard_size=3: must divide the world size 4: 1, 2, 4, or -1"):
        count_shards(Strategy.zero3, 3, 4, 2)


def test_default_is_the_world_and_with_hsdp_a_sequence() -> None:
    strategies = Strategy.ddp, Strategy.zero2, Strategy.zero3
    assert [count_shards(strategy, -1, 8, 2) for strategy in strategies] == [1, 8, 8]
    assert [count_shards(Strategy.hsdp, size, 8, 2) for size in (-1, 4)] == [2, 4]
    assert str(ParallelConfig()) == "zero2"
    assert str(ParallelConfig(Strategy.hsdp, shard_size=4)) == "hsdp within 4 ranks"
