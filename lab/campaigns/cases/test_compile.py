"""Inductor on CPUs, lengths that change, and addresses of NaN in compiled blocks."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from models.spec import ModelSpec
from tests.support.distributed import run_distributed
from tests.support.sp_reference import RecordedExchange
from tests.support.steps import TINY, Case, check, make_loader, make_step, run_steps
from tests.training.test_compile import (
    TOLERANCE,
    _compiler,
    _counted,
    check_graphs,
    mesh,
    store,
    two_ranks,
)
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.mesh import ProcessMesh
from zeco_train.ops.linear import Matmul
from zeco_train.ops.position import SequencePosition, find_doc_ids
from zeco_train.ops.recompute import Recompute
from zeco_train.sp.exchange import local_exchange
from zeco_train.training.nonfinite import explain

# Fixtures.
__all__ = ["_compiler", "mesh", "store"]
pytestmark = pytest.mark.campaign


def test_no_recompilation_after_second_length() -> None:
    """As in benchmarks: after two lengths the graphs are dynamic and serve all others."""
    scan = local_exchange()
    eager, compiled = (ModelSpec(TINY).build().double() for _ in range(2))
    counter = _counted()
    compiled.compile_parts(backend=counter)
    graphs = []
    for tokens in (40, 60, 130):
        ids = torch.randint(TINY.vocab_size, (1, tokens + 1), generator=torch.Generator().manual_seed(tokens))
        shard, grads = SequencePosition((0, tokens), exchange=scan), []
        for model in (eager, compiled):
            model.init_weights(0)
            model.zero_grad()
            model(ids[:, :-1], shard, ids[:, 1:]).backward()
            grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=TOLERANCE * grads[0].norm().item())
        graphs.append(counter.frame_count)
    assert graphs[1] == graphs[2]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler for CPUs")
def test_inductor_equals_eager(mesh: ProcessMesh, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    scan = RecordedExchange(local_exchange())
    case = Case(recompute=Recompute.full, segments=2, documents=True, steps=1, num_layers=1)
    expected = run_steps(case, scan, mesh, store)
    # Workers that compile in parallel would import torch first.
    with torch._inductor.config.patch(compile_threads=1):
        result = run_steps(dataclasses.replace(case, compiler="inductor"), scan, mesh, store)
    check(result, expected, TOLERANCE, "inductor")
    assert result.launches == expected.launches


@pytest.mark.few(1)
@pytest.mark.parametrize("recompute", [Recompute.full, Recompute.selective, Recompute.none])
@pytest.mark.parametrize("compiled_before", [True, False])
@pytest.mark.parametrize("with_backward", [True, False])
def test_non_finite_tensor_in_compiled_block_is_named(
    recompute: Recompute, compiled_before: bool, with_backward: bool, mesh: ProcessMesh, store: Path
) -> None:
    case = Case(recompute=recompute, compiler="aot_eager")
    scan = local_exchange()
    model, step = make_step(case, scan, mesh)
    loader = make_loader(case, mesh, store)
    batches = [[loader.batch(0, micro_step)] for micro_step in range(loader.micro_steps)]
    if compiled_before:
        step.forward.total_loss(batches[0])
        step.backward(batches[0], last=True)
        step.zero_grad()
    attention: Any = model.model.layers[1].attn
    with torch.no_grad():
        # Finite, but not their product.
        for weight in (attention.g_norm_swish_gate.weight, attention.o_proj.weight):
            weight.to_local().fill_(1e300)
    found = explain(step, "the loss is nan", batches.__getitem__, len(batches), with_backward=with_backward)
    begin = (
        "the loss is nan; the first non-finite tensor is the output of model.layers.1.attn.o_proj (gla), on rank 0: "
    )
    assert found.startswith(begin + "token 0 of sequence ")
    # As before.
    assert {block.recompute for block in model.model.blocks()} == {recompute}


CASES = {
    "whole": Case(),
    "selective": Case(recompute=Recompute.selective),
    "full": Case(recompute=Recompute.full),
    "fp8, full": Case(recompute=Recompute.full, matmul=Matmul.fp8),
    "segments": Case(segments=2),
    "segments, documents, full": Case(recompute=Recompute.full, segments=3, documents=True),
}


@pytest.mark.parametrize("name", CASES)
def test_compiled_blocks_equal_eager_in_few_graphs(name: str, mesh: ProcessMesh, store: Path) -> None:
    """The last one combines the others."""
    check_graphs(CASES[name], [(1, 2), (2, 1)], mesh, store)


def test_compiled_sharded_blocks_equal_eager(store: Path) -> None:
    case = Case(Strategy.zero3, recompute=Recompute.full, segments=2, documents=True, steps=1, num_layers=1)
    run_distributed(two_ranks, 2, str(store), "two_shot", case)


def _tokens(dtype: torch.dtype, tokens: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k, v, g; do; and a state."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def random(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator, dtype=torch.float64)

    inputs = [random(tokens, 3, size).to(dtype) for size in (4, 4, 5)]
    inputs.append(-random(tokens, 3, 4).abs().to(wide))
    return inputs, random(tokens, 3, 5).to(dtype), random(3, 4, 5).to(wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("tokens", [70, 1])
@pytest.mark.parametrize("documents", [True, False])
def test_operator_passes_opcheck(dtype: torch.dtype, tokens: int, documents: bool) -> None:
    """GLA's, replays among them; tests/ops/test_opcheck.py has the other operators."""
    exchange = local_exchange()
    handle = exchange.handle(torch.device("cpu"))
    inputs, do, state = _tokens(dtype, tokens)
    borders = torch.tensor(sorted({0, tokens // 2, tokens})) if documents else None
    doc_ids = find_doc_ids(borders, 0, tokens, torch.device("cpu"))
    for replay in (False, True):
        for carry in (False, True):
            leaves = [tensor.clone().requires_grad_() for tensor in inputs]
            carry_in = state.clone().requires_grad_() if carry else None
            incoming_state = 2 * state if replay else None
            arguments = (leaves, "gla", 0.5, handle, doc_ids, incoming_state, carry_in, carry, [], None)
            tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
            if not (replay and carry):
                # This check compares outputs, and the carry_out of a replay is NaN.
                tests.append("test_aot_dispatch_dynamic")
            opcheck(torch.ops.zeco.mix.default, arguments, test_utils=tests)
            with torch.no_grad():
                _, received, _, transition, saved, _ = torch.ops.zeco.mix(*arguments)
            received = received if incoming_state is None else incoming_state
            dcarry_out = -state if carry else None
            kept = inputs, do, saved, transition, received, dcarry_out
            opcheck(torch.ops.zeco.mix_backward.default, (*kept, "gla", 0.5, handle, doc_ids, carry, []))
