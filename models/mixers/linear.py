"""Linear attention (Katharopoulos et al., 2020, arXiv 2006.16236): the layer and its configuration.

As in LASP-1 and LASP-2 (arXiv 2404.02882, 2502.07563), without decay; by default without the normaliser, since the
norm of each head's outputs takes its place.

Names and shapes of its parameters equal those of `fla.models.LinearAttentionForCausalLM` 0.6.0, so a checkpoint maps
one to one, in both directions (`zeco_train.hf`). fla adds 1e-10 to the normaliser, this layer adds nothing.

There is no positional embedding and no decay: the order of the tokens enters through causality alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from models.config import ExpandedHeadsConfig
from models.mixers.base import Mixer, OperatorFLOPs
from models.modules import RMSNorm
from models.projections import Projection, project
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.mix import mix_at
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.registry import OPERATORS
from zeco_train.ops.seam import StateInput, StateOutput

# Kernels load columns of bf16 in groups of 16 bytes.
COLUMNS = 8


def round_up(width: int, multiple: int) -> int:
    """The smallest multiple that is not below `width`."""
    return -(-width // multiple) * multiple


def with_ones(v: Tensor) -> Tensor:
    """Append a column of ones, then zeros: v [..., V] → [..., `round_up`(V + 1, COLUMNS)]."""
    column = v.new_zeros(round_up(v.shape[-1] + 1, COLUMNS) - v.shape[-1])
    # `column[0] = 1` would copy a number from the CPU, which a CUDA graph cannot capture.
    column[:1].fill_(1)
    return torch.cat([v, column.expand(*v.shape[:-1], -1)], dim=-1)


def normalised(o: Tensor, value_dim: int) -> Tensor:
    """Divide outputs by their normaliser.

    Args:
        o: [..., V + 1 or more], outputs of the operator for values `with_ones`.
        value_dim: V.

    Returns:
        [..., V] in the dtype of o. A normaliser of zero gives zeros, with zero gradients.
    """
    if torch.compiler.is_compiling():
        return _divide(o, value_dim)[0].to(o.dtype)
    return _Normalised.apply(o, value_dim)


def _divide(o: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """Compute y [..., V] and 1 / z [..., 1] of `_Normalised`, in the accumulation dtype."""
    wide = o.to(accumulation_dtype(o.dtype))
    sums = wide[..., value_dim : value_dim + 1]
    # 1 / inf = 0, and so is its gradient. Below the smallest normal number the reciprocal may overflow.
    reciprocal = sums.masked_fill(sums.abs() < torch.finfo(sums.dtype).tiny, torch.inf).reciprocal()
    return wide[..., :value_dim] * reciprocal, reciprocal


class _Normalised(torch.autograd.Function):
    """Division of [n | z | 0], n [..., V], z [..., 1] → y [..., V]; keeps only y and 1 / z.

    y  = n / z
    dn = dy / z
    dz = −(dy · y) / z
    """

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
    """Widths of one head.

    Attributes:
        query: of queries and keys before the feature map.
        features: after it.
        key: K, with the features of zeros that a map may append for kernels.
        value: of values, without the normaliser's columns.
    """

    query: int
    features: int
    key: int
    value: int


class FeatureMapAttention(Mixer):
    """One layer: x [B, T, D] → [B, T, D]. A subclass has the feature map φ.

    q, k, v   = x Wq, x Wk, x Wv, cut into heads
    o_t       = scale · Σ_{s≤t} φ(q_t)ᵀφ(k_s) v_s             over the whole sequence, all shards
    o_t       = o_t / (scale · Σ_{s≤t} φ(q_t)ᵀφ(k_s))         with the normaliser
    y         = o Wo, or RMSNorm over a head of o, Wo

    Args:
        config: of the model.
        layer: number of the layer.
        head: widths of a head.
        scale: of the operator.
        has_normaliser: divide by the sum of the weights (`normalised`).
        has_norm: norm the outputs.
    """

    can_be_unmasked = True

    def __init__(
        self, config: Any, layer: int, head: HeadWidths, *, scale: float, has_normaliser: bool, has_norm: bool
    ) -> None:
        super().__init__(config, layer)
        self.config, self.operator = config, "fixed_decay" if config.causal else "unmasked"
        self.head, self.num_heads, self.scale, self.has_normaliser = head, config.num_heads, scale, has_normaliser
        width, queries, values = config.hidden_size, self.num_heads * head.query, self.num_heads * head.value
        # `init_weights` draws in this order: reordering the modules changes the initial values.
        self.q_proj = Projection(width, queries)
        self.k_proj = Projection(width, queries)
        self.v_proj = Projection(width, values)
        self.norm = RMSNorm(head.value, config.norm_eps) if has_norm else None
        self.o_proj = Projection(values, width)

    @abstractmethod
    def map_features(self, q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """The features of queries and keys.

        Args:
            q: queries, [B, T, H, `head.query`].
            k: keys, likewise.
            positions: [T] or [B, T] int64, of the tokens in the sequence; None if the caller does not know them.

        Returns:
            φ(q), φ(k): [B, T, H, `head.key`] in the dtype of q.
        """

    def forward(
        self, x: Tensor, position: SequencePosition, state_inputs: Sequence[StateInput], shared: Tensor | None
    ) -> tuple[Tensor, tuple[StateOutput, ...]]:
        """This rank's tokens x [B, T, D] → [B, T, D], and the states exchanged with other ranks."""
        (state_input,) = state_inputs
        operands = self._operands(x, position.positions)
        # Without a mask there is no order, and no decay.
        operands = operands if self.config.causal else operands[:3]
        o, state_output = mix_at(self.operator, operands, self.scale, position, state_input)
        return self._output(o), (state_output,)

    def step(self, x: Tensor, states: Sequence[Tensor], positions: Tensor, shared: Tensor | None) -> Tensor:
        """One more token of each sequence: x [B, 1, D] → [B, 1, D]; updates the state [B, H, K, V] in place."""
        (state,) = states
        operands = self._operands(x, positions[:, None])
        return self._output(OPERATORS["fixed_decay"].step(*operands, state, self.scale))

    def _operands(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, ...]:
        """φ(q), φ(k) [B, T, H, K], v [B, T, H, V] with the normaliser's columns, and log-decays [H] of zero."""
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (tensor.unflatten(-1, (self.num_heads, -1)) for tensor in project(x, *projections))
        q, k = self.map_features(q, k, positions)
        v = with_ones(v) if self.has_normaliser else v
        return q, k, v, x.new_zeros(self.num_heads, dtype=accumulation_dtype(x.dtype))

    def _output(self, o: Tensor) -> Tensor:
        o = normalised(o, self.head.value) if self.has_normaliser else o
        o = o if self.norm is None else self.norm(o)
        return self.o_proj(o.flatten(-2))

    @property
    def state_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """H, K, V of the state, with the normaliser's columns and features of zeros."""
        value = round_up(self.head.value + 1, COLUMNS) if self.has_normaliser else self.head.value
        return ((self.num_heads, self.head.key, value),)

    def operator_flops(self, seq_len: int) -> OperatorFLOPs:
        """FLOPs of the operator, without columns and features of zeros; independent of the sequence length."""
        shape = self.num_heads, self.head.features, self.head.value + self.has_normaliser
        operator = OPERATORS[self.operator]
        return OperatorFLOPs(operator.forward_flops(*shape), operator.recomputed_flops(*shape))


