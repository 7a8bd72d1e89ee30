"""Lightning Attention (Qin et al., 2023, arXiv 2307.14995; 2024, 2405.17381).

Each head has one decay that is no parameter: a slope of ALiBi (Press et al., 2021, arXiv 2108.12409), smaller in later
layers, nearly none in the last. The layer is that of MiniMax-01 (2025, arXiv 2501.08313): swish of q, k and v, no
scale, one norm over all heads, and a sigmoid gate. Some models rotate queries and keys besides; `rope_theta` sets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from models.mixers.retnet import FixedDecayAttention, FixedDecayConfig
from models.modules import GatedRMSNorm, GateFunction


@dataclass
class LightningConfig(FixedDecayConfig):
    """Shape of a model with Lightning Attention, see `FixedDecayConfig`. The defaults are those of `lightning_tiny`."""

    mixer: str = "lightning"
    name: str = "lightning_tiny"

    def _variants(self) -> list[str]:
        return [] if self.rope_theta is None else [f"rotary position embeddings of base {self.rope_theta:g}"]


def slopes(num_heads: int) -> list[float]:
    """ALiBi's slopes: a geometric sequence, 2^(−8/n) to 2^(−8), for n heads, n a power of two.

    For other numbers, those of the next lower power of two, then every second one of the next higher power of two.
    """
    lower = 1 << (num_heads.bit_length() - 1)
    geometric = [2 ** (-8 * (head + 1) / lower) for head in range(lower)]
    between = [2 ** (-8 * (2 * head + 1) / (2 * lower)) for head in range(num_heads - lower)]
    return geometric + between


def log_decays(num_heads: int, layer: int, num_layers: int) -> Tensor:
    """Log-decays of a layer's heads, −slope · (1 − layer / (num_layers − 1) + 1e-5): [H] in fp64, on the CPU."""
    factor = 1 - layer / max(num_layers - 1, 1) + 1e-5
    return torch.tensor(slopes(num_heads), dtype=torch.float64, device="cpu") * -factor


class LightningAttention(FixedDecayAttention):
    """One layer of Lightning Attention: x [B, T, D] → [B, T, D].

    q, k, v   = swish(x Wq), swish(x Wk), swish(x Wv), cut into heads; q and k rotated if there is a `rope_theta`
    o         = linear attention with the heads' decays, over the whole sequence, all shards
    y         = (RMSNorm over all heads of o ⊙ σ(x Wg)) Wo
    """

    config_class = LightningConfig
    title = "Lightning Attention (Qin et al., 2024, arXiv 2405.17381)"

    def __init__(self, config: LightningConfig, layer: int) -> None:
        super().__init__(config, layer, scale=1.0)
        self.g_norm = GatedRMSNorm(config.value_dim, config.norm_eps, GateFunction.sigmoid)

    def constants(self) -> Mapping[str, Tensor]:
        return {"log_decay": log_decays(self.config.num_heads, self.layer, self.config.num_layers)}

    def _activate(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def _norm_and_gate(self, o: Tensor, gate: Tensor) -> Tensor:
        return self.g_norm(o.flatten(-2), gate)
