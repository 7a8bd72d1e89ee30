"""Gated slot attention (Zhang et al., 2024, arXiv 2409.07146).

Parameters have the names and shapes of `fla.models.GSAForCausalLM` 0.6.0 (without short convolutions). Order enters
through the decays alone: there is no maximum sequence length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.mixers.base import OperatorMixer, Run
from models.mixers.gla import FeatureMap, GatedHeadsConfig
from models.modules import RMSNorm
from models.projections import Projection, project
from zeco_train.errors import ConfigError
from zeco_train.ops import accumulation_dtype

# fla's layer leaves `norm_eps` out where it normalises o, and takes its function's default.
_NORM_EPS = 1e-5


@dataclass
class GSAConfig(GatedHeadsConfig):
    """Shape of a GSA model, see `GatedHeadsConfig`. The defaults are those of `gsa_tiny`.

    Attributes:
        num_slots: M, slots of a head of keys.
        expand_v: 1, since the norm of the layer's output has the width of the model.
    """

    mixer: str = "gsa"
    name: str = "gsa_tiny"
    num_slots: int = 32
    gate_logit_normalizer: int = 8
    feature_map: FeatureMap | None = FeatureMap.silu

    def validate(self) -> None:
        super().validate()
        self._require_positive("num_slots")
        if self.expand_v != 1:
            raise ConfigError("model.expand_v", self.expand_v, "must be 1: the output's norm is as wide as the model")

    def _shape_rows(self) -> Mapping[str, str]:
        return {**super()._shape_rows(), "slots": f"{self.num_slots} a head"}


class GatedSlotAttention(OperatorMixer):
    """One GSA layer: x [B, T, D] → [B, T, D].

    q, k, v   = φ(x Wq), φ(x Wk), swish(x Wv)                     φ the feature map
    g         = log σ(x Wf) / gate_logit_normalizer               the log-decay of each slot, ≤ 0
    s         = 1 − exp(g)                                        what a token writes into each slot
    p         = softmax over slots of GSA(q, k, s, g)             over the whole sequence, all shards
    o         = GLA(p, s, v, g)                                   over the whole sequence, all shards
    y         = RMSNorm over all heads of swish(o), Wo
    """

    config_class = GSAConfig
    operators = ("gsa", "gla")
    title = "gated slot attention (Zhang et al., 2024, arXiv 2409.07146)"

    def __init__(self, config: GSAConfig, layer: int) -> None:
        super().__init__(config, layer)
        width, groups, heads, slots = config.hidden_size, config.num_kv_groups, config.num_heads, config.num_slots
        self.head_dims = config.head_k_dim, config.head_k_dim, config.head_v_dim, slots
        self.state_shapes = (heads, slots, config.head_k_dim), (heads, slots, config.head_v_dim)
        self.feature_map = config.feature_map and config.feature_map.function
        # `init_weights` draws in this order: reordering the modules changes the initial values.
        self.q_proj = Projection(width, config.key_dim)
        self.k_proj = Projection(width, config.key_dim // groups)
        self.v_proj = Projection(width, width // groups)
        self.f_proj = nn.Linear(width, heads // groups * slots, bias=False)
        self.g_norm = RMSNorm(width, _NORM_EPS)
        self.o_proj = Projection(width, width)

    def mix(self, x: Tensor, positions: Tensor | None, shared: Tensor | None, run: Run) -> Tensor:
        projected = project(x, self.q_proj, self.k_proj, self.v_proj, self.f_proj)
        q, k, v, logits = (y.unflatten(-1, (-1, dim)) for y, dim in zip(projected, self.head_dims, strict=True))
        if self.feature_map is not None:
            q, k = self.feature_map(q), self.feature_map(k)
        # fp32: the log-decays are summed over the whole shard, so bf16 rounding errors would add up.
        wide = accumulation_dtype(x.dtype)
        g = F.logsigmoid(logits.to(wide)) / self.config.gate_logit_normalizer
        operands: tuple[Tensor, ...] = k, F.silu(v), (-torch.expm1(g)).to(x.dtype), g
        if (groups := self.config.num_kv_groups) > 1:
            operands = tuple(y.repeat_interleave(groups, dim=-2) for y in operands)
        k, v, s, g = operands
        # fp32 again: the gradient of bf16 weights, which do not add up to 1, has four times the error (1.5e-2).
        p = run("gsa", (q, k, s, g), 1.0).softmax(-1, dtype=wide).to(x.dtype)
        return self.o_proj(self.g_norm(F.silu(run("gla", (p, s, v, g), 1.0)).flatten(-2)))