class LinearFeatureMap(Enum):
    """Elementwise function applied to queries and keys; the names are those of flash-linear-attention.

    `elu` is elu(x) + 1.
    """

    elu = "elu"
    relu = "relu"
    identity = "identity"

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the function to queries or keys of any shape."""
        match self:
            case LinearFeatureMap.elu:
                return _elu_plus_one(x) if torch.compiler.is_compiling() else _EluPlusOne.apply(x)
            case LinearFeatureMap.relu:
                return F.relu(x)
            case LinearFeatureMap.identity:
                return x


@dataclass
class LinearAttentionConfig(ExpandedHeadsConfig):
    """Shape of a linear attention model, see `ExpandedHeadsConfig`. The defaults are those of `linear_tiny`.

    Attributes:
        feature_map: of queries and keys.
        normaliser: whether each output is divided by the sum of its token's attention weights.
    """

    mixer: str = "linear"
    name: str = "linear_tiny"
    feature_map: LinearFeatureMap = LinearFeatureMap.elu
    normaliser: bool = False

    @property
    def head(self) -> HeadWidths:
        """Widths of a head."""
        key_dim = self.head_k_dim
        return HeadWidths(query=key_dim, features=key_dim, key=key_dim, value=self.head_v_dim)

    def describe(self) -> Mapping[str, str]:
        """See `LanguageModelConfig`."""
        variants = [f"feature map {self.feature_map.value}"]
        if self.normaliser:
            variants.append("normaliser")
        if self.tie_word_embeddings:
            variants.append("tied embeddings")
        heads = f"{self.num_heads} of K {self.head_k_dim} and V {self.head_v_dim}"
        return {"heads": heads, "variants": "; ".join(variants)}


class LinearAttention(FeatureMapAttention):
    """One layer of linear attention: `FeatureMapAttention` with an elementwise feature map.

    The scale is K^-1/2, and each head's outputs are normed, as in fla.
    """

    config_class = LinearAttentionConfig
    title = "linear attention (Katharopoulos et al., 2020, arXiv 2006.16236)"

    def __init__(self, config: LinearAttentionConfig, layer: int) -> None:
        scale = config.head.query**-0.5
        super().__init__(config, layer, config.head, scale=scale, has_normaliser=config.normaliser, has_norm=True)
        self.feature_map = config.feature_map

    def map_features(self, q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `FeatureMapAttention`."""
        del positions
        return self.feature_map(q), self.feature_map(k)


def _elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1 = e^x for x ≤ 0, rounded once."""
    wide = x.to(accumulation_dtype(x.dtype))
    # Without the bound the exponential of a large x, which is not used, would have an infinite gradient.
    return torch.where(wide > 0, wide + 1, wide.clamp(max=0).exp()).to(x.dtype)


class _EluPlusOne(torch.autograd.Function):
    """y = elu(x) + 1;  dx = min(y, 1) dy. Keeps y, which the operator keeps too."""

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
