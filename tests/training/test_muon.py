"""Muon: against torch, over strategies and ranks, with other parameters and stacked matrices."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from models.parameters import BIAS, MATRIX, PROJECTION
from tests.support.distributed import run_distributed
from tests.support.steps import BY_FSDP, Case, make_mesh, make_step
from zeco_train.config.schema import load_config
from zeco_train.distributed.owned_matrices import WholeMatrices, assign
from zeco_train.errors import CheckpointError
from zeco_train.sp.exchange import local_exchange
from zeco_train.tracking.run_folder import RunFolder
from zeco_train.training.optim.muon import Muon, orthogonalise
from zeco_train.training.optim.optimizer_registry import OptimConfig, OptimizerName
from zeco_train.training.optim.optimizer_spec import AdjustLR, OptimizerSettings, Precision
from zeco_train.training.schedule import set_learning_rate

pytestmark = pytest.mark.numeric
SETTINGS = OptimConfig(name=OptimizerName["muon"], lr=1e-2)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(7, 7), (5, 12), (12, 5), (1, 4), (4, 1)])
def test_orthogonalise_moves_singular_values_near_one(shape: tuple[int, int]) -> None:
    matrix = _random(*shape)
    found, (u, _, v) = orthogonalise(matrix, 12), torch.linalg.svd(matrix, full_matrices=False)
    rotated = u.T @ found @ v.T
    assert (rotated - rotated.diag().diag()).abs().max() < 1e-12
    assert rotated.diag().min() > 0.6
    assert rotated.diag().max() < 1.3


def test_orthogonalised_zero_matrix_stays_zero() -> None:
    assert not orthogonalise(torch.zeros(3, 4), 5).any()


@pytest.mark.few
@pytest.mark.parametrize("adjust", AdjustLR)
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_equals_torch(adjust: AdjustLR, nesterov: bool) -> None:
    """In bf16, the precision of torch's Muon, equal up to fp32 rounding; in fp32 different by bf16 rounding."""
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.9, "nesterov": nesterov, "ns_steps": 5}
    start = [_random(*shape, seed=number).float() for number, shape in enumerate([(24, 40), (40, 24), (16, 16)])]
    theirs = [nn.Parameter(x.clone()) for x in start]
    torchs = torch.optim.Muon(theirs, **options, adjust_lr_fn=adjust.value)
    found = {}
    for precision in (Precision.master, Precision.bf16):
        parameters = [nn.Parameter(x.clone()) for x in start]
        settings = OptimizerSettings(**options, adjust_lr_fn=adjust, ns_dtype=precision)
        found[precision] = parameters, Muon([(p, PROJECTION) for p in parameters], settings)
    for number in range(4):
        for index, p in enumerate(theirs):
            grad = _random(*p.shape, seed=10 * number + index).float()
            for parameters in (theirs, *(own for own, _ in found.values())):
                parameters[index].grad = grad.clone()
        for optimizer in (torchs, *(optimizer for _, optimizer in found.values())):
            optimizer.step()
    for index, p in enumerate(theirs):
        moved = (p - start[index]).norm()
        assert (found[Precision.bf16][0][index] - p).norm() < 1e-6 * moved
        assert 1e-5 * moved < (found[Precision.master][0][index] - p).norm() < 2e-2 * moved


def test_non_projections_are_updated_by_adamw() -> None:
    parameters = [nn.Parameter(_random(*shape)) for shape in ((6, 4), (6, 4), (5,))]
    rules = [PROJECTION, MATRIX, BIAS]
    settings = dataclasses.replace(SETTINGS, adamw_lr=3e-2, weight_decay=0.2)
    muon = Muon(list(zip(parameters, rules, strict=True)), settings)
    copies = [nn.Parameter(p.detach().clone()) for p in parameters[1:]]
    groups = [{"params": copies[:1], "weight_decay": 0.2}, {"params": copies[1:], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, fused=True)
    for number in range(3):
        set_learning_rate(muon, 1e-2 / (1 + number))
        set_learning_rate(adamw, 3e-2 / (1 + number))
        for index, p in enumerate(parameters):
            p.grad = _random(*p.shape, seed=10 * number + index)
        for own, copy in zip(parameters[1:], copies, strict=True):
            copy.grad = own.grad
        muon.step()
        adamw.step()
    for own, copy in zip(parameters[1:], copies, strict=True):
        assert torch.allclose(own, copy, rtol=1e-14, atol=0)
    assert "exp_avg" not in muon.state[parameters[0]]


def test_stacked_matrices_are_orthogonalised_separately() -> None:
    whole = nn.Parameter(_random(9, 6))
    apart = [nn.Parameter(x.clone()) for x in whole.detach().split([4, 5])]
    stacked = Muon([(whole, PROJECTION._replace(rows=(4, 5)))], SETTINGS)
    single = Muon([(x, PROJECTION) for x in apart], SETTINGS)
    whole.grad = _random(9, 6, seed=1)
    for x, grad in zip(apart, whole.grad.split([4, 5]), strict=True):
        x.grad = grad.clone()
    stacked.step()
    single.step()
    assert torch.allclose(whole, torch.cat(apart), rtol=1e-13, atol=0)


@pytest.mark.parametrize(("costs", "ranks"), [([5.0, 4.0, 3.0, 3.0, 3.0], 2), ([1.0], 3), ([], 2), ([1.0] * 7, 3)])
def test_assignment_balances_work_over_ranks(costs: list[float], ranks: int) -> None:
    owned = assign(costs, ranks)
    assert sorted(index for indices in owned for index in indices) == list(range(len(costs)))
    loads = [sum(costs[index] for index in indices) for indices in owned]
    # Graham's bound.
    assert max(loads) <= 4 / 3 * max(max(costs, default=0), sum(costs) / ranks)


def _round_trip(rank: int, world_size: int) -> None:
    """Gather, double, scatter: every rank gets its rows, also of heights that do not divide by the ranks."""
    mesh = make_mesh(rank, world_size, world_size // 2 if world_size % 2 == 0 else world_size)
    shapes = [(7, 3), (1, 5), (world_size, 2), (12, 4), (2, 2), (9, 1)]
    for strategy in BY_FSDP:
        _, step = make_step(Case(strategy), local_exchange(), mesh)
        like = next(step.model.parameters())
        wholes = [_random(*shape, seed=number) for number, shape in enumerate(shapes)]
        sharded = [distribute_tensor(x, like.device_mesh, like.placements) for x in wholes]
        matrices, owned = WholeMatrices(sharded, [math.prod(shape) for shape in shapes]), 0
        for owners in matrices.rounds:
            indices = [index for index in owners if index is not None]
            shards = [sharded[index].to_local() for index in indices]
            whole = matrices.gather(owners, shards)
            mine = matrices.owned(owners)
            assert (whole is None) == (mine is None)
            if whole is not None:
                assert torch.equal(whole, wholes[mine])
                whole, owned = 2 * whole, owned + 1
            for shard, back in zip(shards, matrices.scatter(owners, whole, shards[0]), strict=True):
                assert torch.equal(back, 2 * shard), strategy
        counts = torch.tensor(owned)
        dist.all_reduce(counts)
        assert counts == len(shapes), strategy


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("world_size", [3, 4])
def test_each_matrix_is_gathered_on_one_rank_and_scattered(world_size: int) -> None:
    run_distributed(_round_trip, world_size)


def test_run_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", load_config([]).identity())
    folder.begin({}, [])
    folder.release()
    with pytest.raises(CheckpointError, match=r"^optim.name=muon: the run in .* has adamw and can only go on with"):
        RunFolder(tmp_path / "run", load_config(["optim=muon"]).identity())
