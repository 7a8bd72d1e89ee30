"""Based (Arora et al., 2024, arXiv 2402.18668): linear attention whose feature map is a Taylor polynomial of exp.

    φ(q)ᵀφ(k) = 1 + s + s²/2,    s = qᵀk / √d

Queries and keys are short, d = 16, and the state is large: K = 1 + d + d² = 273 in the paper, 153 with each
product of two channels once. The weights are at least 1/2.

Parameters have the names and shapes of fla's layer `BasedLinearAttention` 0.6.0; fla has no language model of it, and
adds 1e-6 to the normaliser (1e-10 in its chunked form), this layer nothing. The paper's models also have layers of
sliding-window attention and of short convolutions; this is its linear attention alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.config import LanguageModelConfig
from models.mixers.linear import FeatureMapAttention, HeadWidths, round_up
from zeco_train.ops import accumulation_dtype

# Kernels take keys in multiples of 16; features of zero change nothing.
FEATURES = 16


class Polynomial(NamedTuple):
    """The map x ↦ (c0, c1 x, c2 x⊗x), whose products are φ(x)ᵀφ(y) = c0² + c1² xᵀy + c2² (xᵀy)².

    Attributes:
        constant, linear, quadratic: c0, c1, c2; a part whose coefficient is 0 is left out.
        symmetric: have each product x_i x_j, i < j, once, times √2, instead of twice: d(d + 1)/2 features for d².
    """

    constant: float
    linear: float
    quadratic: float
    symmetric: bool

    def num_features(self, size: int) -> int:
        """Number of features of a vector of `size`, without those of zeros."""
        products = size * (size + 1) // 2 if self.symmetric else size * size
        return bool(self.constant) + bool(self.linear) * size + products

    def padded(self, size: int) -> int:
        """Number of features as the operator takes them, those of zeros included."""
        return round_up(self.num_features(size), FEATURES)

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [..., d] → [..., `padded(d)`]: the features, then zeros."""
        parts = [self.quadratic * self._products(x)]
        if self.linear:
            parts.insert(0, self.linear * x)
        if self.constant:
            parts.insert(0, x.new_full((*x.shape[:-1], 1), self.constant))
        missing = self.padded(x.shape[-1]) - self.num_features(x.shape[-1])
        if missing:
            parts.append(x.new_zeros(*x.shape[:-1], missing))
        return torch.cat(parts, dim=-1)

    def _products(self, x: Tensor) -> Tensor:
        products = (x[..., :, None] * x[..., None, :]).flatten(-2)
        if not self.symmetric:
            return products
        size = x.shape[-1]
        rows, columns = torch.triu_indices(size, size, device=x.device)
        # Not `torch.where` of two numbers, which would be fp32.
        weights = x.new_ones(len(rows)).masked_fill(rows != columns, math.sqrt(2))
        return products.index_select(-1, rows * size + columns) * weights


@dataclass
class QuadraticConfig(LanguageModelConfig):
    """Shape of a model whose feature map is a polynomial of degree 2.

    Attributes:
        num_heads: H, heads; it divides hidden_size = H·V.
        feature_dim: d, width of a head's queries and keys before the feature map.
        symmetric: each product of two channels is one feature. false: the features as the papers write them; the model
            is the same, with other rounding errors and almost twice the state.
    """

    feature_dim: int = 16
    symmetric: bool = True

    def validate(self) -> None:
        super().validate()
        self._require_positive("feature_dim")
        self._require_heads_divide({"hidden_size": self.hidden_size})

    @property
    def polynomial(self) -> Polynomial:
        """The feature map."""
        raise NotImplementedError

    @property
    def head(self) -> HeadWidths:
        size, polynomial = self.feature_dim, self.polynomial
        value = self.hidden_size // self.num_heads
        return HeadWidths(size, polynomial.num_features(size), polynomial.padded(size), value)

    def _shape_rows(self) -> Mapping[str, str]:
        return {
            "heads": f"{self.num_heads} of V {self.head.value}",
            "features": f"{self.head.features} of {self.feature_dim} channels",
        }

    def _variants(self) -> list[str]:
        return ["every product twice"] * (not self.symmetric)


@dataclass
class BasedConfig(QuadraticConfig):
    """Shape of a Based model, see `QuadraticConfig`. The defaults are those of `based_tiny`.

    For d = 16 a head has K = 153, or 273 unless `symmetric`; with features of zeros 160 or 288.
    """

    mixer: str = "based"
    name: str = "based_tiny"

    @property
    def polynomial(self) -> Polynomial:
        return Polynomial(1.0, self.feature_dim**-0.25, (2 * self.feature_dim) ** -0.5, self.symmetric)


class Based(FeatureMapAttention):
    """Based (Arora et al., 2024, arXiv 2402.18668)."""

    config_class = BasedConfig
    title = "Based (Arora et al., 2024, arXiv 2402.18668)"

    def _map_features(self, q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        return keep_inputs(self._features, q), keep_inputs(self._features, k)

    def _features(self, x: Tensor) -> Tensor:
        return self.config.polynomial(x.to(accumulation_dtype(x.dtype))).to(x.dtype)


def keep_inputs(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function(*tensors)`, keeping only the tensors: the backward pass computes the function once more.

    A map to many features has intermediate results that are as large as the features. The function is without
    randomness, and all tensors get gradients.
    """
    # A compiler decides by itself what it computes again.
    if torch.compiler.is_compiling():
        return function(*tensors)
    return _KeepInputs.apply(function, *tensors)


class _KeepInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            y = ctx.function(*leaves)
        return None, *torch.autograd.grad(y, leaves, dy)
