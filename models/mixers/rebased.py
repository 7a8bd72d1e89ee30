"""ReBased (Aksenov et al., 2024, arXiv 2402.10644): linear attention with a learned quadratic kernel.

    q' = γ ⊙ layernorm(q) + β,    k' = γ ⊙ layernorm(k) + β,    φ(q)ᵀφ(k) = (q'ᵀk')² / d

φ(x) = x'⊗x' / √d has K = d² features, 256 for d = 16; 136 with each product of two channels once. The weights are not
negative; their sum may be 0, and then the output is.

Parameters have the names and shapes of fla's layer `ReBasedLinearAttention` 0.6.0; fla has no language model of it.
There is one γ and one β for queries, keys and all heads; the paper has separate ones for queries and keys. fla adds
1e-5 to the normaliser (1e-10 in its chunked form), this layer nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.mixers.based import Polynomial, QuadraticConfig, keep_inputs
from models.mixers.linear import FeatureMapAttention
from models.parameters import BIAS, SCALE, ParameterRule
from zeco_train.ops import accumulation_dtype


@dataclass
class RebasedConfig(QuadraticConfig):
    """Shape of a ReBased model, see `QuadraticConfig`. The defaults are those of `rebased_tiny`.

    For d = 16 a head has K = 136, or 256 unless `symmetric`; with features of zeros 144 or 256.

    Attributes:
        feature_norm_eps: added to the variance in the norm of queries and keys; 1e-5 in fla.
    """

    mixer: str = "rebased"
    name: str = "rebased_tiny"
    feature_norm_eps: float = 1e-5

    def validate(self) -> None:
        super().validate()
        self._require_finite("feature_norm_eps")

    @property
    def polynomial(self) -> Polynomial:
        """The feature map after γ, β and the norm."""
        return Polynomial(0.0, 0.0, self.feature_dim**-0.5, self.symmetric)


class RebasedFeatureMap(nn.Module):
    """The feature map, x [..., d] → [..., K], with its learned scale γ and shift β, [d]."""

    def __init__(self, config: RebasedConfig) -> None:
        super().__init__()
        self.eps, self.polynomial = config.feature_norm_eps, config.polynomial
        self.gamma = nn.Parameter(torch.ones(config.feature_dim))
        self.beta = nn.Parameter(torch.zeros(config.feature_dim))

    def parameter_rules(self) -> Mapping[str, ParameterRule]:
        return {"gamma": SCALE, "beta": BIAS}

    def forward(self, x: Tensor) -> Tensor:
        """Features of queries or keys, in their dtype."""
        return keep_inputs(self._features, x, self.gamma, self.beta)

    def _features(self, x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        wide, scale, shift = (tensor.to(accumulation_dtype(x.dtype)) for tensor in (x, gamma, beta))
        return self.polynomial(F.layer_norm(wide, scale.shape, scale, shift, self.eps)).to(x.dtype)


class Rebased(FeatureMapAttention):
    """ReBased (Aksenov et al., 2024, arXiv 2402.10644)."""

    config_class = RebasedConfig
    title = "ReBased (Aksenov et al., 2024, arXiv 2402.10644)"

    def __init__(self, config: RebasedConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.feature_map = RebasedFeatureMap(config)

    def _map_features(self, q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.feature_map(q), self.feature_map(k)
