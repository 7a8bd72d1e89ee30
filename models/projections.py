"""Linear layers of the blocks, whose products `train.matmul` chooses, several of one input with a fused gradient.

dx is a sum of one product per layer. Autograd computes each product separately and adds them up, which for the five
projections of a GLA layer means ten passes over tensors of the size of x. Here each product after the first accumulates
into the sum (as addmm does). Both passes are custom ops: a compiler would copy the sum for each addend.

In fp8 x is rounded once for all its layers, and dx is one product: of all dy side by side, with one scale a token, and
all weights, one above the other. Weights and gradients are as without fp8; only the operands are rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import custom_op, register_autograd

from models.parameters import PROJECTION, ParameterRule
from zeco_train.ops.linear import Aside, Matmul, linear, product, quantise_columns, quantise_rows, weight_grad


class Projection(nn.Linear):
    """A linear layer without bias, whose product `train.matmul` chooses; `nn.Linear`'s is in the compute dtype."""

    matmul = Matmul.bf16

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor, output_needed: bool = True) -> Tensor:
        """Map x [..., in] → [..., out]; with `output_needed=False` the output is NaN, and only the gradients valid."""
        if output_needed and self.matmul is Matmul.bf16:
            return super().forward(x)
        return parallel_linear(x, self.weight, formats=(self.matmul,), output_needed=output_needed)[0]


class StackedProjection(Projection):
    """Several linear layers of one input without biases, with one weight; `rows`: width of each output, in order."""

    def __init__(self, in_features: int, rows: Sequence[int]) -> None:
        super().__init__(in_features, sum(rows))
        self.rows = tuple(rows)

    def parameter_rules(self) -> Mapping[str, ParameterRule]:
        return {"weight": PROJECTION._replace(rows=self.rows)}


def set_matmul(model: nn.Module, matmul: Matmul) -> None:
    """Set the format of the operands of every `Projection`."""
    for module in model.modules():
        if isinstance(module, Projection):
            module.matmul = matmul


def project(x: Tensor, *layers: nn.Linear) -> list[Tensor]:
    """Linear layers x [..., D] → [..., N_i] of one input, without their biases; each `Projection` with its format."""
    return parallel_linear(x, *(layer.weight for layer in layers), formats=_formats(layers))


def project_beside(x: Tensor, *layers: nn.Linear, aside: nn.Linear) -> tuple[list[Tensor], Aside]:
    """`project`, and one more layer, with its bias if it has one, for an operator to compute beside its scan."""
    layers = *layers, aside
    in_fp8 = [matmul is Matmul.fp8 for matmul in _formats(layers)]
    rounded = [*quantise_rows(x.detach().flatten(0, -2))] if any(in_fp8) else []
    *outputs, edge = _parallel_linear(x, [layer.weight for layer in layers], in_fp8, rounded, True, True)
    more = rounded if in_fp8[-1] else [] if aside.bias is None else [aside.bias]
    return outputs, Aside(x, aside.weight, tuple(more), edge)


def _formats(layers: Sequence[nn.Linear]) -> tuple[Matmul, ...]:
    return tuple(layer.matmul if isinstance(layer, Projection) else Matmul.bf16 for layer in layers)


def parallel_linear(
    x: Tensor, *weights: Tensor, formats: Sequence[Matmul] = (), output_needed: bool = True
) -> list[Tensor]:
    """X weightᵀ, [..., N_i], for x [..., D] and each weight [N_i, D] of its dtype.

    Args:
        x: the input of all.
        weights: in bf16, fp32 or fp64, as x.
        formats: of the operands; empty: the dtype of x for all.
        output_needed: False: the outputs are NaN, without a product, and only the gradients valid: for the last layer
            of a block that is recomputed for its gradients.
    """
    in_fp8 = [matmul is Matmul.fp8 for matmul in formats or [Matmul.bf16] * len(weights)]
    # Outside of the custom op, so that a compiler rounds where it computes x.
    rounded = [*quantise_rows(x.detach().flatten(0, -2))] if any(in_fp8) and output_needed else []
    return _parallel_linear(x, weights, in_fp8, rounded, output_needed, False)


