"""Gradients and parameters that each strategy holds on a rank between micro-batches; group timeouts."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import nn

from models.mixers.gla import GLAConfig
from models.spec import ModelSpec
from tests.support.comparison import largest, relative
from tests.support.distributed import on_ranks, run_distributed
from tests.support.steps import BY_FSDP
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.mesh import init_mesh
from zeco_train.distributed.parallelize import begin_micro_batch, global_norm, num_shards, parallelize
from zeco_train.lifecycle.join import Launch

pytestmark = pytest.mark.numeric


def _gradients(rank: int, world_size: int) -> dict[str, tuple[bool, bool, float]]:
    """By strategy: whether a rank holds whole gradients, and whole parameters, after the first of two micro-batches;
    and the norm of the whole gradient after the second."""
    sp_size = min(2, world_size)
    mesh = init_mesh(Launch(rank, world_size, rank), sp_size, torch.device("cpu"), timedelta(seconds=30))
    results = {}
    # The last one: shards within groups of two ranks.
    for strategy, shard_size in (*((strategy, -1) for strategy in BY_FSDP), (Strategy.zero3, sp_size)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False, dtype=torch.float64) for _ in range(3)))
        parallelize(model, list(model), strategy, torch.float64, mesh, shard_size)
        whole_gradients = whole_parameters = False
        shards = num_shards(model)
        assert shards == (shard_size if shard_size > 0 else {"ddp": 1, "hsdp": sp_size}.get(strategy.value, world_size))
        for last in (False, True):
            begin_micro_batch(model, strategy, shards, last)
            model(torch.full((1, 8), rank + 1.0, dtype=torch.float64)).square().sum().backward()
            if not last:
                whole_gradients = _holds_whole_gradients(model)
                # Gathered parameters are plain ones of the module, sharded ones are DTensors.
                whole_parameters = all(type(p) is nn.Parameter for p in model.parameters())
        results[f"{strategy.value}, {shard_size}"] = (whole_gradients, whole_parameters, global_norm(model).item())
    return results


def _holds_whole_gradients(model: nn.Module) -> bool:
    """Whether FSDP2 holds unreduced gradients; uses private attributes, since there is no public API."""
    parameters = [p for layer in model for p in layer._get_fsdp_state()._fsdp_param_group.fsdp_params]
    return any(
        p.unsharded_accumulated_grad is not None or p._unsharded_param.grad is not None
        for p in parameters
        if hasattr(p, "_unsharded_param")
    )


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_strategies_hold_expected_tensors_between_micro_batches(ranks: int) -> None:
    """One rank adds each micro-batch's gradients to its sums, and keeps no others."""
    results = run_distributed(_gradients, ranks)
    expected = {"ddp": (ranks > 1, True), "zero1": (ranks > 1, True), "zero2": (False, True)}
    expected |= {"zero3": (False, False), "hsdp": (False, False)}
    norms = []
    for rank in results:
        for strategy, (gradients, parameters, norm) in rank.items():
            assert (gradients, parameters) == expected[strategy.partition(",")[0]], strategy
            norms.append(norm)
    assert largest(relative(norm, norms[0]) for norm in norms) <= 1e-12


@on_ranks(1)
def test_every_block_is_prefetched_and_the_head_is_not(rank: int, world_size: int) -> None:
    """Without a head of its own, a model's last unit is a block."""
    mesh = init_mesh(Launch(rank, world_size, rank), 1, torch.device("cpu"), timedelta(seconds=30))
    blocks = [[f"model.layers.{layer}"] for layer in range(3)]
    for tied, expected in ((False, [*blocks, [], []]), (True, [*blocks[1:], []])):
        model = ModelSpec(GLAConfig(hidden_size=8, num_layers=3, num_heads=1, tie_word_embeddings=tied)).build()
        units = model.sharding_units()
        names = {module: name for name, module in model.named_modules()}
        parallelize(model, units, Strategy.zero3, torch.float32, mesh)
        states = {unit._get_fsdp_state(): names[unit] for unit in units}
        assert [[states[after] for after in state._states_to_forward_prefetch] for state in states] == expected


@on_ranks(2)
def test_every_mesh_group_has_the_timeout(rank: int, world_size: int) -> None:
    mesh = init_mesh(Launch(rank, world_size, rank), 2, torch.device("cpu"), timedelta(seconds=57))
    groups = [*mesh.devices.get_all_groups(), *mesh.scan_groups]
    options = [group._get_backend(torch.device("cpu")).options for group in groups]
    assert {each._timeout for each in options} == {timedelta(seconds=57)}
