"""Retention (Sun et al., 2023, arXiv 2307.08621): the layer and its configuration.

Each head has one decay that is no parameter, so its memory has one length: that of head h is about 2^(5 + h) tokens.
Queries and keys have rotary position embeddings.

Names and shapes of its parameters equal those of `fla.models.RetNetForCausalLM` 0.6.0 (with fused norms, no short
convolution, as many heads of keys and values as of queries), so a checkpoint maps one to one. fla rotates with
frequencies of base 10000 only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from models.mixers.fixed_decay_base import FixedDecayAttention, FixedDecayConfig
from models.modules import GatedRMSNorm


@dataclass
class RetNetConfig(FixedDecayConfig):
    """Shape of a RetNet, see `FixedDecayConfig`. The defaults are those of `retnet_tiny`."""

    mixer: str = "retnet"
    name: str = "retnet_tiny"
    expand_v: float = 2.0
    rope_theta: float | None = 10000.0

    def describe(self) -> Mapping[str, str]:
        """See `LanguageModelConfig`."""
        variants = ["no position embeddings"] if self.rope_theta is None else []
        variants += ["tied embeddings"] if self.tie_word_embeddings else []
        heads = f"{self.num_heads} of K {self.head_k_dim} and V {self.head_v_dim}"
        return {"heads": heads, "variants": "; ".join(variants) or "none"}


def log_decays(num_heads: int) -> Tensor:
    """Log-decays of the heads, log(1 − 2^(−5−h)): [H] in fp64, on the CPU."""
    return torch.log1p(-torch.exp2(-5 - torch.arange(num_heads, dtype=torch.float64, device="cpu")))


class MultiScaleRetention(FixedDecayAttention):
    """One RetNet layer: x [B, T, D] → [B, T, D].

    q, k      = x Wq, x Wk, cut into heads and rotated by the tokens' positions
    v         = x Wv
    o         = retention(q, k, v) with the decay 1 − 2^(−5−h) of head h, over the whole sequence, all shards
    y         = (RMSNorm over a head of o ⊙ swish(x Wg)) Wo
    """

    config_class = RetNetConfig
    title = "retention (Sun et al., 2023, arXiv 2307.08621)"

    def __init__(self, config: RetNetConfig, layer: int) -> None:
        super().__init__(config, layer, scale=config.head_k_dim**-0.5)
        self.g_norm_swish_gate = GatedRMSNorm(self.head_v_dim, config.norm_eps)

    @classmethod
    def constants(cls, config: RetNetConfig, layer: int) -> Mapping[str, Tensor]:
        """The heads' log-decays."""
        return {"log_decay": log_decays(config.num_heads)}

    def norm_and_gate(self, o: Tensor, gate: Tensor) -> Tensor:
        """A norm over each head."""
        return self.g_norm_swish_gate(o, gate.unflatten(-1, (-1, self.head_v_dim))).flatten(-2)
