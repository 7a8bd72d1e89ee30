"""Strategies train as `ddp` does, on any ranks, with every optimizer, in segments, with recomputation."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.support.distributed import run_distributed
from tests.support.sp_reference import RecordedExchange
from tests.support.steps import Case, Result, make_mesh, run_steps, worst, write_documents
from tests.support.training import largest_difference, train
from zeco_train.config.schema import load_config
from zeco_train.distributed.config import ParallelConfig, Strategy, count_shards
from zeco_train.errors import ConfigError
from zeco_train.ops.recompute import Recompute
from zeco_train.sp.backend_registry import SPConfig
from zeco_train.sp.exchange import connect, local_exchange
from zeco_train.training.optim.optimizer_registry import OptimConfig, OptimizerName

pytestmark = pytest.mark.numeric

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
        # Two micro-batches.
        case = Case(strategy, shard_size=shard_size, global_batch=2 * mesh.dp_size, **settings)
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
    strategies += [(Strategy.zero1, 2), (Strategy.zero3, 2)] * (world_size == 4)
    if world_size == 4 and settings is ALL:
        strategies += itertools.product((Strategy.zero2, Strategy.hsdp), (-1, 2, 4))
    for own in settings:
        cases = [(strategy, size, own) for strategy, size in ((Strategy.ddp, -1), *strategies)]
        by_rank = run_distributed(_train, world_size, store, sp_size, cases)
        expected: Result = by_rank[0][0]
        for number, (strategy, size, _) in enumerate(cases[1:], 1):
            for results in by_rank:
                errors = worst(results[number], expected)
                # Sums over ranks are regrouped; measured 6e-13 at most, of norms with Muon.
                assert max(errors.values()) <= 1e-12, (strategy, size, own, errors)
            # Each group of adjacent ranks holds the model once.
            held = [results[number].held for results in by_rank]
            shards = count_shards(strategy, size, world_size, sp_size)
            groups = [sum(held[first : first + shards]) for first in range(0, world_size, shards)]
            assert groups == [expected.held] * (world_size // shards), (strategy, size)


def _every_pair() -> list[Strategy]:
    """Each strategy once after each other one, and itself: a de Bruijn sequence."""
    every = [*Strategy]
    found = []
    for number, one in enumerate(every):
        found += [one, *(x for other in every[number + 1 :] for x in (one, other))]
    return [*found, every[0]]


def _go_on(rank: int, world_size: int, folder: str, strategies: list[Strategy]) -> list[dict[str, Any]]:
    """A run of `ddp`, and one whose every step is a start of its own, by the strategies and splits in turn."""
    options = ["train.dtype=fp64", "sched=constant", "checkpoint.keep=0", "train.eval_sequences=1", "data.seq_len=96"]
    whole = train(rank, world_size, f"{folder}/whole", "parallel=ddp", f"train.steps={len(strategies)}", *options)
    last: dict[str, Any] = {}
    for number, strategy in enumerate(strategies):
        split = ["sp=dp", "sp=zeco"][number // 2 % 2]
        own = [split, f"parallel={strategy.value}", f"train.steps={number + 1}"]
        last = train(rank, world_size, f"{folder}/parts", *own, *options)
        assert len(last["sequence_ids"]) == 1, strategy
    return [whole, last]


@pytest.mark.parametrize(
    "strategies",
    [
        [Strategy.zero1, Strategy.torch_ddp, Strategy.zero3, Strategy.torch_ddp, Strategy.zero1],
        pytest.param(_every_pair(), marks=pytest.mark.campaign),
    ],
    ids=["few", "every pair"],
)
def test_runs_go_on_by_another_strategy(strategies: list[Strategy], tmp_path: Path) -> None:
    whole, parts = run_distributed(_go_on, 2, str(tmp_path), strategies)[0]
    for key in ("loss", "grad_norm"):
        # The contract between splits.
        assert largest_difference(parts["rows"], whole["rows"], key) <= 1e-9, key
    for name, parameter in whole["parameters"].items():
        assert (parts["parameters"][name] - parameter).norm() <= 1e-9 * parameter.norm(), name


@pytest.mark.parametrize("wrong", ["train.dtype=bf16", "train.compile=always", "train.matmul=fp8"])
def test_torch_ddp_is_refused_what_it_does_not_do(wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"^{wrong}: must be .* with parallel=torch_ddp"):
        load_config(["parallel=torch_ddp", wrong])


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
