"""The planner: counts against what models, optimizers and collectives really hold and send; advice; the command."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from data.loader import Batch
from models.gla import GLABlock, GLAConfig
from models.gla_config import num_parameters
from models.hooks import flops_per_token, has_weight_decay
from tests.distributed import run_distributed
from zeco_train import loss
from zeco_train.build import build_model
from zeco_train.collectives import Courier, ScanRequest, launch_all_gather, launch_chain, launch_serial, launch_two_shot
from zeco_train.collectives import wire as collectives_wire
from zeco_train.collectives.cost_model import MEASURED, Link
from zeco_train.config import Dtype, TrainConfig, group_options
from zeco_train.errors import ConfigError
from zeco_train.mesh import Launch, init_mesh
from zeco_train.optim import OptimConfig, build_optimizer
from zeco_train.parallelize import Strategy
from zeco_train.plan import calibration
from zeco_train.plan.advice import Option, legal_segments
from zeco_train.plan.case import Case, build_case
from zeco_train.plan.command import main, make_plan
from zeco_train.plan.config import PlanSettings, describe, parse
from zeco_train.plan.memory import KINDS, kept_bytes_per_token, optimizer_bytes, parameter_bytes, plan_memory
from zeco_train.plan.report import Plan, as_json, as_text
from zeco_train.plan.step_time import exposed_scan_seconds, operator_seconds, plan_step
from zeco_train.plan.wire import count_scans, parameter_traffic, scan_bytes, step_bytes
from zeco_train.recompute import Recompute
from zeco_train.sp.base import PendingScan, SequenceShard
from zeco_train.sp.dp import LocalScan
from zeco_train.sp.registry import Backend, SPConfig, build_scan
from zeco_train.step import TrainingStep

# No width divides by 3, nor by 4 all of them.
SMALL = [
    "model.vocab_size=259",
    "model.num_layers=2",
    "model.hidden_size=50",
    "model.num_heads=5",
    "model.intermediate_size=77",
    "data.seq_len=768",
    "data.global_batch=4",
]
GLA_1B = ["model=gla_1b", "train.dtype=bf16", "data.global_batch=1"]


def make_case(*arguments: str) -> Case:
    return build_case(parse(arguments))[0]


def make(*arguments: str) -> Plan:
    return make_plan(parse(arguments))


def planned(*arguments: str) -> Option:
    return make(*arguments).planned


def command(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()


# --- what ranks hold and send, in a real step ---

STEPS = [
    (strategy, sp_size, segments, micro_steps, dtype)
    for strategy, sp_size in ((Strategy.ddp, 4), (Strategy.zero2, 4), (Strategy.zero3, 2), (Strategy.hsdp, 2))
    for segments, micro_steps, dtype in ((1, 1, Dtype.fp32), (3, 2, Dtype.bf16))
]


def _overrides(strategy: Strategy, sp_size: int, segments: int, micro_steps: int, dtype: Dtype) -> list[str]:
    batch = f"data.global_batch={4 // sp_size * micro_steps}"
    split = [f"parallel.strategy={strategy.value}", f"sp.size={sp_size}", f"train.segments={segments}"]
    return [*SMALL, *split, batch, f"train.dtype={dtype.value}", "world_size=4", "gpu=cpu"]


class _CountingScan:
    """Counts launches, and those with a carry, by direction."""

    def __init__(self, scan: Any) -> None:
        self._scan, self.launched, self.carried = scan, Counter[str](), 0

    def launch(self, state: Tensor, log_decay: Tensor, *, reverse: bool = False, **options: Any) -> PendingScan:
        self.launched["backward" if reverse else "forward"] += 1
        self.carried += options.get("want_carry", False)
        return self._scan.launch(state, log_decay, reverse=reverse, **options)


@contextlib.contextmanager
def _recorded_parameters() -> Iterator[Counter[str]]:
    """Bytes that this rank sends for parameters and gradients: rings of n ranks."""
    sent = Counter[str]()

    def recording(name: str, kind: str, payload: Callable[..., Tensor], times: int) -> Any:
        original = getattr(dist, name)

        def record(*args: Any, **options: Any) -> Any:
            tensor, group = payload(*args, **options), options.get("group")
            size = dist.get_world_size(group)
            # The loss and the norm are scalars.
            if tensor.numel() > 1:
                sent[kind] += times * tensor.nbytes * (size - 1) // size
            return original(*args, **options)

        return mock.patch.object(dist, name, record)

    with contextlib.ExitStack() as stack:
        for name in ("all_gather_single", "all_gather_into_tensor"):
            if hasattr(dist, name):
                stack.enter_context(recording(name, "gathered", lambda output_tensor, *_, **__: output_tensor, 1))
        for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
            if hasattr(dist, name):
                stack.enter_context(recording(name, "scattered", lambda *_, input, **__: input, 1))
        stack.enter_context(recording("all_reduce", "summed", lambda tensor, *_, **__: tensor, 2))
        yield sent


def _step(rank: int, world_size: int) -> list[dict[str, Any]]:
    """For each of `STEPS`: what this rank holds after a step, and what it sent and launched in it."""
    results = []
    for setting in STEPS:
        strategy, sp_size, segments, micro_steps, dtype = setting
        case = make_case(*_overrides(*setting))
        mesh = init_mesh(Launch(rank, world_size, rank), sp_size, torch.device("cpu"), timedelta(seconds=60))
        model = build_model(case.config.model, TrainConfig(dtype=dtype), strategy, mesh, seed=0)
        optimizer = build_optimizer(model, OptimConfig(), has_weight_decay)
        scan = _CountingScan(build_scan(SPConfig(Backend.zeco), mesh.scan_groups, mesh.timeout))
        step = TrainingStep(
            model,
            optimizer,
            scan,
            mesh,
            strategy=strategy,
            grad_clip=1.0,
            tokens_per_step=case.tokens_per_step,
            seq_len=case.config.data.seq_len,
        )
        ids = torch.arange(case.tokens).remainder(259)[None]
        batches = [Batch(ids, ids, None, index > 0 or mesh.sp_rank > 0, 0, [0]) for index in range(segments)]
        with _recorded_parameters() as sent:
            total = torch.zeros((), dtype=torch.float64)
            for micro_step in range(micro_steps):
                share = step.backward(batches, last=micro_step == micro_steps - 1)
                assert share is not None
                total += share
            step.update(total)
        local = [parameter.to_local() for parameter in model.parameters()]  # type: ignore[attr-defined]
        grads = [parameter.grad.to_local() for parameter in model.parameters()]  # type: ignore[union-attr]
        states = [
            value.to_local() if hasattr(value, "to_local") else value
            for state in optimizer.state.values()
            for value in state.values()
        ]
        results.append(
            {
                "parameters": sum(x.nbytes for x in local),
                "gradients": sum(x.nbytes for x in grads),
                "optimizer": sum(x.nbytes for x in states),
                "sent": dict(sent),
                "launched": dict(scan.launched),
                "carried": scan.carried,
            }
        )
        step.zero_grad()
    return results


@pytest.fixture(scope="module")
def real_steps() -> list[list[dict[str, Any]]]:
    """By rank and `STEPS`."""
    return run_distributed(_step, 4, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(STEPS)))
def test_a_real_step(real_steps: list[list[dict[str, Any]]], index: int) -> None:
    """Parameters, gradients and optimizer state, to the byte, of the rank that has most; scans launched; and FSDP's
    traffic, the same on every rank."""
    case, ranks = make_case(*_overrides(*STEPS[index])), [rank[index] for rank in real_steps]
    assert max(rank["parameters"] for rank in ranks) == parameter_bytes(case, 4)
    assert max(rank["gradients"] for rank in ranks) == parameter_bytes(case, 4)
    assert max(rank["optimizer"] for rank in ranks) == optimizer_bytes(case)
    scans, traffic = count_scans(case), parameter_traffic(case)
    for rank in ranks:
        assert rank["launched"] == {"forward": scans.forward, "backward": scans.backward}
        assert rank["carried"] == scans.with_carry
        expected = {"gathered": traffic.gathered, "scattered": traffic.scattered, "summed": traffic.summed}
        assert rank["sent"] == pytest.approx({name: value for name, value in expected.items() if value}, rel=1e-3)


def test_parameters_of_one_rank() -> None:
    for model in ("gla_tiny", "gla_340m", "gla_1b"):
        case = make_case(f"model={model}", "world_size=1")
        assert parameter_bytes(case, 1) == num_parameters(case.config.model)
        assert optimizer_bytes(case) == 8 * num_parameters(case.config.model) + 4 * sum(map(len, case.units))


# --- scans on the wire ---


def _scans(rank: int, world_size: int, heads: int, value_dim: int) -> dict[str, int]:
    """Bytes that this rank sends for one scan of each kind, without and with a carry."""
    group, sent = dist.group.WORLD, Counter[str]()
    assert group is not None
    courier = Courier(group, timedelta(seconds=60))
    state, log_decay = torch.ones(1, heads, 8, value_dim), -torch.ones(1, heads, 8)
    launchers: dict[str, Callable[[ScanRequest], PendingScan]] = {
        "chain": lambda request: launch_chain(request, courier, blocks=3),
        "two_shot": lambda request: launch_two_shot(request, courier),
        "lasp2": lambda request: launch_all_gather(request, courier),
        "lasp1": lambda request: launch_serial(request, courier),
    }

    def recording(owner: Any, name: str, count: Callable[..., int]) -> Any:
        original = getattr(owner, name)

        def record(*args: Any, **options: Any) -> Any:
            sent[key] += count(*args, **options)
            return original(*args, **options)

        return mock.patch.object(owner, name, record)

    with (
        recording(dist, "isend", lambda tensor, **_: tensor.nbytes),
        recording(dist, "broadcast", lambda tensor, src=None, group_src=None, **_: tensor.nbytes * (src == rank)),
        recording(dist, "all_to_all_single", lambda into, parts, **_: parts.nbytes * (world_size - 1) // world_size),
        recording(collectives_wire, "_all_gather_single", lambda into, part, **_: part.nbytes * (world_size - 1)),
    ):
        for (name, launch), want_carry in itertools.product(launchers.items(), (False, True)):
            key = f"{name} {want_carry}"
            pending = launch(ScanRequest(state, log_decay, want_carry=want_carry))
            pending.wait()
            pending.finish()
            if want_carry:
                pending.carry_out()
            courier.drain()
    return dict(sent)


@pytest.mark.parametrize(("world_size", "heads", "value_dim"), [(3, 5, 10), (4, 2, 16)])
def test_bytes_of_scans(world_size: int, heads: int, value_dim: int) -> None:
    ranks = run_distributed(_scans, world_size, heads, value_dim, timeout=120)
    model = [f"model.hidden_size={heads * value_dim}", f"model.num_heads={heads}", f"model.expand_k={8 / value_dim}"]
    case = make_case(*model, f"world_size={world_size}", "data.seq_len=768", "gpu=cpu")
    assert (case.state_bytes, case.config.model.head_k_dim) == (4 * heads * 8 * value_dim, 8)
    for way, want_carry in itertools.product(("chain", "two_shot", "lasp2", "lasp1"), (False, True)):
        busiest = max(rank.get(f"{way} {want_carry}", 0) for rank in ranks)
        assert scan_bytes(case, way, want_carry=want_carry) == pytest.approx(busiest, rel=1e-12), (way, want_carry)


def test_bytes_of_a_step() -> None:
    case = make_case(*GLA_1B, "world_size=4", "data.seq_len=65536", "train.segments=4", "train.recompute=full")
    assert case.state_bytes == 16 * 64 * 128 * 4
    # 4 forward passes that scan (the second ones replay) and 4 backward ones, of 20 layers.
    assert step_bytes(case, "chain") == 2 * 4 * 20 * case.state_bytes
    assert step_bytes(case, "lasp2") == pytest.approx(2 * 4 * 20 * 3 * case.state_bytes * 129 / 128)
    assert scan_bytes(make_case(*GLA_1B, "sp=dp", "world_size=1"), "lasp2") == 0


# --- activations ---


def _saved_bytes(config: GLAConfig, dtype: torch.dtype, recompute: Recompute, compiled: bool, tokens: int) -> int:
    """What autograd keeps of a block, its parameters aside."""
    block = GLABlock(config).to(dtype)
    block.recompute = recompute
    if compiled:
        # What the compiler keeps is decided before it makes code.
        block.compile_compute(backend="aot_eager_decomp_partition")
    x = torch.randn(1, tokens, config.hidden_size, dtype=dtype, requires_grad=True)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    shard = SequenceShard(LocalScan(), 0, tokens)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y, *_ = block(x, shard.place(tokens, x.device))
    del y
    return sum(kept.values())


@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.selective])
@pytest.mark.parametrize(("dtype", "compiled"), [(Dtype.fp32, False), (Dtype.bf16, False), (Dtype.bf16, True)])
def test_kept_activations(dtype: Dtype, compiled: bool, recompute: Recompute) -> None:
    """The tables of tensors, to the byte."""
    torch._dynamo.reset()
    shape = ["model.hidden_size=128", "model.num_heads=2", "model.intermediate_size=352"]
    how = ["always" if compiled else "never", dtype.value, recompute.value]
    case = make_case(*shape, "gpu=cpu", *map("train.{}={}".format, ("compile", "dtype", "recompute"), how))
    short, long = (_saved_bytes(case.config.model, dtype.compute, recompute, compiled, tokens) for tokens in (128, 384))
    assert (long - short) / 256 == kept_bytes_per_token(case)


def test_kept_activations_of_full_recompute() -> None:
    case = make_case(*GLA_1B, "train.recompute=full", "world_size=1")
    assert kept_bytes_per_token(case) == 2 * case.config.model.hidden_size


def test_loss_chunk_is_that_of_the_loss() -> None:
    chunks = loss._CHUNK_TOKENS
    assert {True: chunks["cpu"], False: chunks["cuda"]} == calibration.LOSS_CHUNK


# --- what was measured: GB at the peak of a rank (on CPUs of its process), seconds a step ---


def _h200(world_size: int, kilotokens: int, sp: str, *more: str) -> list[str]:
    """So many tokens a GPU, as one sequence of each or of all."""
    sequences = world_size if sp == "sp=dp" else 1
    seq_len = 1024 * kilotokens * world_size // sequences
    split = [f"world_size={world_size}", f"data.seq_len={seq_len}", f"data.global_batch={sequences}"]
    return ["model=gla_1b", "train.dtype=bf16", "gpu=h200", sp, *split, *more]


# Without a number of ranks of their own, or a length.
NO_LENGTH = ("quickstart", "gla_1b_extension", "gla_recall", "gla_needle")

MEASURED_CASES: list[tuple[list[str], float, float | None]] = [
    # README: 2 CPU ranks, 13.1 GB in all. Its time is that of a first step on cores that others used, too.
    (["gpu=cpu", "world_size=2", "data.seq_len=262144", "data.global_batch=1"], 13.1 / 2, None),
    (["gpu=cpu", "sp=dp", "data.seq_len=65536", "data.global_batch=1"], 3.76, None),
    (["gpu=cpu", "sp=dp", "data.seq_len=16384", "data.global_batch=1"], 1.39, None),
    # 1.84 and 2.06 GB on its two ranks.
    (["+experiment=gla_tiny_1m"], 1.95, None),
    # H200s, torch 2.11, gla_1b, zero2, compiled: max_memory_allocated and the median step.
    (_h200(1, 16, "sp=dp"), 43.72, 0.235),
    (_h200(1, 32, "sp=dp"), 69.13, 0.4535),
    (_h200(1, 32, "sp=dp", "train.recompute=selective"), 45.00, 0.499),
    (_h200(1, 256, "sp=dp", "train.segments=8"), 73.94, 4.412),
    (_h200(4, 16, "sp=dp"), 33.50, 0.234),
    (_h200(4, 16, "sp=zeco"), 33.49, 0.237),
    (_h200(4, 16, "sp=lasp2"), 33.49, 0.234),
    (_h200(4, 16, "sp=lasp1"), 33.49, 0.239),
    (_h200(4, 32, "sp=dp"), 58.92, 0.451),
    (_h200(4, 32, "sp=zeco"), 58.91, 0.446),
    # Taken when `full` still computed the mlps' last product again, about 4 % of these times.
    (_h200(1, 64, "sp=dp", "train.recompute=full"), 28.22, 1.152),
    (_h200(4, 16, "sp=zeco", "train.recompute=full"), 9.47, 0.316),
    (_h200(4, 256, "sp=zeco", "train.recompute=full"), 51.85, 4.475),
    # With the operator's kernels of one program a chunk (03acd37), on GPUs that their power held at 1,500 to 1,650 MHz.
    (_h200(1, 16, "sp=dp"), 43.72, 0.227),
    (_h200(1, 1024, "sp=dp", "train.segments=32"), 74.4, 17.5),
    (_h200(4, 16, "sp=dp"), 33.50, 0.2439),
    (_h200(4, 16, "sp=zeco"), 33.50, 0.2427),
    (_h200(4, 16, "sp=lasp2"), 33.50, 0.2442),
    (_h200(4, 16, "sp=lasp1"), 33.50, 0.2491),
    (_h200(4, 32, "sp=dp"), 58.92, 0.4584),
    (_h200(4, 32, "sp=zeco"), 58.92, 0.4590),
    (_h200(4, 32, "sp=lasp2"), 58.92, 0.4601),
    (_h200(4, 32, "sp=lasp1"), 58.92, 0.4684),
    (["+experiment=gla_1b_8m"], 61.3, 37.1),
    # With one kernel for dv, dk and dg, and scores kept (69522b1), at 1,618 MHz on average.
    (_h200(1, 16, "sp=dp"), 44.39, 0.2265),
    (_h200(4, 16, "sp=dp"), 34.20, 0.2409),
    (_h200(4, 16, "sp=zeco"), 34.20, 0.2414),
    (_h200(4, 16, "sp=lasp2"), 34.20, 0.2391),
    (_h200(4, 16, "sp=lasp1"), 34.20, 0.2406),
    (_h200(4, 32, "sp=dp"), 60.29, 0.4452),
    (_h200(4, 32, "sp=zeco"), 60.29, 0.4454),
    (_h200(4, 32, "sp=lasp1"), 60.29, 0.4632),
    (_h200(4, 16, "sp=dp", "model.num_heads=32"), 34.73, 0.2444),
    (_h200(4, 16, "sp=zeco", "train.recompute=full"), 9.49, 0.292),
    (["+experiment=gla_1b_1m"], 52.41, 4.268),
    (["+experiment=gla_1b_8m"], 62.66, 36.24),
]


@pytest.mark.parametrize(("arguments", "peak_gb", "seconds"), MEASURED_CASES)
def test_measured_cases(arguments: list[str], peak_gb: float, seconds: float | None) -> None:
    option = planned(*arguments)
    assert option.memory.peak / 1e9 == pytest.approx(peak_gb, rel=0.1)
    if seconds is not None:
        assert option.time.total == pytest.approx(seconds, rel=0.2)


@pytest.mark.parametrize(
    ("heads", "tokens", "exposed_us"), [(16, 16384, 1362), (16, 32768, 2457), (32, 16384, 2494), (32, 32768, 4655)]
)
def test_measured_exposure_of_a_layer(
    heads: int, tokens: int, exposed_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 H200s, one layer alone, at full clocks (bench/results/operator_4xh200.txt); All-Scan is hidden there."""
    monkeypatch.setattr(calibration, "IN_STEP", 1.0)
    # The kernels of that run took 1.427 ms for 16,384 tokens and 16 heads.
    monkeypatch.setattr(calibration, "OPERATOR_SECONDS", 5.44e-9)
    monkeypatch.setattr(calibration, "OPERATOR_FORWARD", 0.30)
    shape = ["model.num_layers=1", f"model.num_heads={heads}", f"model.hidden_size={128 * heads}"]
    case = make_case(*GLA_1B, *shape, "world_size=4", f"data.seq_len={4 * tokens}")
    assert exposed_scan_seconds(case, Backend.lasp1) == pytest.approx(exposed_us * 1e-6, rel=0.1)
    assert exposed_scan_seconds(case, Backend.zeco) == 0
    assert exposed_scan_seconds(case, Backend.dp) == 0