# With `aside` an operator computes the last layer's output, and the gradient of its weight; this op then returns an
# `Aside.edge` in its place.
@custom_op("zeco::parallel_linear", mutates_args=())
def _parallel_linear(
    x: Tensor, weights: list[Tensor], in_fp8: list[bool], rounded: list[Tensor], output_needed: bool, aside: bool
) -> list[Tensor]:
    if not output_needed:
        return [x.new_full((*x.shape[:-1], weight.shape[0]), torch.nan) for weight in weights]
    # Where `in_fp8` is set, of x in fp8: the `Fp8Rows` `rounded`.
    here = [*zip(weights, in_fp8, strict=True)][: len(weights) - aside]
    outputs = [linear(x, weight, rounded if is_fp8 else ()) for weight, is_fp8 in here]
    return [*outputs, _edge(x, weights[-1])] if aside else outputs


# Of one element in memory.
def _edge(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_full((), torch.nan).expand(*x.shape[:-1], weight.shape[0])


@_parallel_linear.register_fake
def _parallel_linear_shapes(
    x: Tensor, weights: list[Tensor], in_fp8: Any, rounded: Any, output_needed: Any, aside: bool
) -> list[Tensor]:
    here = [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights[: len(weights) - aside]]
    return [*here, _edge(x, weights[-1])] if aside else here


@custom_op("zeco::parallel_linear_backward", mutates_args=())
def _parallel_linear_backward(
    dys: list[Tensor], x: Tensor, weights: list[Tensor], in_fp8: list[bool], aside: bool
) -> list[Tensor]:
    # dx = Σ dy_i W_i, then dW_i = dy_iᵀ x.
    flat = [dy.flatten(0, -2) for dy in dys]
    pairs = [*zip(flat, weights, strict=True)]
    if not any(in_fp8):
        (dy, weight), *pairs = pairs
        dx = dy @ weight
    else:
        # As one product of all dy side by side, [M, N], and all weights above one another, [N, D].
        of_fp8, weights_fp8 = zip(*compress(pairs, in_fp8), strict=True)
        dx = product(quantise_rows(*of_fp8), quantise_columns(*weights_fp8), of_fp8[0].dtype)
        pairs = [*compress(pairs, (not is_fp8 for is_fp8 in in_fp8))]
    for dy, weight in pairs:
        dx.addmm_(dy, weight)
    return [dx.view(x.shape), *(weight_grad(dy, x) for dy in dys[: len(dys) - aside])]


@_parallel_linear_backward.register_fake
def _parallel_linear_backward_shapes(
    dys: list[Tensor], x: Tensor, weights: list[Tensor], in_fp8: Any, aside: bool
) -> list[Tensor]:
    return [x.new_empty(x.shape), *(weight.new_empty(weight.shape) for weight in weights[: len(weights) - aside])]


# dy @ weight, once `first` is there: a compiler leaves gradients of weights, and so keeps what they read, to the end.
@custom_op("zeco::product_after", mutates_args=())
def _product_after(dy: Tensor, weight: Tensor, first: Tensor) -> Tensor:
    return dy @ weight


@_product_after.register_fake
def _product_after_shape(dy: Tensor, weight: Tensor, first: Tensor) -> Tensor:
    return dy.new_empty((*dy.shape[:-1], weight.shape[1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, ctx.in_fp8, rounded, _, ctx.aside = inputs
    ctx.rounded = len(rounded)
    ctx.save_for_backward(x, *weights)


def _backward(ctx: Any, dys: list[Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    if len(weights) == 1 and not (ctx.aside or any(ctx.in_fp8)):
        # Two ops: compiled, x of a recomputed block's last layer is freed before dx is made, which is as large.
        dweight = weight_grad(dys[0], x)
        return _product_after(dys[0], weights[0], dweight), [dweight], None, [], None, None
    dx, *dweights = _parallel_linear_backward(dys, x, weights, ctx.in_fp8, ctx.aside)
    return dx, dweights + [None] * ctx.aside, None, [None] * ctx.rounded, None, None


register_autograd("zeco::parallel_linear", _backward, setup_context=_setup_context)
