"""Linear layers of a shared input in one operator, against separate layers."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_fw_bw_and_get_code

from models.projections import Projection, parallel_linear, project, project_beside, set_matmul
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.linear import Matmul
from zeco_train.ops.mix import mix_beside
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

SIZES = (3, 5, 2)
BF16, FP8 = Matmul.bf16, Matmul.fp8


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


@pytest.mark.few
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


def rounded(x: Tensor) -> Tensor:
    """Rows [..., D] of x rounded to fp8, from the sizes of steps: no number of fewer than 8 bits is made."""
    largest = x.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(largest / 448))), 1.0)
    steps = torch.exp2(torch.floor(torch.log2((x / scale).abs().clamp(min=2.0**-6))) - 3) * scale
    return torch.round(x / steps) * steps


@pytest.mark.parametrize("formats", [(FP8, FP8, FP8), (FP8, BF16, FP8), (BF16, FP8, BF16)])
def test_fp8_linear_layers_round_operands_of_outputs_and_input_gradient(formats: tuple[Matmul, ...]) -> None:
    x, weights, dys = make_inputs()
    outputs = parallel_linear(x, *weights, formats=formats)
    dx, *dweights = torch.autograd.grad(outputs, [x, *weights], dys)
    x, weights = x.detach(), [weight.detach() for weight in weights]
    parts = [*zip(weights, dys, formats, strict=True)]
    for y, (weight, _, matmul) in zip(outputs, parts, strict=True):
        torch.testing.assert_close(y, rounded(x) @ rounded(weight).T if matmul is FP8 else x @ weight.T)
    # One scale for a token's gradients of all layers in fp8, and for their weights of an input.
    low, high = ([(w, dy) for w, dy, matmul in parts if matmul is which] for which in (FP8, BF16))
    weight, dy = torch.cat([w for w, _ in low]), torch.cat([dy for _, dy in low], -1)
    expected = rounded(dy) @ rounded(weight.T).T + sum((dy @ w for w, dy in high), torch.zeros(()))
    torch.testing.assert_close(dx, expected)
    assert (dx - sum(dy @ w for w, dy in zip(weights, dys, strict=True))).norm() > 1e-3 * dx.norm()
    for dweight, dy in zip(dweights, dys, strict=True):
        torch.testing.assert_close(dweight, dy.flatten(0, 1).T @ x.flatten(0, 1))


def test_fp8_outputs_of_a_token_do_not_depend_on_other_tokens() -> None:
    x, weights, _ = make_inputs()
    formats = 3 * [FP8]
    x, louder = x.detach(), torch.cat([x.detach()[:, :3], 1e4 * x.detach()[:, 3:]], 1).requires_grad_()
    for y, of_louder in zip(*(parallel_linear(each, *weights, formats=formats) for each in (x, louder)), strict=True):
        assert torch.equal(y[:, :3], of_louder[:, :3])


@pytest.mark.parametrize("matmul", Matmul)
def test_unread_projection_gives_gradients_of_the_read_one(matmul: Matmul) -> None:
    x, _, _ = make_inputs()
    layer = Projection(4, 6).double()
    set_matmul(layer, matmul)
    dy = torch.randn(2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    read, unread = layer(x), layer(x, output_needed=False)
    assert unread.isnan().all()  # so that an accidental read shows
    for found, expected in zip(*(torch.autograd.grad(y, [x, layer.weight], dy) for y in (unread, read)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)


def test_compiler_frees_the_input_of_an_unread_projection_before_it_makes_its_gradient() -> None:
    x, _, _ = make_inputs()
    layer = Projection(4, 6).double()
    compiled = torch.compile(lambda x: layer(x.sin(), output_needed=False))
    _, codes = run_fw_bw_and_get_code(lambda: compiled(x))
    assert re.search(r"extern_kernels\.mm\(.*?\n *del \w+\n.*?zeco\.product_after\.default\(", codes[-1], re.DOTALL)


def test_only_projections_follow_the_format() -> None:
    x, _, _ = make_inputs()
    model = torch.nn.ModuleList([Projection(4, 6), torch.nn.Linear(4, 6, bias=False)]).double()
    before = [layer(x) for layer in model]
    set_matmul(model, FP8)
    after = [layer(x) for layer in model]
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    projected = project(x, *model)
    assert torch.equal(projected[0], after[0])
    assert torch.equal(projected[1], after[1])


@pytest.mark.parametrize(("matmul", "dtype"), [(BF16, torch.float64), (BF16, torch.bfloat16), (FP8, torch.float64)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_beside_an_operator_has_the_bits_of_one_by_itself(
    has_bias: bool, matmul: Matmul, dtype: torch.dtype
) -> None:
    """Its output and every gradient, that of the input among those of other layers; also if nothing else is read."""
    x, _, _ = make_inputs(dtype)
    other, last = (
        Projection(4, 6).to(dtype),
        torch.nn.Linear(4, 5, dtype=dtype) if has_bias else Projection(4, 5).to(dtype),
    )
    set_matmul(torch.nn.ModuleList([other, last]), matmul)
    generator = torch.Generator().manual_seed(2)
    dy, dz = (torch.randn(2, 7, size, generator=generator, dtype=torch.float64).to(dtype) for size in (6, 5))
    rule = [torch.randn(2, 7, 2, 4, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]
    position = SequencePosition((0, 7), exchange=local_exchange()).on(x)
    parameters = [other.weight, *last.parameters()]

    def grads(y: Tensor, z: Tensor) -> list[Tensor]:
        return [y, z, *torch.autograd.grad([y, z], [x, *parameters], [dy, dz], retain_graph=True)]

    y, z = project(x, other, last)
    z = z if last.bias is None else z + last.bias
    expected = grads(y, z)
    (y,), aside = project_beside(x, other, aside=last)
    assert aside.edge.untyped_storage().nbytes() == dtype.itemsize
    _, _, z = mix_beside("unmasked", rule, 1.0, position, StateInput(), aside)
    assert z is not None
    assert z.is_contiguous()
    # With a bias the product and the sum are rounded once.
    bound = 8 * torch.finfo(dtype).eps if has_bias else 0
    for found, wanted in zip(grads(y, z), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)
    alone, weight = torch.autograd.grad(z, [x, last.weight], dz)
    torch.testing.assert_close(weight, expected[4], rtol=0, atol=0)
    if matmul is BF16:
        check_sums(alone, [(dz, last.weight.detach())])
