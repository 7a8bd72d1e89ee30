"""Linear attention (Katharopoulos et al., 2020, arXiv 2006.16236): the layer and its configuration.

As in LASP-1 and LASP-2 (arXiv 2404.02882, 2502.07563), without decay; by default without the normaliser, since the
norm of each head's outputs takes its place.

Names and shapes of its parameters equal those of `fla.models.LinearAttentionForCausalLM` 0.6.0, so a checkpoint maps
one to one, in both directions (`zeco_train.hf`). fla adds 1e-10 to the normaliser, this layer adds nothing.

There is no positional embedding and no decay: the order of the tokens enters through causality alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from models.heads import ExpandedHeadsConfig
from models.mixers.linear_base import FeatureMapAttention, HeadWidths
from zeco_train.ops import accumulation_dtype


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
