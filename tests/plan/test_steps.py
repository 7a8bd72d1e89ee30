"""The planner's memory and traffic against real models, optimizers and collectives."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from data.loader.batches import Batch
from models.mixer_registry import MIXERS
from models.mixers.mamba2 import Mamba2Config
from models.parameters import parameter_rules
from models.spec import spec_of
from tests.support.distributed import run_distributed
from tests.support.planning import EAGER, GLA_1B, SMALL, counted, make_case, saved_bytes
from tests.support.unmasked import UnmaskedMixer
from zeco_train.collectives import ScanWorker
from zeco_train.collectives import wire as collectives_wire
from zeco_train.collectives.cost_model import Link
from zeco_train.collectives.scan_registry import SCANS
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.mesh import init_mesh
from zeco_train.distributed.owned_matrices import local
from zeco_train.lifecycle.join import Launch
from zeco_train.ops import loss
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.seam import ScanRequest, StateScan
from zeco_train.plan import calibration
from zeco_train.plan.advice import legal_segments
from zeco_train.plan.memory import optimizer_bytes, parameter_bytes
from zeco_train.plan.step_time import plan_step
from zeco_train.plan.traffic import Halos, count_scans, parameter_traffic, plan_halos, scan_bytes, step_bytes
from zeco_train.sp.backend import LocalScan, TappedScan
from zeco_train.sp.backend_registry import BACKENDS, SPConfig
from zeco_train.sp.exchange import connect, local_exchange
from zeco_train.training.build import build_model
from zeco_train.training.config import Dtype, TrainConfig
from zeco_train.training.optim.optimizer_registry import OptimConfig, build_optimizer
from zeco_train.training.step import TrainingStep

# --- memory and traffic of a real step ---

STEPS = [
    (Strategy.ddp, -1, 4, 3, 2, Dtype.bf16),
    (Strategy.zero2, 2, 4, 3, 2, Dtype.bf16),
    (Strategy.zero3, -1, 2, 3, 2, Dtype.bf16),
    (Strategy.hsdp, -1, 2, 1, 1, Dtype.fp32),
]


def _overrides(
    strategy: Strategy, shard_size: int, sp_size: int, segments: int, micro_steps: int, dtype: Dtype
) -> list[str]:
    batch = f"data.global_batch={4 // sp_size * micro_steps}"
    sharding = [f"parallel.strategy={strategy.value}", f"parallel.shard_size={shard_size}"]
    split = [*sharding, f"sp.size={sp_size}", f"train.segments={segments}"]
    return [*SMALL, *split, batch, f"train.dtype={dtype.value}", "world_size=4", "gpu=cpu"]


class _Tap(TappedScan):
    """Keeps what was asked for: the direction, whether with a carry, and bytes."""

    def __init__(self, scan: StateScan) -> None:
        super().__init__(scan)
        self.requests = list[tuple[bool, bool, int]]()

    def launched(self, request: ScanRequest) -> None:
        self.requests.append((request.reverse, request.want_carry, request.state.nbytes))


@contextlib.contextmanager
def _recorded_parameters() -> Iterator[Counter[str]]:
    """Bytes that this rank sends for parameters and gradients, with ring algorithms."""
    sent = Counter[str]()

    def sent_of(payload: Callable[..., Tensor], times: int, *args: Any, **options: Any) -> int:
        tensor, size = payload(*args, **options), dist.get_world_size(options.get("group"))
        # The loss and the norm are scalars.
        return times * tensor.nbytes * (size - 1) // size if tensor.numel() > 1 else 0

    def add(kind: str, count: int) -> None:
        sent[kind] += count

    ways: tuple[tuple[str, Callable[..., Tensor], int, tuple[str, ...]], ...] = (
        ("gathered", lambda output_tensor, *_, **__: output_tensor, 1, ("all_gather_single", "all_gather_into_tensor")),
        ("scattered", lambda *_, input, **__: input, 1, ("reduce_scatter_single", "reduce_scatter_tensor")),
        ("summed", lambda tensor, *_, **__: tensor, 2, ("all_reduce",)),
    )
    with contextlib.ExitStack() as stack:
        for kind, payload, times, names in ways:
            for name in filter(partial(hasattr, dist), names):
                stack.enter_context(counted(dist, name, partial(sent_of, payload, times), partial(add, kind)))
        yield sent


def _step(rank: int, world_size: int) -> list[dict[str, Any]]:
    """For each of `STEPS`: bytes held by this rank after a step, bytes sent and scans launched in it."""
    results = []
    for setting in STEPS:
        strategy, shard_size, sp_size, segments, micro_steps, dtype = setting
        case = make_case(*_overrides(*setting))
        mesh = init_mesh(Launch(rank, world_size, rank), sp_size, torch.device("cpu"), timedelta(seconds=60))
        model = build_model(case.config.model, TrainConfig(dtype=dtype), strategy, mesh, 0, shard_size)
        optimizer = build_optimizer(parameter_rules(model), OptimConfig(), torch.float32)
        exchange = connect(SPConfig(), mesh.scan_groups, mesh.timeout)
        scan = _Tap(exchange.states)
        step = TrainingStep(
            model,
            optimizer,
            exchange.replaced(states=scan),
            mesh,
            strategy=strategy,
            grad_clip=1.0,
            tokens_per_step=case.tokens_per_step,
        )
        ids = torch.arange(case.tokens).remainder(259)[None]
        split = mesh.split(case.config.data.seq_len, 1, segments=segments)
        batches = [Batch(ids, ids, split.position(index), [0]) for index in range(segments)]
        with _recorded_parameters() as sent:
            for micro_step in range(micro_steps):
                step.backward(batches, last=micro_step == micro_steps - 1)
            step.update()
        states = [value for state in optimizer.state.values() for value in state.values()]
        results.append(
            {
                "parameters": sum(local(x).nbytes for x in model.parameters()),
                "gradients": sum(local(x.grad).nbytes for x in model.parameters()),
                "optimizer": sum(local(x).nbytes for x in states),
                "sent": dict(+sent),
                "launched": Counter(reverse for reverse, _, _ in scan.requests),
                "carried": sum(carried for _, carried, _ in scan.requests),
            }
        )
        step.zero_grad()
    return results


@pytest.fixture(scope="module")
def real_steps() -> list[list[dict[str, Any]]]:
    """By rank and `STEPS`."""
    return run_distributed(_step, 4)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(STEPS)))
def test_plan_equals_counts_of_real_step(real_steps: list[list[dict[str, Any]]], index: int) -> None:
    """Exact bytes of parameters, gradients and optimizer state on the rank with most; number of scans; FSDP traffic of
    every rank."""
    case, ranks = make_case(*_overrides(*STEPS[index])), [rank[index] for rank in real_steps]
    assert max(rank["parameters"] for rank in ranks) == parameter_bytes(case, 4)
    assert max(rank["gradients"] for rank in ranks) == parameter_bytes(case, 4)
    assert max(rank["optimizer"] for rank in ranks) == optimizer_bytes(case)
    scans, traffic = count_scans(case), parameter_traffic(case)
    for rank in ranks:
        assert rank["launched"] == {False: scans.forward, True: scans.backward}
        assert rank["carried"] == scans.with_carry
        expected = {"gathered": traffic.gathered, "scattered": traffic.scattered, "summed": traffic.summed}
        assert rank["sent"] == pytest.approx({name: value for name, value in expected.items() if value}, rel=1e-3)


def test_unmasked_models_carry_in_every_scan_and_have_no_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS, "gla", UnmaskedMixer)
    case = make_case("task=mlm", "model.causal=false", "world_size=4")
    scans = count_scans(case)
    assert scans.with_carry == scans.total == 2 * case.config.model.num_layers * case.passes
    assert legal_segments(case) == [1]


@pytest.mark.slow
def test_halos_are_one_message_per_layer_pass_and_direction() -> None:
    arguments = ["model=mamba2_1b", *GLA_1B[1:], EAGER, "data.seq_len=65536", "train.segments=2"]
    case = make_case(*arguments, "world_size=4", "sp.size=4")
    model, costs = case.config.model, case.machine.scans[Link.symmetric]
    assert isinstance(model, Mamba2Config)
    halos, size = plan_halos(case), (model.conv_kernel - 1) * model.conv_dim * 4
    assert halos.messages == 2 * 2 * model.num_layers
    assert halos.bytes_per_step == halos.messages * size
    assert halos.seconds == pytest.approx(halos.messages * (costs.start + costs.message + costs.byte * size))
    assert plan_step(case).seconds["halos"] == halos.seconds
    assert plan_step(case.by(BACKENDS["dp"])).seconds["halos"] == 0
    alone = make_case(*arguments, "world_size=1", "sp.size=1")
    assert plan_halos(alone) == Halos(0, 0, 0)
    assert "halos" not in plan_step(make_case(*GLA_1B, "world_size=4", "sp.size=4", "data.seq_len=65536")).seconds


def test_planned_halos_are_those_of_a_real_step() -> None:
    """Of one rank of a sequence in one pass: the requests that the model makes of the scan of halos."""
    config = Mamba2Config(num_layers=2)
    model, halo = spec_of(config).build(), _Tap(LocalScan())
    model.init_weights(0)
    exchange = local_exchange().replaced(halo=halo)
    ids = torch.zeros(1, 65, dtype=torch.int64)
    model(ids[:, :-1], SequencePosition((0, 64), exchange=exchange), ids[:, 1:]).backward()
    sizes = "model.num_layers=2", "data.seq_len=128", "data.global_batch=1", "world_size=2", "sp.size=2"
    case = make_case("model=mamba2_tiny", *sizes, "gpu=cpu", "train.dtype=fp32")
    halos = plan_halos(case.by(BACKENDS["lasp2"]))
    assert (halos.messages, halos.bytes_per_step) == (len(halo.requests), sum(sent for _, _, sent in halo.requests))


def test_parameter_and_optimizer_bytes_of_one_rank() -> None:
    for model in ("gla_tiny", "gla_1b"):
        case = make_case(f"model={model}", "world_size=1")
        assert parameter_bytes(case, 1) == case.spec.num_parameters
        assert optimizer_bytes(case) == 8 * case.spec.num_parameters + 4 * sum(map(len, case.spec.units))


# --- scans on the wire ---


def _scans(rank: int, world_size: int, heads: int, value_dim: int) -> dict[str, int]:
    """Bytes that this rank sends for one scan of each kind, without and with a carry."""
    group, sent = dist.group.WORLD, Counter[str]()
    assert group is not None
    worker = ScanWorker(group, timedelta(seconds=60))
    state, log_decay = torch.ones(1, heads, 8, value_dim), -torch.ones(1, heads, 8)

    def add(count: int) -> None:
        sent[key] += count

    others = world_size - 1
    with (
        counted(dist, "isend", lambda tensor, **_: tensor.nbytes, add),
        counted(dist, "broadcast", lambda tensor, *, group_src, **_: tensor.nbytes * (group_src == rank), add),
        counted(dist, "all_to_all_single", lambda _, parts, *__, **___: parts.nbytes * others // world_size, add),
        counted(collectives_wire, "all_gather_single", lambda _, part, **__: part.nbytes * others, add),
    ):
        for (name, scan), want_carry in itertools.product(SCANS.items(), (False, True)):
            key = f"{name} {want_carry}"
            blocks = 3 if scan.best_blocks else None
            pending = scan.over(worker, blocks)(ScanRequest(state, log_decay, want_carry=want_carry))
            pending.wait()
            pending.finish()
            if want_carry:
                pending.carry_out()
            worker.drain()
    return dict(sent)


@pytest.mark.parametrize(
    ("world_size", "heads", "value_dim"), [(3, 5, 10), pytest.param(4, 2, 16, marks=pytest.mark.slow)]
)
def test_scan_bytes_equal_sent_bytes(world_size: int, heads: int, value_dim: int) -> None:
    ranks = run_distributed(_scans, world_size, heads, value_dim)
    model = [f"model.hidden_size={heads * value_dim}", f"model.num_heads={heads}", f"model.expand_k={8 / value_dim}"]
    case = make_case(*model, f"world_size={world_size}", "data.seq_len=768", "gpu=cpu")
    assert (case.state_bytes, case.config.model.head_k_dim) == (4 * heads * 8 * value_dim, 8)
    for (name, scan), want_carry in itertools.product(SCANS.items(), (False, True)):
        busiest = max(rank.get(f"{name} {want_carry}", 0) for rank in ranks)
        assert scan_bytes(case, scan, want_carry=want_carry) == pytest.approx(busiest, rel=1e-12), (name, want_carry)


def test_step_bytes_by_algorithm() -> None:
    case = make_case(*GLA_1B, "world_size=4", "data.seq_len=65536", "train.segments=4", "train.recompute=full")
    assert case.state_bytes == 16 * 64 * 128 * 4
    # 4 forward and 4 backward passes of 20 layers scan; recomputed forward passes replay.
    assert step_bytes(case, SCANS["chain"]) == 2 * 4 * 20 * case.state_bytes
    assert step_bytes(case, SCANS["all_gather"]) == pytest.approx(2 * 4 * 20 * 3 * case.state_bytes * 129 / 128)
    assert scan_bytes(make_case(*GLA_1B, "sp=dp", "world_size=1"), SCANS["all_gather"]) == 0


# --- activations ---


def test_activation_bytes_equal_saved_tensors() -> None:
    check_activations([], Dtype.fp32, Recompute.selective, compiled=False)


def check_activations(variant: list[str], dtype: Dtype, recompute: Recompute, *, compiled: bool) -> None:
    """The planner's measurement on tensors without memory, exact to the byte."""
    torch._dynamo.reset()
    shape = ["model.hidden_size=128", "model.num_heads=2", "model.intermediate_size=352", *variant]
    how = ["always" if compiled else "never", dtype.value, recompute.value]
    case = make_case(*shape, "gpu=cpu", *map("train.{}={}".format, ("compile", "dtype", "recompute"), how))
    short, long = (saved_bytes(case.config.model, dtype.compute, recompute, compiled, tokens) for tokens in (128, 384))
    assert (long - short) / 256 == case.measured("gla").kept.by_token