def test_ranks_of_lasp1_drift_apart() -> None:
    """In a model of many layers a short turn through the ranks is waited for once a pass, a long one in every layer."""

    def exposed(ranks: int, layers: int) -> float:
        split = [f"model.num_layers={layers}", f"world_size={ranks}", f"data.seq_len={16384 * ranks}"]
        return exposed_scan_seconds(make_case(*GLA_1B, *split), Backend.lasp1)

    assert exposed(4, 20) == pytest.approx(exposed(4, 1))
    assert 0.5 * 20 * exposed(64, 1) < exposed(64, 20) < 20 * exposed(64, 1)


# --- memory and time as formulas ---


def test_memory_by_kind() -> None:
    memory = planned(*GLA_1B, "world_size=4", "data.seq_len=65536").memory
    numbers = num_parameters(make_case("model=gla_1b").config.model)
    assert set(memory.kinds) == set(KINDS)
    # A shard of the master weights, and all of them in bf16.
    assert memory.kinds["weights"] == pytest.approx(numbers * (4 / 4 + 2), rel=1e-3)
    assert memory.kinds["optimizer"] == pytest.approx(numbers * 8 / 4, rel=1e-3)
    assert memory.peak == sum(memory.kinds.values()) == max(sum(kinds.values()) for kinds in memory.phases.values())
    assert memory.usable == pytest.approx(memory.available * 0.95 - calibration.OUTSIDE_BYTES)
    tighter = plan_memory(make_case(*GLA_1B, "world_size=4", "data.seq_len=65536"), headroom=0.5)
    assert tighter.usable < memory.usable
    assert tighter.peak == memory.peak


