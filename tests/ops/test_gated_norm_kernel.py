"""The kernels of the gated norm against the equations in fp64: interpreted, and on a GPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from models.modules import GatedRMSNorm, GateFunction
from tests.models.test_layers import reference_norm
from tests.support.distributed import run_distributed
from tests.support.interpreter import skip_overflow_checks
from zeco_train.ops.gated_norm import kernels as launch

pytestmark = pytest.mark.numeric

EPS = 1e-3
# One rounding of the results, which the interpreter cuts off instead, and sums of at most 2,100 terms in fp32. Measured
# there: 7.3e-3 and 4.8e-7.
TOLERANCES = {torch.bfloat16: 2**-7, torch.float32: 2e-6}
# Around a tile, and more rows than programs have tiles; short rows, and of a size that is no power of two.
SHAPES = [(2, 5, 4, 128), (1, 3, 100), (7, 8), (9,), (1, 70, 3, 256), (0, 4, 16), (3, 0), (2, 17, 2100)]
# The same with fewer turns of a program.
SMALL = {torch.float32: [(1, 10, 3, 256), (9,), (0, 4, 16), (3, 0)], torch.bfloat16: [(2, 3, 2100)]}


def arguments(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Inputs of the backward pass: a part of a wider projection as the gate, and a transposed gradient."""
    generator = torch.Generator().manual_seed(sum(shape))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype).to(device)

    *rows, width = shape
    return {
        "dy": normal(width, *rows).movedim(0, -1),
        "x": normal(*shape),
        "gate": 3 * normal(*rows, 3 * width)[..., width : 2 * width],
        "weight": normal(width),
    }


def errors(shape: tuple[int, ...], dtype: torch.dtype, function: GateFunction, device: torch.device) -> list[float]:
    """Largest error of the output and of each gradient over its largest number."""
    inputs, is_swish = arguments(shape, dtype, device), function is GateFunction.swish
    dy = inputs.pop("dy")
    y, rstd = launch.launch_gated_norm(**inputs, eps=EPS, is_swish=is_swish)
    found = y, *launch.launch_gated_norm_grads(dy, **inputs, rstd=rstd, is_swish=is_swish)
    assert [x.dtype for x in found] == [dtype, dtype, dtype, torch.float32]
    x, gate, weight = (tensor.double().detach().requires_grad_() for tensor in inputs.values())
    opening = gate.sigmoid() * (gate if is_swish else 1)
    exact = reference_norm(x, weight, EPS) * opening
    expected = exact, *torch.autograd.grad(exact, (x, gate, weight), dy.double())
    return [
        float((ours.double() - theirs).abs().max() / theirs.abs().max()) if theirs.any() else float(ours.any())
        for ours, theirs in zip(found, expected, strict=True)
    ]


def wrong(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[str]:
    """Cases whose errors are above the tolerance."""
    found = []
    for shape in shapes:
        for function in GateFunction:
            # Fewer programs than tiles: some have several. A comparison with NaN is false.
            with mock.patch.object(launch, "_PROGRAMS", 2):
                measured = errors(shape, dtype, function, device)
            if not all(error <= TOLERANCES[dtype] for error in measured):
                found.append(f"{shape}, {function}, {dtype}: {measured}")
    return found


def _interpreted(rank: int, world_size: int) -> list[str]:
    skip_overflow_checks()
    return [case for dtype, shapes in SMALL.items() for case in wrong(shapes, dtype, torch.device("cpu"))]


def test_kernels_equal_the_equations_in_fp64_under_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_distributed(_interpreted, 1, fresh=True) == [[]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_kernels_equal_the_equations_in_fp64_on_gpu(dtype: torch.dtype) -> None:
    assert wrong(SHAPES, dtype, torch.device("cuda")) == []


@pytest.mark.gpu
@pytest.mark.parametrize("is_compiled", [False, True])
def test_norms_on_gpu_launch_the_kernels(is_compiled: bool) -> None:
    norm = GatedRMSNorm(128, EPS).cuda()
    run = torch.compile(norm, fullgraph=True) if is_compiled else norm
    x, gate = (torch.randn(3, 50, 4, 128, device="cuda", requires_grad=True) for _ in range(2))
    with (
        mock.patch.object(launch, "launch_gated_norm", wraps=launch.launch_gated_norm) as forward,
        mock.patch.object(launch, "launch_gated_norm_grads", wraps=launch.launch_gated_norm_grads) as backward,
    ):
        grads = torch.autograd.grad(run(x, gate).square().sum(), (x, gate, norm.weight))
    forward.assert_called_once()
    backward.assert_called_once()
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, gate, norm.weight)]
    y = reference_norm(wide[0], wide[2], EPS) * wide[1].sigmoid() * wide[1]
    for ours, theirs in zip(grads, torch.autograd.grad(y.square().sum(), wide), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("shape", [(1, 4), (4,), (2, 1, 4)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    norm, x = GatedRMSNorm(4, EPS), torch.ones(2, 3, 4)
    with pytest.raises(ValueError, match=r"x \(2, 3, 4\), gate .* do not fit"):
        norm(x, torch.ones(shape))


@pytest.mark.parametrize("shape", [(2, 37, 2048), (37, 128), (2, 37, 4, 128)])
def test_kernels_are_not_compiled_for_each_length(shape: tuple[int, ...]) -> None:
    """Numbers of rows are numbers to a kernel, but it is compiled for each H."""
    views = [launch._matrices(torch.empty(shape)[..., :length, :]) for length in (shape[-2], 1)]
    expected = [1, 1] if len(shape) < 4 else [shape[-2], 1]
    assert [view.shape[1] for view in views] == expected
    # A part of a wider projection is not copied.
    wide = torch.empty(*shape[:-1], 3 * shape[-1])
    assert launch._matrices(wide[..., shape[-1] : 2 * shape[-1]]).untyped_storage().data_ptr() == wide.data_ptr()
