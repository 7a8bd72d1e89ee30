"""Parameters that stay in fp32 under FSDP2's bf16 policy: one unit of all layers' modules, exact in every setting."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from models.language_model import LanguageModel
from models.mixers import mamba2
from models.mixers.mamba2 import Mamba2Config, Mamba2Decay
from models.parameters import cast
from models.spec import ModelSpec
from tests.support.distributed import run_distributed
from tests.support.sp_reference import build_scans
from tests.support.steps import GLOBAL_BATCH, TINY, Case, check, make_mesh, run_steps, write_documents
from tests.support.training import full, train
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.mesh import ProcessMesh
from zeco_train.distributed.parallelize import begin_micro_batch, num_shards
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.seam import Exchange
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
    dist.barrier()
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


def _decays(model: LanguageModel) -> list[Mamba2Decay]:
    return [module for module in model.modules() if isinstance(module, Mamba2Decay)]


def _pass(model: LanguageModel, ids: Tensor, scan: Exchange, seen: list[tuple[Tensor, ...]]) -> None:
    """Forward and backward pass; notes the logits of the time steps, and the log-decays, of each layer."""
    operands = mamba2.Mamba2._operands

    def noted(self: Any, u: Tensor, dt: Tensor, shared: Tensor) -> Any:
        found = operands(self, u, dt, shared)
        seen.append((dt.detach(), shared.detach(), found[0][3].detach()))
        return found

    mamba2.Mamba2._operands = noted  # type: ignore[method-assign]
    try:
        model(ids[:, :-1], SequencePosition((0, ids.shape[1] - 1), exchange=scan), ids[:, 1:]).backward()
    finally:
        mamba2.Mamba2._operands = operands  # type: ignore[method-assign]


def _in_bf16(rank: int, world_size: int, cases: list[tuple[Strategy, Recompute]]) -> None:
    mesh = make_mesh(rank, world_size, 1)
    ids = torch.randint(MODEL.vocab_size, (1, 65), generator=torch.Generator().manual_seed(rank))
    for strategy, recompute in cases:
        _check_bf16(mesh, strategy, recompute, ids, f"{strategy}, {recompute}")


def _check_bf16(mesh: ProcessMesh, strategy: Strategy, recompute: Recompute, ids: Tensor, where: str) -> None:
    scan, seen, expected_seen = local_exchange(), [], []  # type: ignore[var-annotated]
    masters = ModelSpec(MODEL).build()
    masters.init_weights(0)
    plain = ModelSpec(MODEL).build()
    plain.init_weights(0)
    cast(plain, torch.bfloat16)
    _pass(plain, ids, scan, expected_seen)
    model = build_model(MODEL, TrainConfig(dtype=Dtype.bf16, recompute=recompute), strategy, mesh, seed=0)
    begin_micro_batch(model, strategy, num_shards(model), last=True)
    _pass(model, ids, scan, seen)
    # Recomputation goes from the last layer to the first.
    assert len(seen) == (2 if recompute is Recompute.full else 1) * MODEL.num_layers, where
    of_layers = [*range(MODEL.num_layers), *reversed(range(MODEL.num_layers))]
    for layer, (logits, shared, g) in zip(of_layers, seen, strict=False):
        decay = _decays(masters)[layer]
        steps = torch.nn.functional.softplus(logits.float() + decay.dt_bias)
        assert logits.dtype is torch.bfloat16, where
        assert torch.equal(shared, decay()), where
        assert torch.equal(g, -decay.A_log.exp() * steps), where
        assert torch.equal(g, expected_seen[layer][2]), where
    for name, parameter in plain.named_parameters():
        if ".decay." not in name:
            continue
        sharded, grad = model.get_parameter(name), parameter.grad
        assert grad is not None
        assert grad.dtype is sharded.dtype is sharded.grad.dtype is torch.float32, (name, where)
        dist.all_reduce(grad)
        assert (full(sharded.grad) - grad).norm() <= OF_SUMS * grad.norm(), (name, where)
        # A gradient that had passed through bf16 would be one of its numbers.
        assert (grad.bfloat16().float() != grad).any(), (name, where)


@pytest.mark.parametrize(
    "cases",
    [
        [(Strategy.zero3, Recompute.full)],
        pytest.param([*itertools.product(Strategy, Recompute)], marks=pytest.mark.campaign),
    ],
    ids=["zero3", "all"],
)
def test_log_decays_are_bit_equal_to_those_of_an_unsharded_model(cases: list[tuple[Strategy, Recompute]]) -> None:
    run_distributed(_in_bf16, 2, cases)


def _units(rank: int, world_size: int) -> tuple[int, set[str], set[bool]]:
    mesh = make_mesh(rank, world_size, 1)
    model = build_model(MODEL, TrainConfig(dtype=Dtype.bf16), Strategy.zero3, mesh, seed=0)
    states = {module._get_fsdp_state() for module in _decays(model) if isinstance(module, FSDPModule)}
    (group,) = (state._fsdp_param_group for state in states)
    assert group is not None
    return (
        len(group.fsdp_params),
        {str(p.sharded_param.dtype) for p in group.fsdp_params},
        {group.mp_policy.param_dtype is None},
    )


def test_all_layers_share_one_unit() -> None:
    assert run_distributed(_units, 1) == [(3 * MODEL.num_layers, {"torch.float32"}, {True})]


def test_specification_has_the_units_of_the_model() -> None:
    decays, *_ = (unit for unit in ModelSpec(MODEL).units if all(parameter.rule.wide for parameter in unit))
    assert [parameter.shape for parameter in decays] == [(MODEL.num_heads,)] * 3 * MODEL.num_layers
    assert sum(parameter.rule.wide for parameter in ModelSpec(MODEL).parameters) == len(decays)


_RUN = ["model=mamba2_tiny", "model.hidden_size=24", "model.num_heads=6", "model.head_dim=8", "model.state_size=5"]
_RUN += ["model.intermediate_size=0", "data.seq_len=96", "train.steps=4", "checkpoint.every=2", "checkpoint.keep=0"]


def _resumed(rank: int, world_size: int, folder: str, dtype: str, half_way: str) -> dict[str, Any]:
    """Four steps; with `half_way` the last two of them, from a copy of that run's checkpoint of step 2."""
    if half_way and rank == 0:
        shutil.copytree(half_way, folder)
        shutil.rmtree(Path(folder, "checkpoints", "step_00000004"))
    dist.barrier()
    split = ["parallel=zero3", "sp=lasp2", "sp.size=2"] if world_size == 2 else ["parallel=ddp", "sp=dp"]
    return train(rank, world_size, folder, *_RUN, f"train.dtype={dtype}", *split)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("dtype", "ranks"),
    [("bf16", 2), pytest.param("fp64", 1, marks=pytest.mark.campaign)],
    ids=["bf16", "fp64 on one rank"],
)
def test_training_resumes_from_a_checkpoint(dtype: str, ranks: int, tmp_path: Path) -> None:
    """Bit for bit on the same ranks; the masters of all parameters are stored in one dtype."""
    whole, resumed = str(tmp_path / "whole"), str(tmp_path / "resumed")
    unbroken = run_distributed(_resumed, 2, whole, dtype, "")[0]
    found = run_distributed(_resumed, ranks, resumed, dtype, whole)[0]
    assert [row["step"] for row in found["rows"]] == [1, 2, 3, 4]
    for name, expected in unbroken["parameters"].items():
        assert expected.dtype is (torch.float64 if dtype == "fp64" else torch.float32), name
        error = (found["parameters"][name] - expected).norm() / expected.norm()
        assert error <= (0 if ranks == 2 else 1e-9), name