def test_memory_by_setting() -> None:
    """What each setting is for, it does."""

    def peak(*arguments: str) -> float:
        return planned(*GLA_1B, "world_size=4", "data.seq_len=262144", *arguments).memory.peak

    whole = peak()
    assert peak("train.recompute=selective") < 0.75 * whole
    assert peak("train.recompute=full") < 0.4 * whole
    halves = [peak(f"train.segments={segments}") for segments in (1, 2, 4, 8)]
    assert halves == sorted(halves, reverse=True)
    assert peak("parallel=zero3") < whole < peak("parallel=ddp")
    assert peak("train.compile=never") > whole
    # Longer sequences in as many more segments take no more but for the states between them.
    long = planned(*GLA_1B, "world_size=4", "data.seq_len=8388608", "train.segments=32").memory
    short = planned(*GLA_1B, "world_size=4", "data.seq_len=524288", "train.segments=2").memory
    assert long.peak - short.peak == long.kinds["states"] - short.kinds["states"] == 2 * 30 * 20 * 16 * 64 * 128 * 4


def test_step_time_by_kind() -> None:
    arguments = [*GLA_1B, "world_size=4", "data.seq_len=65536"]
    own = flops_per_token(make_case(*GLA_1B).config.model)
    time = planned(*arguments, "matmul_tflops=500").time
    assert time.seconds["products"] == pytest.approx(16384 * (own.linear + own.head) / 500e12)
    assert time.tokens == 65536
    assert time.tokens_per_second == pytest.approx(65536 / time.total)
    assert time.per_device == pytest.approx(time.tokens_per_second / 4)
    # A second forward pass, a third of the blocks' products, but for what is left out; in segments, for all but one.
    full = planned(*arguments, "matmul_tflops=500", "train.recompute=full").time.seconds["products"]
    assert 1.2 < full / time.seconds["products"] < 4 / 3
    segments = planned(*arguments, "matmul_tflops=500", "train.segments=4").time.seconds["products"]
    expected = (own.linear * (1 + 3 / 4 / 3) + own.head) * 16384 / 500e12
    assert segments == pytest.approx(expected)
    forward, backward = operator_seconds(make_case(*arguments))
    assert time.seconds["operator"] == pytest.approx(20 * (forward + backward))
    assert forward + backward == pytest.approx(1.051e-3 / calibration.IN_STEP, rel=0.01)
    slower = planned(*arguments, "bandwidth_gbps=1000").time
    assert slower.seconds["elementwise"] == pytest.approx(time.seconds["elementwise"] * 3.84)


