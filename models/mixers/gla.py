"""Gated linear attention (Yang et al., 2023, arXiv 2312.06635).

Parameters have the names and shapes of `fla.models.GLAForCausalLM` 0.6.0 (with fused norms, no short convolution); its
configuration cannot express a `gate_low_rank_dim` or `gate_logit_normalizer` other than 16. Order enters through the
decays alone: there is no maximum sequence length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Self, cast

from torch import Tensor, nn
from torch.nn import functional as F

from models.config import ExpandedHeadsConfig
from models.mixers.base import OperatorMixer, Run
from models.modules import GatedRMSNorm, RMSNorm
from models.projections import Projection, project
from zeco_train.errors import ConfigError
from zeco_train.ops import accumulation_dtype


class FeatureMap(Enum):
    """Elementwise function of queries and keys, named as in flash-linear-attention."""

    relu = "relu"
    sqrelu = "sqrelu"
    silu = "silu"
    sigmoid = "sigmoid"

    @property
    def function(self) -> Callable[[Tensor], Tensor]:
        """The function itself, since torch 2.11 compiles no call of an enumeration's member."""
        # The others are torch's functions of these names.
        return _squared_relu if self is FeatureMap.sqrelu else getattr(F, self.value)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


@dataclass
class GatedHeadsConfig(ExpandedHeadsConfig):
    """A model whose heads of queries may share keys, values and decays.

    Attributes:
        gate_logit_normalizer: the log-decay is log-sigmoid of a projection, divided by this.
        num_kv_heads: heads of keys, values and decays; each serves num_heads / num_kv_heads heads of queries. null: as
            many as num_heads.
        feature_map: feature map of queries and keys; null: none.
    """

    gate_logit_normalizer: int = 16
    num_kv_heads: int | None = None
    feature_map: FeatureMap | None = None

    def validate(self) -> None:
        super().validate()
        self._require_positive("gate_logit_normalizer")
        self._require_divides_heads("num_kv_heads")

    @property
    def num_kv_groups(self) -> int:
        """Query heads per head of keys, values and decays."""
        return self.num_heads // (self.num_kv_heads or self.num_heads)

    def canonical(self) -> Self:
        """As for all models; `num_kv_heads` equal to `num_heads` becomes None."""
        model = super().canonical()
        return replace(model, num_kv_heads=None) if self.num_kv_heads == self.num_heads else model

    def _variants(self) -> list[str]:
        own = "none" if self.feature_map is None else self.feature_map.value
        found = [] if self.num_kv_heads is None else [f"{self.num_kv_heads} heads of keys and values"]
        return found + [f"feature map {own}"] * (self.feature_map is not type(self).feature_map)


@dataclass
class GLAConfig(GatedHeadsConfig):
    """Shape of a GLA model, see `GatedHeadsConfig`. The defaults are those of `gla_tiny`.

    Attributes:
        gate_low_rank_dim: rank of the projection to the decays.
        clamp_min: lower bound of the log-decays; null: no bound.
        use_output_gate: whether a layer's output is gated, by swish of a projection, after its norm.
    """

    mixer: str = "gla"

    expand_k: float = 0.5
    gate_low_rank_dim: int = 16
    clamp_min: float | None = None
    use_output_gate: bool = True

    def validate(self) -> None:
        super().validate()
        self._require_positive("gate_low_rank_dim")
        if self.clamp_min is not None and not (math.isfinite(self.clamp_min) and self.clamp_min < 0):
            raise ConfigError("model.clamp_min", self.clamp_min, "bounds log-decays from below: must be finite and < 0")

    def _variants(self) -> list[str]:
        found = [] if self.clamp_min is None else [f"log-decays ≥ {self.clamp_min:g}"]
        return super()._variants() + found + ["no output gate"] * (not self.use_output_gate)


class GatedLinearAttention(OperatorMixer):
    """One GLA layer: x [B, T, D] → [B, T, D].

    q, k, v   = x Wq, x Wk, x Wv, cut into heads
    g         = log σ(x W1 W2 + b) / gate_logit_normalizer        the log-decay, ≤ 0
    o         = GLA(q, k, v, g)                                   over the whole sequence, all shards
    y         = (RMSNorm over a head of o ⊙ swish(x Wg)) Wo

    Depending on the configuration: a feature map on q and k, a lower bound of g, shared heads of k, v and g, no output
    gate.
    """

    config_class = GLAConfig
    operators = ("gla",)
    title = "gated linear attention (Yang et al., 2023, arXiv 2312.06635)"

    def __init__(self, config: GLAConfig, layer: int) -> None:
        super().__init__(config, layer)
        width, groups = config.hidden_size, config.num_kv_groups
        self.state_shapes = ((config.num_heads, config.head_k_dim, config.head_v_dim),)
        self.feature_map = config.feature_map and config.feature_map.function
        # `init_weights` draws in this order: reordering the modules changes the initial values.
        self.q_proj = Projection(width, config.key_dim)
        self.k_proj = Projection(width, config.key_dim // groups)
        self.v_proj = Projection(width, config.value_dim // groups)
        self.g_proj = Projection(width, config.value_dim) if config.use_output_gate else None
        self.gk_proj = nn.Sequential(
            nn.Linear(width, config.gate_low_rank_dim, bias=False),
            nn.Linear(config.gate_low_rank_dim, config.key_dim // groups, bias=True),
        )
        self.o_proj = Projection(config.value_dim, width)
        if config.use_output_gate:
            self.g_norm_swish_gate = GatedRMSNorm(config.head_v_dim, config.norm_eps)
        else:
            self.g_norm = RMSNorm(config.head_v_dim, config.norm_eps)

    def mix(self, x: Tensor, positions: Tensor | None, shared: Tensor | None, run: Run) -> Tensor:
        config, (down, up) = self.config, (cast(nn.Linear, projection) for projection in self.gk_proj)
        gates = () if self.g_proj is None else (self.g_proj,)
        q, k, v, *gate, low_rank = project(x, self.q_proj, self.k_proj, self.v_proj, *gates, down)
        q, k = (tensor.unflatten(-1, (-1, config.head_k_dim)) for tensor in (q, k))
        v, *gate = (tensor.unflatten(-1, (-1, config.head_v_dim)) for tensor in (v, *gate))
        if self.feature_map is not None:
            q, k = self.feature_map(q), self.feature_map(k)
        # fp32: the log-decays are summed over the whole shard, so bf16 rounding errors would add up.
        logits = up(low_rank).to(accumulation_dtype(x.dtype))
        g = (F.logsigmoid(logits) / config.gate_logit_normalizer).unflatten(-1, (-1, config.head_k_dim))
        if config.clamp_min is not None:
            g = g.clamp_min(config.clamp_min)
        if config.num_kv_groups > 1:
            k, v, g = (tensor.repeat_interleave(config.num_kv_groups, dim=-2) for tensor in (k, v, g))
        o = run("gla", (q, k, v, g), config.head_k_dim**-0.5)
        normed = self.g_norm_swish_gate(o, *gate) if gate else self.g_norm(o)
        return self.o_proj(normed.flatten(-2))
