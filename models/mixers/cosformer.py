"""cosFormer (Qin et al., 2022, arXiv 2202.08791): linear attention whose weights fall off with the distance of tokens.

    φ(q_i)ᵀφ(k_j) = relu(q_i)ᵀrelu(k_j) · cos(π (i − j) / 2M),    φ(x_i) = relu(x_i) ⊗ (cos, sin)(π i / 2M)

i is the position in the whole sequence, on whichever rank; with packed documents too, for only differences count. M is
the length of the longest document that the model can read: in a longer one weights would become negative. So it is
refused before anything runs: `Mixer.longest_document`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.config import LanguageModelConfig
from models.mixers.linear import FeatureMapAttention, HeadWidths
from zeco_train.ops import accumulation_dtype


@dataclass
class CosformerConfig(LanguageModelConfig):
    """Shape of a cosFormer model. The defaults are those of `cosformer_tiny`.

    Attributes:
        num_heads: H, heads; it divides hidden_size = H·d. A head has K = 2d features and V = d values.
        max_document: M, tokens of the longest document, or of the longest sequence without documents. It is part of the
            model: another M makes other weights.
    """

    mixer: str = "cosformer"
    name: str = "cosformer_tiny"
    max_document: int = 8192

    def validate(self) -> None:
        super().validate()
        self._require_positive("max_document")
        self._require_heads_divide({"hidden_size": self.hidden_size})

    @property
    def head(self) -> HeadWidths:
        size = self.hidden_size // self.num_heads
        return HeadWidths(query=size, features=2 * size, key=2 * size, value=size)

    def _shape_rows(self) -> Mapping[str, str]:
        return {
            "heads": f"{self.num_heads} of K {self.head.key} and V {self.head.value}",
            "longest document": f"{self.max_document:,} tokens",
        }


class Cosformer(FeatureMapAttention):
    """cosFormer (Qin et al., 2022, arXiv 2202.08791)."""

    config_class = CosformerConfig
    title = "cosFormer (Qin et al., 2022, arXiv 2202.08791)"

    def __init__(self, config: CosformerConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.max_document, self.reads_positions = config.max_document, True

    @classmethod
    def longest_document(cls, config: CosformerConfig) -> int | None:
        return config.max_document

    def _map_features(self, q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        if positions is None:
            raise ValueError("positions: cosFormer needs the positions of its tokens in the sequence; got None")
        # fp64: at position 8M an angle in fp32 is off by as much as half a token.
        angles = positions.double() * (math.pi / (2 * self.max_document))
        table = torch.stack([angles.cos(), angles.sin()], dim=-1)[..., None, :].to(accumulation_dtype(q.dtype))
        if torch.compiler.is_compiling():
            return _weighted(q, table), _weighted(k, table)
        return _Weighted.apply(q, table), _Weighted.apply(k, table)


# relu(x) cos and relu(x) sin, rounded once: x [B, T, H, d], table [B or 1, T, 1, 2] → [B, T, H, 2d].
def _weighted(x: Tensor, table: Tensor) -> Tensor:
    positive = x.to(table.dtype).relu()
    return torch.cat([positive * table[..., :1], positive * table[..., 1:]], dim=-1).to(x.dtype)


class _Weighted(torch.autograd.Function):
    # y = [c r | s r], r = relu(x);  dx = (c dy₁ + s dy₂) where r > 0. Keeps y, which the operator keeps too.

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        y = _weighted(x, table)
        ctx.save_for_backward(y, table)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        y, table = ctx.saved_tensors
        of_cos, of_sin = dy.to(table.dtype).chunk(2, dim=-1)
        # Not both of cos and sin are 0.
        by_cos, by_sin = y.chunk(2, dim=-1)
        dx = (of_cos * table[..., :1] + of_sin * table[..., 1:]) * ((by_cos != 0) | (by_sin != 0))
        return dx.to(y.dtype), None