def test_traffic_that_compute_is_too_short_for() -> None:
    fast = planned(*GLA_1B, "world_size=4", "data.seq_len=65536").time
    slow = planned(*GLA_1B, "world_size=4", "data.seq_len=65536", "link_gbps=1").time
    moved = parameter_traffic(make_case(*GLA_1B, "world_size=4", "data.seq_len=65536")).total / 1e9
    assert slow.total > moved > fast.total
    # Between nodes the network counts.
    assert planned(*GLA_1B, "world_size=16", "data.seq_len=262144", "node_gbps=1").time.total > 5


def test_scans_across_nodes_and_their_costs() -> None:
    within, across = (make_case(*GLA_1B, f"world_size={n}", f"data.seq_len={16384 * n}") for n in (8, 16))
    assert within.link_of(Backend.zeco) is Link.symmetric
    assert within.link_of(Backend.lasp2) is Link.nccl
    assert across.link_of(Backend.zeco) is Link.nccl_across_nodes
    assert make_case("model=gla_1b", "world_size=16", "sp.size=8").link_of(Backend.zeco) is Link.symmetric
    p2p = make_case(*GLA_1B, "world_size=8", "sp.all_scan.transport=p2p")
    assert p2p.link_of(Backend.zeco) is Link.nccl
    arguments = [*GLA_1B, "world_size=16", "data.seq_len=262144"]
    measured = dict(MEASURED)
    costs: list[list[str]] = [[], ["scan_alpha_us=1000"], ["scan_gbps=0.1"]]
    seconds = [json_of(*arguments, *more)["wire"]["backends"]["zeco (chain)"]["scan_seconds"] for more in costs]
    assert seconds[0] < seconds[1]
    assert seconds[0] < seconds[2]
    assert measured == MEASURED


