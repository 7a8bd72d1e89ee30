"""`zeco_train.load` and `zeco_train.functional` on GPUs, against fp64 on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeco_train
from tests.hf.conftest import run
from tests.sp import test_functions
from tests.support import operator_cases
from tests.support.distributed import run_distributed
from zeco_train import functional
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.sp.backend_registry import SHARING

__all__ = ["run"]

pytestmark = [pytest.mark.campaign, pytest.mark.gpu]

# Widths that the kernels take; uneven parts, the first one shorter than a chunk.
WIDTHS = {"K": 64, "V": 64, "C": 64}
LENGTHS = 47, 210
# Outputs and gradients are sums of products that are rounded to bf16, or to TF32 in fp32.
TOLERANCES = {torch.bfloat16: 3e-2, torch.float32: 4e-3}


def operands(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    with patch.dict(operator_cases.SIZES, WIDTHS):
        found = test_functions.operands_of(name, sum(LENGTHS))
    wide = ("g", "log_decay", "beta")
    return {x: t.float() if x in wide else t.to(dtype) for x, t in found.items()}


def check(name: str, dtype: torch.dtype, ranks: functional.Ranks | None, bounds: Sequence[int]) -> None:
    operator, rank = OPERATORS[name], 0 if ranks is None else ranks.rank

    def own(x: Tensor, dims: str) -> Tensor:
        return x[:, bounds[rank] : bounds[rank + 1]] if "T" in dims else x

    function, leaves = getattr(functional, name), operands(name, dtype)
    options: dict[str, Any] = {} if operator.reads_whole else {"documents": [[0, 30, 47, 150, bounds[-1]]] * 2}
    whole = {x: t.double().requires_grad_(x != "log_decay") for x, t in leaves.items()}
    wanted, _ = function(**whole, **options)
    do = torch.sin(torch.arange(wanted.numel(), dtype=torch.float64)).view_as(wanted).to(dtype)
    wanted.backward(do.double())
    mine = {x: own(t, operator.dims_of[x]).cuda().requires_grad_(x != "log_decay") for x, t in leaves.items()}
    if options:
        options["bounds"] = [*bounds]
    o, _ = function(**mine, **options, ranks=ranks)
    dims = operator.dims[operator.output]
    o.backward(own(do, dims).cuda())
    pairs = {"o": (o, own(wanted, dims))}
    for x, leaf in mine.items():
        if leaf.grad is not None:
            if "T" not in operator.dims_of[x] and ranks is not None:
                dist.all_reduce(leaf.grad)
            pairs[f"d{x}"] = leaf.grad, own(whole[x].grad, operator.dims_of[x])  # type: ignore[arg-type]
    for what, (x, exact) in pairs.items():
        error = test_functions.relative(x.detach().cpu().double(), exact.detach())
        assert error <= TOLERANCES[dtype], f"{name} {what} {dtype} {ranks}: {error:.1e}"


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", OPERATORS)
def test_function_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    check(name, dtype, None, [0, sum(LENGTHS)])


def over_ranks(rank: int, world_size: int) -> None:
    bounds = [*itertools.accumulate(LENGTHS, initial=0)]
    connected = [functional.connect(backend=backend) for backend in SHARING]
    for name in OPERATORS:
        for ranks in connected:
            check(name, torch.bfloat16, ranks, bounds)
    shape = (2, bounds[-1], 4, 64)
    leaves = [torch.sin(torch.arange(2 * bounds[-1] * 256.0) * n).view(shape).bfloat16() for n in (1, 2, 3)]
    mine = [x[:, bounds[rank] : bounds[rank + 1]].cuda().requires_grad_() for x in leaves]
    whole = [x.double().requires_grad_() for x in leaves]
    wanted = functional.softmax_attention(*whole)
    wanted.sum().backward()
    o = functional.softmax_attention(*mine, bounds=bounds, ranks=connected[0])
    o.sum().backward()
    pairs = [(o, wanted), *((x.grad, y.grad) for x, y in zip(mine, whole, strict=True))]
    for x, exact in pairs:
        part = exact[:, bounds[rank] : bounds[rank + 1]]  # type: ignore[index]
        assert test_functions.relative(x.detach().cpu().double(), part.detach()) <= TOLERANCES[torch.bfloat16]  # type: ignore[union-attr]
    dist.barrier()


def test_functions_over_two_gpus_by_every_backend() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_distributed(over_ranks, 2, backend="nccl", timeout=240)


def test_loaded_model_on_a_gpu_equals_that_on_the_cpu(run: Path) -> None:
    exact = zeco_train.load(run, device="cpu", dtype="fp64")
    ids = exact.encode("def main(argument):\n    return argument + 1\n" * 8)
    for dtype, tolerance in (("fp32", 1e-2), ("bf16", 5e-2)):
        model = zeco_train.load(run, device="cuda", dtype=dtype)
        logits = model.logits(ids)
        assert logits.device.type == model.device.type == "cuda"
        assert test_functions.relative(logits.cpu().double(), exact.logits(ids)) <= tolerance
        assert model.loss(ids) == pytest.approx(exact.loss(ids), abs=tolerance)
        (text,) = model.generate("def main(", max_tokens=8, temperature=0)
        assert len(text.tokens) == 8
    # Without a wish a model is where there is room for it.
    assert zeco_train.load(run).device.type == "cuda"
