"""Linear layers of a shared input in one operator, against separate layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.projections import parallel_linear, unread_linear

pytestmark = pytest.mark.numeric

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


def test_parallel_linear_passes_gradcheck() -> None:
    x, weights, _ = make_inputs()
    assert torch.autograd.gradcheck(lambda x, *weights: tuple(parallel_linear(x, *weights)), (x, *weights))


def check_sums(found: Tensor, products: list[tuple[Tensor, Tensor]]) -> None:
    """`found` is the sum of the matrix products, whatever the order in which a math library adds.

    The order depends on the processor and on strides, so two calls of the same product need not agree in their bits.
    An error of half an eps for each term of an element, relative to the sum of the terms' sizes, bounds all orders. In
    bf16 a product is summed in fp32 and rounded once, and once more when it is added to the sum of the others.
    """
    exact = sum(a.double() @ b.double() for a, b in products)
    sizes = sum(a.double().abs() @ b.double().abs() for a, b in products)
    terms = 2 * len(products) if found.dtype == torch.bfloat16 else sum(a.shape[-1] for a, _ in products)
    assert ((found.double() - exact).abs() <= 0.5 * terms * torch.finfo(found.dtype).eps * sizes).all()


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_outputs_and_gradients_equal_separate_linear_layers(dtype: torch.dtype, strided: bool) -> None:
    x, weights, dys = make_inputs(dtype, strided)
    outputs = parallel_linear(x, *weights)
    dx, *dweights = torch.autograd.grad(outputs, [x, *weights], dys)
    x, weights = x.detach(), [weight.detach() for weight in weights]
    assert [tensor.dtype for tensor in (*outputs, dx, *dweights)] == 7 * [dtype]
    for y, weight in zip(outputs, weights, strict=True):
        check_sums(y.detach(), [(x, weight.T)])
    for dweight, dy in zip(dweights, dys, strict=True):
        check_sums(dweight, [(dy.flatten(0, 1).T, x.flatten(0, 1))])
    check_sums(dx, [*zip(dys, weights, strict=True)])


def test_unused_output_gives_zero_weight_gradient() -> None:
    x, weights, dys = make_inputs()
    outputs = parallel_linear(x, *weights)
    grads = torch.autograd.grad([outputs[0], outputs[2]], [x, *weights], [dys[0], dys[2]])
    torch.testing.assert_close(grads[0], dys[0] @ weights[0] + dys[2] @ weights[2])
    assert not grads[2].any()


def test_gradients_with_frozen_input_and_weight() -> None:
    x, weights, dys = make_inputs()
    x.requires_grad_(False)
    weights[1].requires_grad_(False)
    grads = torch.autograd.grad(parallel_linear(x, *weights), [weights[0], weights[2]], dys)
    torch.testing.assert_close(grads[0], dys[0].flatten(0, 1).T @ x.flatten(0, 1))
    torch.testing.assert_close(grads[1], dys[2].flatten(0, 1).T @ x.flatten(0, 1))


def test_unread_linear_gives_gradients_of_linear() -> None:
    x, (weight, *_), (dy, *_) = make_inputs()
    unread = unread_linear(x, weight)
    assert unread.isnan().all()  # so that an accidental read shows
    dx, dweight = torch.autograd.grad(unread, [x, weight], dy)
    check_sums(dx, [(dy, weight.detach())])
    check_sums(dweight, [(dy.flatten(0, 1).T, x.detach().flatten(0, 1))])
