"""Parameters that stay in fp32 under FSDP2's bf16 policy: one unit of all layers' modules, exact in every setting."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lab.exactness_matrix import tiny
from models.config import LanguageModelConfig
from models.language_model import LanguageModel
from models.mixers import base
from models.mixers.mamba2 import Mamba2Config, Mamba2Decay
from models.parameters import cast
from models.spec import ModelSpec
from tests.support.distributed import on_ranks, run_distributed
from tests.support.sp_reference import build_scans
from tests.support.steps import BY_FSDP, GLOBAL_BATCH, TINY, Case, check, make_mesh, run_steps, write_documents
from tests.support.training import full
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.parallelize import begin_micro_batch, num_shards
from zeco_train.ops.mix import mix_beside
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.recompute import Recompute
from zeco_train.sp.exchange import local_exchange
from zeco_train.training.build import build_model
from zeco_train.training.config import Dtype, TrainConfig

pytestmark = pytest.mark.numeric

MODEL = Mamba2Config(
    vocab_size=TINY.vocab_size,
    hidden_size=24,
    num_layers=2,
    num_heads=6,
    head_dim=8,
    state_size=5,
    n_groups=2,
    initializer_range=0.2,
)
# fp64 over other numbers of ranks and segments; measured at most 6e-15.
TOLERANCE = 1e-12
# fp32 sums over two ranks in another order.
OF_SUMS = 1e-6


# Strategy, recomputation, segments, documents.
FEW = [(Strategy.ddp, Recompute.none, 1, True), (Strategy.hsdp, Recompute.full, 2, True)]
ALL = [*itertools.product(Strategy, Recompute, (1, 2), (False, True))]


def _training(rank: int, world_size: int, store: str, cases: list[tuple[Any, ...]]) -> Any:
    """Steps in fp64 of every case, compared with each other; returns those of the first one with and without documents.

    One rank runs only these.
    """
    mesh = make_mesh(rank, world_size, world_size)
    name = "lasp2" if world_size > 1 else "dp"
    scan = build_scans(tuple(range(world_size)), name)[name]
    first: dict[bool, Any] = {}
    for strategy, recompute, segments, documents in cases:
        if world_size == 1 and documents in first:
            continue
        # Gradients of two micro-batches are added in the cases with documents.
        batch = 1 if documents else GLOBAL_BATCH
        case = Case(
            strategy,
            recompute=recompute,
            segments=segments,
            documents=documents,
            micro_batch=batch,
            steps=2,
            model=MODEL,
        )
        result = run_steps(case, scan, mesh, store)
        first.setdefault(documents, result)
        check(result, first[documents], TOLERANCE, f"{case}")
    scan.drain()
    return first


@pytest.mark.slow
@pytest.mark.parametrize("cases", [FEW, pytest.param(ALL, marks=pytest.mark.campaign)], ids=["few", "all"])
def test_training_is_the_same_in_every_setting(cases: list[tuple[Any, ...]], tmp_path: Path) -> None:
    """Losses, clipped norms, gradients and parameters after two steps."""
    store = str(write_documents(tmp_path / "store"))
    (alone,), (ours, theirs) = (run_distributed(_training, ranks, store, cases) for ranks in (1, 2))
    for documents, expected in alone.items():
        for found in (ours, theirs):
            check(found[documents], expected, TOLERANCE, f"documents={documents}")


def _log_decays(model: LanguageModel, ids: Tensor) -> list[Tensor]:
    """Of each layer in a forward and backward pass; with recomputation of each layer twice."""
    found, exchange = list[Tensor](), local_exchange()

    def noted(operator: str, operands: Sequence[Tensor], *rest: Any) -> Any:
        if operator != "short_conv":
            found.append(operands[3].detach())
        return mix_beside(operator, operands, *rest)

    with mock.patch.object(base, "mix_beside", noted):
        model(ids[:, :-1], SequencePosition((0, ids.shape[1] - 1), exchange=exchange), ids[:, 1:]).backward()
    return found


ALTERNATING = [*zip(BY_FSDP, itertools.cycle((Recompute.none, Recompute.full)), strict=False)]


@pytest.mark.parametrize(
    ("config", "cases"),
    [
        (MODEL, [(Strategy.zero3, Recompute.full)]),
        pytest.param(tiny("gated_deltanet"), ALTERNATING, marks=pytest.mark.slow),
        pytest.param(tiny("kda"), ALTERNATING, marks=pytest.mark.campaign),
        pytest.param(MODEL, [*itertools.product(BY_FSDP, Recompute)], marks=pytest.mark.campaign),
    ],
    ids=["mamba2", "gated_deltanet", "kda", "mamba2, all"],
)
@on_ranks(2)
def test_log_decays_are_bit_equal_to_those_of_an_unsharded_model(
    rank: int, world_size: int, config: LanguageModelConfig, cases: list[tuple[Strategy, Recompute]]
) -> None:
    mesh = make_mesh(rank, world_size, 1)
    ids = torch.randint(config.vocab_size, (1, 65), generator=torch.Generator().manual_seed(rank))
    masters, plain = ModelSpec(config).build(), ModelSpec(config).build()
    for model in (masters, plain):
        model.init_weights(0)
    cast(plain, torch.bfloat16)
    expected = _log_decays(plain, ids)
    assert len(expected) == config.num_layers
    assert all(g.dtype is torch.float32 and (g.bfloat16().float() != g).any() for g in expected)
    wanted: dict[str, Tensor] = {}
    for name in sorted(ModelSpec(config).wide):
        assert torch.equal(plain.get_parameter(name), masters.get_parameter(name)), name
        wanted[name] = plain.get_parameter(name).grad
        dist.all_reduce(wanted[name])
    for strategy, recompute in cases:
        where = f"{strategy}, {recompute}"
        model = build_model(config, TrainConfig(dtype=Dtype.bf16, recompute=recompute), strategy, mesh, seed=0)
        begin_micro_batch(model, strategy, num_shards(model), last=True)
        # Recomputation goes from the last layer to the first.
        again = [*reversed(expected)] if recompute is Recompute.full else []
        for ours, theirs in zip(_log_decays(model, ids), [*expected, *again], strict=True):
            assert torch.equal(ours, theirs), where
        for name, grad in wanted.items():
            sharded = model.get_parameter(name)
            assert grad.dtype is sharded.dtype is sharded.grad.dtype is torch.float32, (name, where)
            assert (full(sharded.grad) - grad).norm() <= OF_SUMS * grad.norm(), (name, where)
            # A gradient that had passed through bf16 would be one of its numbers.
            assert (grad.bfloat16().float() != grad).any(), (name, where)


@on_ranks(1)
def test_all_layers_share_one_unit(rank: int, world_size: int) -> None:
    mesh = make_mesh(rank, world_size, 1)
    model = build_model(MODEL, TrainConfig(dtype=Dtype.bf16), Strategy.zero3, mesh, seed=0)
    states = {
        module._get_fsdp_state()
        for module in model.modules()
        if isinstance(module, Mamba2Decay) and isinstance(module, FSDPModule)
    }
    (group,) = (state._fsdp_param_group for state in states)
    assert group is not None
    assert len(group.fsdp_params) == 3 * MODEL.num_layers
    assert {p.sharded_param.dtype for p in group.fsdp_params} == {torch.float32}
    assert group.mp_policy.param_dtype is None


def test_specification_has_the_units_of_the_model() -> None:
    decays, *_ = (unit for unit in ModelSpec(MODEL).units if all(parameter.rule.wide for parameter in unit))
    assert [parameter.shape for parameter in decays] == [(MODEL.num_heads,)] * 3 * MODEL.num_layers
    assert sum(parameter.rule.wide for parameter in ModelSpec(MODEL).parameters) == len(decays)
