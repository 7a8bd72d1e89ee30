"""Linear attention (Katharopoulos et al., 2020, arXiv 2006.16236), and what other feature maps share with it.

As in LASP-1 and LASP-2 (arXiv 2404.02882, 2502.07563), without decay; by default without the normaliser, since the
norm of each head's outputs takes its place. Order enters through causality alone.

Parameters have the names and shapes of `fla.models.LinearAttentionForCausalLM` 0.6.0. fla adds 1e-10 to the normaliser,
this layer adds nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from models.config import ExpandedHeadsConfig
from models.mixers.base import OperatorFLOPs, OperatorMixer, Run
from models.modules import RMSNorm
from models.projections import Projection, project
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.operator_registry import OPERATORS

# Kernels load columns of bf16 in groups of 16 bytes.
COLUMNS = 8


def round_up(width: int, multiple: int) -> int:
    """The smallest multiple that is not below `width`."""
    return -(-width // multiple) * multiple


# The normaliser Σ_{s≤t} φ(q_t)ᵀφ(k_s) is the output of one more column of the values, all ones. So it is part of the
# state, and the operator computes it with the rest, over ranks, documents and segments.
def with_ones(v: Tensor) -> Tensor:
    """Append a column of ones, then zeros: v [..., V] → [..., `round_up`(V + 1, COLUMNS)]."""
    column = v.new_zeros(round_up(v.shape[-1] + 1, COLUMNS) - v.shape[-1])
    # `column[0] = 1` would copy a number from the CPU, which a CUDA graph cannot capture.
    column[:1].fill_(1)
    return torch.cat([v, column.expand(*v.shape[:-1], -1)], dim=-1)


def normalised(o: Tensor, value_dim: int) -> Tensor:
    """Divide outputs for values `with_ones`, [..., V + 1 or more], by their normaliser: [..., V] in the dtype of o.

    A normaliser of zero gives zeros, with zero gradients.
    """
    if torch.compiler.is_compiling():
        return _divide(o, value_dim)[0].to(o.dtype)
    return _Normalised.apply(o, value_dim)


# y [..., V] and 1 / z [..., 1] of `_Normalised`, in the accumulation dtype.
def _divide(o: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    wide = o.to(accumulation_dtype(o.dtype))
    sums = wide[..., value_dim : value_dim + 1]
    # 1 / inf = 0, and so is its gradient. Below the smallest normal number the reciprocal may overflow.
    reciprocal = sums.masked_fill(sums.abs() < torch.finfo(sums.dtype).tiny, torch.inf).reciprocal()
    return wide[..., :value_dim] * reciprocal, reciprocal


class _Normalised(torch.autograd.Function):
    # [n | z | 0] → y = n / z;  dn = dy / z,  dz = −(dy · y) / z. Keeps only y and 1 / z.

    @staticmethod
    def forward(ctx: Any, o: Tensor, value_dim: int) -> Tensor:
        wide, reciprocal = _divide(o, value_dim)
        y = wide.to(o.dtype)
        ctx.save_for_backward(y, reciprocal)
        ctx.shape = o.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        y, reciprocal = ctx.saved_tensors
        value_dim = y.shape[-1]
        do = y.new_zeros(ctx.shape)
        scaled = dy.to(reciprocal.dtype) * reciprocal
        do[..., :value_dim] = scaled
        do[..., value_dim] = -(scaled * y).sum(dim=-1)
        return do, None


class HeadWidths(NamedTuple):
    """Widths of one head."""

    # Of queries and keys before the feature map, and after it.
    query: int
    features: int
    # K, with the features of zeros that a map may append for kernels.
    key: int
    # Without the normaliser's columns.
    value: int


class FeatureMapAttention(OperatorMixer):
    """Linear attention with a feature map φ, which a subclass has; its configuration has `head: HeadWidths`.

    q, k, v   = x Wq, x Wk, x Wv, cut into heads
    o_t       = scale · Σ_{s≤t} φ(q_t)ᵀφ(k_s) v_s             over the whole sequence, all shards
    o_t       = o_t / (scale · Σ_{s≤t} φ(q_t)ᵀφ(k_s))         with the normaliser
    y         = o Wo, or RMSNorm over a head of o, Wo
    """

    can_be_unmasked = True
    operator = "fixed_decay"

    def __init__(
        self, config: Any, layer: int, *, scale: float = 1.0, has_normaliser: bool = True, has_norm: bool = False
    ) -> None:
        super().__init__(config, layer)
        self.head: HeadWidths = config.head
        head, heads = self.head, config.num_heads
        self.scale, self.has_normaliser = scale, has_normaliser
        self.operators = (self.operator if config.causal else "unmasked",)
        self.state_shapes = ((heads, head.key, round_up(head.value + 1, COLUMNS) if has_normaliser else head.value),)
        # `init_weights` draws in this order: reordering the modules changes the initial values.
        self.q_proj = Projection(config.hidden_size, heads * head.query)
        self.k_proj = Projection(config.hidden_size, heads * head.query)
        self.v_proj = Projection(config.hidden_size, heads * head.value)
        self.norm = RMSNorm(head.value, config.norm_eps) if has_norm else None
        self.o_proj = Projection(heads * head.value, config.hidden_size)

    @abstractmethod
    def _map_features(self, q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """φ(q), φ(k) [B, T, H, `head.key`] in the dtype of q, of queries and keys [B, T, H, `head.query`]."""

    def mix(self, x: Tensor, positions: Tensor | None, shared: Tensor | None, run: Run) -> Tensor:
        heads = self.config.num_heads
        q, k, v = (y.unflatten(-1, (heads, -1)) for y in project(x, self.q_proj, self.k_proj, self.v_proj))
        q, k = self._map_features(q, k, positions)
        v = with_ones(v) if self.has_normaliser else v
        # Without a mask there is no order, and no decay.
        decays = (x.new_zeros(heads, dtype=accumulation_dtype(x.dtype)),) if self.config.causal else ()
        o = run(self.operators[0], (q, k, v, *decays), self.scale)
        o = normalised(o, self.head.value) if self.has_normaliser else o
        o = o if self.norm is None else self.norm(o)
        return self.o_proj(o.flatten(-2))

    def operator_flops(self, seq_len: int) -> OperatorFLOPs:
        """FLOPs of the operator, without columns and features of zeros."""
        shape = self.config.num_heads, self.head.features, self.head.value + self.has_normaliser
        operator = OPERATORS[self.operators[0]]
        return OperatorFLOPs(operator.forward_flops(*shape), operator.recomputed_flops(*shape))


class LinearFeatureMap(Enum):
    """Elementwise function of queries and keys, named as in flash-linear-attention; `elu` is elu(x) + 1."""

    elu = "elu"
    relu = "relu"
    identity = "identity"

    @property
    def function(self) -> Callable[[Tensor], Tensor]:
        """The function itself, see `models.mixers.gla.FeatureMap`."""
        functions: dict[str, Callable[[Tensor], Tensor]] = {"elu": _elu, "relu": F.relu, "identity": _identity}
        return functions[self.value]


@dataclass
class LinearAttentionConfig(ExpandedHeadsConfig):
    """Shape of a linear attention model, see `ExpandedHeadsConfig`. The defaults are those of `linear_tiny`.

    Attributes:
        feature_map: feature map of queries and keys.
        normaliser: whether each output is divided by the sum of its token's attention weights.
    """

    mixer: str = "linear"
    name: str = "linear_tiny"
    feature_map: LinearFeatureMap = LinearFeatureMap.elu
    normaliser: bool = False

    @property
    def head(self) -> HeadWidths:
        key_dim = self.head_k_dim
        return HeadWidths(query=key_dim, features=key_dim, key=key_dim, value=self.head_v_dim)

    def _variants(self) -> list[str]:
        return [f"feature map {self.feature_map.value}", *["normaliser"] * self.normaliser]


class LinearAttention(FeatureMapAttention):
    """`FeatureMapAttention` with an elementwise feature map. Each head's outputs are normed, as in fla."""

    config_class = LinearAttentionConfig
    title = "linear attention (Katharopoulos et al., 2020, arXiv 2006.16236)"

    def __init__(self, config: LinearAttentionConfig, layer: int) -> None:
        scale = config.head.query**-0.5
        super().__init__(config, layer, scale=scale, has_normaliser=config.normaliser, has_norm=True)
        self.feature_map = config.feature_map.function

    def _map_features(self, q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.feature_map(q), self.feature_map(k)


def _identity(x: Tensor) -> Tensor:
    return x


def _elu(x: Tensor) -> Tensor:
    return _elu_plus_one(x) if torch.compiler.is_compiling() else _EluPlusOne.apply(x)


# e^x for x ≤ 0, rounded once.
def _elu_plus_one(x: Tensor) -> Tensor:
    wide = x.to(accumulation_dtype(x.dtype))
    # Without the bound the exponential of a large x, which is not used, would have an infinite gradient.
    return torch.where(wide > 0, wide + 1, wide.clamp(max=0).exp()).to(x.dtype)


class _EluPlusOne(torch.autograd.Function):
    # y = elu(x) + 1;  dx = min(y, 1) dy. Keeps y, which the operator keeps too.

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = _elu_plus_one(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return dy * y.clamp(max=1)
