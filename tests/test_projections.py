"""Linear layers of one input, in one operator, against each by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.projections import parallel_linear, unread_linear

SIZES = (3, 5, 2)


def make_inputs(dtype: torch.dtype = torch.float64, strided: bool = False) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """x [2, 7, 4], its weights and the outputs' gradients."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return tensor.transpose(0, 1).contiguous().transpose(0, 1) if strided else tensor

    x = random(2, 7, 4).requires_grad_()
    weights = [random(size, 4).requires_grad_() for size in SIZES]
    return x, weights, [random(2, 7, size) for size in SIZES]


def test_gradients_are_exact() -> None:
    x, weights, _ = make_inputs()
    assert torch.autograd.gradcheck(lambda x, *weights: tuple(parallel_linear(x, *weights)), (x, *weights))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_outputs_and_gradients_equal_those_of_linear_layers(dtype: torch.dtype, strided: bool) -> None:
    x, weights, dys = make_inputs(dtype, strided)
    outputs = parallel_linear(x, *weights)
    expected = [F.linear(x, weight) for weight in weights]
    for ours, theirs in zip(outputs, expected, strict=True):
        assert torch.equal(ours, theirs)
    grads = torch.autograd.grad(outputs, [x, *weights], dys)
    expected_grads = torch.autograd.grad(expected, [x, *weights], dys)
    for weight_grad, theirs in zip(grads[1:], expected_grads[1:], strict=True):
        torch.testing.assert_close(weight_grad, theirs, rtol=4 * torch.finfo(dtype).eps, atol=0)
    # The sum of three products, rounded once for each of them.
    dx, exact = grads[0], sum(dy.double() @ w.detach().double() for dy, w in zip(dys, weights, strict=True))
    assert (dx.dtype, dx.shape) == (dtype, x.shape)
    assert (dx.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps * exact.abs().max()


def test_one_output_may_be_left_unused() -> None:
    x, weights, dys = make_inputs()
    outputs = parallel_linear(x, *weights)
    grads = torch.autograd.grad([outputs[0], outputs[2]], [x, *weights], [dys[0], dys[2]])
    torch.testing.assert_close(grads[0], dys[0] @ weights[0] + dys[2] @ weights[2])
    assert not grads[2].any()


def test_an_input_without_gradient() -> None:
    x, weights, dys = make_inputs()
    x.requires_grad_(False)
    weights[1].requires_grad_(False)
    grads = torch.autograd.grad(parallel_linear(x, *weights), [weights[0], weights[2]], dys)
    torch.testing.assert_close(grads[0], dys[0].flatten(0, 1).T @ x.flatten(0, 1))
    torch.testing.assert_close(grads[1], dys[2].flatten(0, 1).T @ x.flatten(0, 1))


def test_an_unread_product_has_the_gradients_of_a_read_one() -> None:
    x, (weight, *_), (dy, *_) = make_inputs()
    unread = unread_linear(x, weight)
    assert unread.isnan().all()  # so that whoever reads it after all will notice
    found = torch.autograd.grad(unread, [x, weight], dy)
    expected = torch.autograd.grad(F.linear(x, weight), [x, weight], dy)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-15)