def json_of(*arguments: str) -> dict[str, Any]:
    """What the command leaves as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        code, _, err = command(*arguments, f"json={path}")
        assert code == 0, err
        return json.loads(path.read_text())


# --- advice ---


def test_advice_is_the_fastest_that_fits() -> None:
    arguments = [*GLA_1B, "world_size=4", "data.seq_len=1048576"]
    plan = make(*arguments)
    assert not plan.planned.memory.fits
    assert plan.options
    times = [option.time.total for option in plan.options]
    assert times == sorted(times)
    for option in plan.options:
        assert option.memory.fits
        # One fewer that the sequence divides into does not fit.
        counts = legal_segments(option.case)
        fewer = counts[: counts.index(option.case.segments)]
        assert not any(plan_memory(option.case.with_changes(segments=count), 0.05).fits for count in fewer)
    # By hand: every setting with every number of segments.
    everything = [
        plan.planned.case.with_changes(recompute=recompute, segments=segments)
        for recompute in Recompute
        for segments in legal_segments(plan.planned.case)
    ]
    fitting = [plan_step(case).total for case in everything if plan_memory(case, 0.05).fits]
    assert plan.options[0].time.total == min(fitting)


def test_advice_where_it_fits() -> None:
    plan = make(*GLA_1B, "world_size=4", "data.seq_len=65536", "train.segments=2")
    assert plan.planned.memory.fits
    assert plan.options[0].setting == "train.recompute=none train.segments=1"
    assert plan.planned.setting in [option.setting for option in plan.options]
    assert as_text(plan).count("(as planned)") == 2  # the backend, and the setting


def test_advice_where_nothing_fits() -> None:
    arguments = [*GLA_1B, "world_size=2", "data.seq_len=131072", "memory_gb=13"]
    plan = make(*arguments)
    assert plan.options == []
    assert plan.elsewhere is not None
    assert plan.elsewhere.memory.fits
    ranks = plan.elsewhere.case
    assert ranks.sp_size == ranks.world_size > 2
    fewer = [arguments[-1], *GLA_1B, "data.seq_len=131072", f"world_size={ranks.world_size // 2}"]
    assert make(*fewer).options == []
    text = as_text(plan)
    assert "does not fit" in text
    assert f"nothing fits on these ranks; with world_size={ranks.world_size} sp.size={ranks.sp_size}:" in text
    alone = make(*GLA_1B, "sp=dp", "world_size=2", "data.global_batch=2", "memory_gb=4")
    assert alone.options == []
    assert alone.elsewhere is None
    assert "nothing fits, with any train.recompute and train.segments" in as_text(alone)


# --- the experiments, and the command ---


@pytest.mark.parametrize("name", [name for name in group_options()["experiment"] if name not in NO_LENGTH])
def test_experiments_fit_their_machine(name: str) -> None:
    case, notes = build_case(parse([f"+experiment={name}"]))
    assert notes == []
    assert case.machine.name == ("cpu" if name == "gla_tiny_1m" else "h200")
    assert case.world_size == case.sp_size == (2 if name == "gla_tiny_1m" else 4)
    assert plan_memory(case, 0.05).fits
    expected = {"gla_1b_16k": 16384, "gla_1b_32k": 32768, "gla_1b_1m": 1 << 18, "gla_1b_8m": 1 << 15}
    assert case.tokens == expected.get(name, case.tokens)
    if name == "gla_1b_8m":
        # Allocators reserve more than a peak: measured at 32,768 tokens a rank, up to a quarter.
        assert plan_memory(case, 0.05).peak < 100e9
    if name == "gla_tiny_1m":
        assert case.config.data.seq_len == 1 << 20
        assert plan_memory(case, 0.05).peak < 2.5e9


def test_command() -> None:
    arguments = ["+experiment=gla_1b_16k", "world_size=256"]
    code, text, err = command(*arguments)
    assert (code, err) == (0, "")
    assert "sp=zeco on 64 × 4 ranks (dp × sp) of h200, zero2" in text
    assert "note: data.global_batch=64, not 1" in text
    for row in ("dp", "lasp1", "lasp2", "zeco (chain)", "zeco (two_shot)", *KINDS):
        assert f"\n  {row} " in text, row
    assert command(*arguments) == (code, text, err)
    data = json_of(*arguments)
    assert data == json_of(*arguments)
    assert set(data) == {
        *("case", "parameters", "flops_per_token", "memory", "time", "wire", "advice", "assumptions", "notes")
    }
    assert data["parameters"] == num_parameters(make_case("model=gla_1b").config.model)
    assert sum(row["planned"] for row in data["wire"]["backends"].values()) == 1
    assert sum(data["time"]["seconds"].values()) == pytest.approx(data["time"]["step_seconds"])
    assert sum(data["memory"]["bytes"].values()) == pytest.approx(data["memory"]["peak_bytes"])
    # A run that does not fit is an answer, too.
    assert command("+experiment=gla_1b_1m", "train.recompute=none")[0] == 0


def test_hours() -> None:
    data = json_of("+experiment=gla_1b_16k", "token_budget=100e9")["time"]
    assert data["hours"] == pytest.approx(100e9 / data["tokens_per_second"] / 3600)
    assert json_of("+experiment=gla_1b_16k", "train.steps=7")["time"]["token_budget"] == 7 * 65536


def test_help() -> None:
    code, text, _ = command("--help")
    assert code == 0
    assert text == describe() + "\n"
    for entry in dataclasses.fields(PlanSettings):
        assert f"  {entry.name}=" in text
        assert f"{entry.name}" in (PlanSettings.__doc__ or "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["world_size=0"], "world_size=0: must be ≥ 1 and ≤ 1048576"),
        (["gpu=h900"], "gpu=h900: must be one of h200, h100, a100, cpu or null"),
        (["gpus_per_node=0"], "gpus_per_node=0: must be ≥ 1 and ≤ 1048576"),
        (["headroom=1"], "headroom=1.0: must be ≥ 0 and < 1"),
        (["memory_gb=-3"], "memory_gb=-3.0: must be > 0 and ≤ 1e+18"),
        (["token_budget=0"], "token_budget=0.0: must be > 0 and ≤ 1e+18"),
        (["json=/no/such/folder/plan.json"], "json=/no/such/folder/plan.json: its folder does not exist"),
        (["world_sise=4"], "world_sise=4: unknown key; did you mean world_size?"),
        (["+world_size=4"], "+world_size=4: the key exists; write world_size=4"),
        (["+experiment=gla_9b"], "experiment=gla_9b: must be one of"),
        (["train.segment=4"], "train.segment=4: unknown key; did you mean train.segments?"),
        (["world_size=6", "sp.size=4"], "sp.size=4: must divide the world size 6"),
        (["sp=dp", "sp.size=2", "world_size=2"], "sp.size=2: sp=dp keeps whole sequences on a rank"),
        (["data.seq_len=4096", "train.segments=3"], "data.seq_len=4096: must divide by sp.size × train.segments"),
        (["world_size=4", "sp.size=1", "data.global_batch=3"], "data.global_batch=3: must be a multiple of"),
        (["4"], "argument=4: must be KEY=VALUE"),
    ],
)
def test_mistakes(arguments: list[str], expected: str) -> None:
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {expected}")
    assert err.count("\n") == 1


def test_a_model_too_large_for_this_machine() -> None:
    """What a cluster is to train is planned elsewhere."""
    large = ["model.hidden_size=32768", "model.num_heads=256", "model.intermediate_size=98304", "model.num_layers=120"]
    arguments = [*large, "train.dtype=bf16", "world_size=4096", "sp.size=8", "data.seq_len=65536"]
    plan = make(*arguments, "parallel=zero3")
    parameters = num_parameters(plan.planned.case.config.model)
    assert parameters > 1e12
    assert plan.planned.memory.kinds["weights"] > parameters * 4 / 4096


def test_keys_of_both_kinds_do_not_meet() -> None:
    own = {entry.name for entry in dataclasses.fields(PlanSettings)}
    assert not own & {*group_options(), *(entry.name for entry in dataclasses.fields(parse([]).config))}
    with pytest.raises(ConfigError):
        parse(["world_size=two"])


def test_as_json_needs_no_file(tmp_path: Path) -> None:
    plan = make("+experiment=gla_tiny_1m")
    assert json.loads(json.dumps(as_json(plan)))["case"]["gpu"] == "cpu"
    assert command("+experiment=gla_tiny_1m", f"json={tmp_path}")[0] == 3


def test_starts_nothing_and_needs_few_packages() -> None:
    """A laptop has neither GPUs nor their packages."""
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('triton', 'fla', 'transformers', 'wandb')))\n"
        "from zeco_train.plan.command import main\n"
        "assert main(['+experiment=gla_1b_8m']) == 0\n"
        "import torch.distributed as dist\n"
        "assert not dist.is_initialized()\n"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "gla_1b: 1,159,766,528 parameters" in done.stdout