def test_activation_bytes_with_full_recompute() -> None:
    case = make_case(*GLA_1B, EAGER, "train.recompute=full", "world_size=1")
    assert case.measured("gla").kept == (2 * case.config.model.hidden_size, 0)


def test_planned_loss_chunk_equals_loss_implementation() -> None:
    chunks = loss._CHUNK_TOKENS
    assert {True: chunks["cpu"], False: chunks["cuda"]} == calibration.LOSS_CHUNK


def test_muon_memory_and_products_are_counted() -> None:
    adamw, muon = (make_case("model=gla_1b", f"optim={name}", "world_size=8") for name in ("adamw", "muon"))
    projections = sum(math.prod(shape) for shape, rule in muon.spec.parameters if rule.is_projection)
    assert optimizer_bytes(adamw) - optimizer_bytes(muon) == pytest.approx(4 * projections / 8, rel=1e-3)
    one, eight = (muon.config.optim.spec.products(muon.spec.parameters, n, muon.config.optim) for n in (1, 8))
    assert eight == pytest.approx(one / 8, rel=0.02)
    # Five steps of 4 N² K + 2 N³ for a matrix [N, K] with N ≤ K.
    assert one == sum(
        5 * (4 * min(shape) ** 2 * max(shape) + 2 * min(shape) ** 3)
        for shape, rule in muon.spec.parameters
        if rule.is_projection
    )
