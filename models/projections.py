"""Several linear layers of one input, with a fused input gradient.

dx is a sum of one product per layer. Autograd computes each product separately and adds them up, which for the five
projections of a GLA layer means ten passes over tensors of the size of x. Here each product after the first accumulates
into the sum (as addmm does). Both passes are custom ops: a compiler would copy the sum for each addend.

Also a linear layer whose output is never read: the last one of a block that is recomputed for its gradients only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, register_autograd
from torch.nn import functional as F


def parallel_linear(x: Tensor, *weights: Tensor) -> list[Tensor]:
    """Linear layers of one input: x weightᵀ for each weight.

    Args:
        x: [..., D].
        weights: [N_i, D] each, in the dtype of x.

    Returns:
        [..., N_i] for each.
    """
    return _parallel_linear(x, weights)


@custom_op("zeco::parallel_linear", mutates_args=())
def _parallel_linear(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """y_i = x W_iᵀ."""
    return [F.linear(x, weight) for weight in weights]


@_parallel_linear.register_fake
def _parallel_linear_shapes(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


@custom_op("zeco::parallel_linear_backward", mutates_args=())
def _parallel_linear_backward(dys: list[Tensor], x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Gradients: dx = Σ dy_i W_i, then dW_i = dy_iᵀ x."""
    flat, rows = [dy.flatten(0, -2) for dy in dys], x.flatten(0, -2)
    dx = flat[0] @ weights[0]
    for dy, weight in zip(flat[1:], weights[1:], strict=True):
        dx.addmm_(dy, weight)
    return [dx.view(x.shape), *(dy.T @ rows for dy in flat)]


@_parallel_linear_backward.register_fake
def _parallel_linear_backward_shapes(dys: list[Tensor], x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [x.new_empty(x.shape), *(weight.new_empty(weight.shape) for weight in weights)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights = inputs
    ctx.save_for_backward(x, *weights)


def _backward(ctx: Any, dys: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    x, *weights = ctx.saved_tensors
    dx, *dweights = _parallel_linear_backward(dys, x, weights)
    return dx, dweights


register_autograd("zeco::parallel_linear", _backward, setup_context=_setup_context)


def unread_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Backward pass of x weightᵀ without the forward product: the returned output is NaN.

    Args:
        x: [..., D].
        weight: [N, D].
    """
    return _unread_linear(x, weight)


@custom_op("zeco::unread_linear", mutates_args=())
def _unread_linear(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_full((*x.shape[:-1], weight.shape[0]), torch.nan)


@_unread_linear.register_fake
def _unread_linear_shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _unread_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return dy @ weight, dy.flatten(0, -2).T @ x.flatten(0, -2)


register_autograd(
    "zeco::unread_linear", _unread_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)
