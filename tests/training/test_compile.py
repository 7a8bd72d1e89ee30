"""Compiled blocks equal eager ones in few graphs without breaks; custom operators pass `opcheck`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import opcheck

from models.attn import AttnConfig
from models.language_model import LanguageModel
from models.spec import ModelSpec
from tests.support.distributed import run_distributed
from tests.support.sp_reference import RecordedExchange, build_scans
from tests.support.steps import TINY, Case, check, make_mesh, run_steps, write_documents
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.mesh import ProcessMesh
from zeco_train.ops.linear import quantise_rows
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.seam import Exchange, exchange_of
from zeco_train.sp.exchange import local_exchange
from zeco_train.training.build import build_model
from zeco_train.training.config import Compile, TrainConfig

pytestmark = pytest.mark.numeric

# Norms and products with handwritten gradients in eager mode use autograd when compiled: measured 3e-15 for gradients
# and 5e-15 for parameters.
TOLERANCE = 1e-12


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    """Reset the compiler before and after each test."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        yield
    torch._dynamo.reset()


def _counted() -> Any:
    """A backend that counts its graphs; not imported by workers that only collect this file."""
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend("aot_eager")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("compile") / "store")


@pytest.fixture(scope="module")
def mesh() -> Iterator[ProcessMesh]:
    yield make_mesh(0, 1, 1)
    dist.destroy_process_group()


def check_graphs(case: Case, sizes: list[tuple[int, int]], mesh: ProcessMesh, store: Path) -> None:
    """Of models of so many layers, after so many steps."""
    scan = RecordedExchange(local_exchange())
    graphs = []
    for num_layers, steps in sizes:
        case = dataclasses.replace(case, num_layers=num_layers, steps=steps)
        expected = run_steps(case, scan, mesh, store)
        torch._dynamo.reset()
        counter = _counted()
        result = run_steps(dataclasses.replace(case, compiler=counter), scan, mesh, store)
        check(result, expected, TOLERANCE, str(case))
        assert result.launches == expected.launches
        graphs.append(counter.frame_count)
    # The number of graphs does not depend on layers or steps: block, norm and loss, each with and without gradients,
    # the block once more for each of replay, carried states and recompute (9 in all), and the scaling of the loss's
    # gradients, for which Dynamo calls the backend twice in fp64, in the first backward pass only.
    assert graphs[0] == graphs[-1] <= 11
    assert not torch._dynamo.utils.counters["graph_break"]


def test_compiled_blocks_equal_eager_in_few_graphs(mesh: ProcessMesh, store: Path) -> None:
    check_graphs(Case(), [(1, 1)], mesh, store)


@pytest.mark.slow
def test_another_exchange_does_not_recompile() -> None:
    """Nor do the passes of two of them in turns; each launches its own scans."""
    model = ModelSpec(dataclasses.replace(TINY, attn=AttnConfig(every=2))).build().double()
    model.init_weights(0)
    counter = _counted()
    model.compile_parts(backend=counter)
    ids = torch.randint(TINY.vocab_size, (1, 41), generator=torch.Generator().manual_seed(0))

    def loss(exchange: Exchange) -> Tensor:
        found = model(ids[:, :-1], SequencePosition((0, 40), exchange=exchange), ids[:, 1:])
        assert isinstance(found, Tensor)
        return found

    first, *others = (RecordedExchange(local_exchange()) for _ in range(3))
    loss(first).backward()
    graphs = counter.frame_count
    assert graphs
    for each in [loss(exchange) for exchange in others]:
        each.backward()
    assert counter.frame_count == graphs
    launches = [event for event in first.events if event.startswith("launch")]
    assert {*launches} == {"launch forward", "launch reverse"}
    assert first.events == others[0].events == others[1].events


def test_a_handle_and_a_copy_of_it_name_the_exchange_as_long_as_it_lives() -> None:
    exchange, device = local_exchange(), torch.device("cpu")
    handle = exchange.handle(device)
    assert exchange.handle(device) is handle
    assert exchange_of(handle) is exchange is exchange_of(handle.clone())
    other = exchange.replaced(is_last=False)
    assert exchange_of(other.handle(device)) is other
    assert exchange_of(handle) is exchange
    del exchange
    with pytest.raises(RuntimeError):
        exchange_of(handle)


def two_ranks(rank: int, world_size: int, store: str, name: str, case: Case) -> None:
    mesh, scan = make_mesh(rank, world_size, world_size), build_scans(tuple(range(world_size)))[name]
    expected = run_steps(case, scan, mesh, store)
    result = run_steps(dataclasses.replace(case, compiler="aot_eager"), scan, mesh, store)
    check(result, expected, TOLERANCE, f"{name}, {case}")
    assert result.launches == expected.launches, f"{name}, {case}"
    scan.drain()
    dist.barrier()  # keep ranks alive until their peers have received everything


@pytest.mark.slow
def test_compiled_sharded_blocks_equal_eager(store: Path) -> None:
    case = Case(Strategy.zero2, recompute=Recompute.selective, steps=1, num_layers=1)
    run_distributed(two_ranks, 2, str(store), "lasp1", case)


@pytest.mark.parametrize(("setting", "calls"), [(Compile.always, 1), (Compile.auto, 0), (Compile.never, 0)])
def test_cpu_compiles_only_with_setting_always(setting: Compile, calls: int, mesh: ProcessMesh) -> None:
    """On a CPU; `auto` compiles on GPUs only."""
    with mock.patch.object(LanguageModel, "compile_parts") as compile_parts:
        build_model(TINY, TrainConfig(compile=setting), Strategy.zero2, mesh, seed=0)
        build_model(TINY, TrainConfig(compile=setting, deterministic=True), Strategy.zero2, mesh, seed=0)
    options = [call.kwargs for call in compile_parts.call_args_list]
    assert options == [{}, {"options": {"deterministic": True}}][: 2 * calls]


@pytest.mark.slow
def test_projections_pass_opcheck() -> None:
    x = torch.randn(2, 7, 4, dtype=torch.float64)
    weights = [torch.randn(size, 4, dtype=torch.float64) for size in (3, 5, 2)]
    dys = [torch.randn(2, 7, size, dtype=torch.float64) for size in (3, 5, 2)]
    leaves = [weight.clone().requires_grad_() for weight in weights]
    every = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    for in_fp8, rounded, tests in (
        ([False, False, False], [], every),
        ([True, False, True], [*quantise_rows(x.flatten(0, 1))], every[1:]),  # the first multiplies its inputs
    ):
        inputs = x.clone().requires_grad_(), leaves, in_fp8, rounded, True, False
        opcheck(torch.ops.zeco.parallel_linear.default, inputs, test_utils=tests)
        opcheck(torch.ops.zeco.parallel_linear_backward.default, (dys, x, weights, in_fp8, False))
    opcheck(torch.ops.zeco.product_after.default, (dys[0], weights[0], weights[0]))
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]  # the fourth compares outputs, NaN here
    for is_fp8 in (False, True):
        inputs = x.clone().requires_grad_(), leaves[:1], [is_fp8], [], False, False
        opcheck(torch.ops.zeco.parallel_linear.default, inputs, test_utils=tests)
