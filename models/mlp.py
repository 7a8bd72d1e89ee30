"""The MLP of a block."""

from __future__ import annotations

from torch import Tensor, nn

from models.config import LanguageModelConfig
from models.modules import swiglu
from models.projections import Projection, project


class MLP(nn.Module):
    """SwiGLU: x [B, T, D] → (swish(x Wgate) ⊙ x Wup) Wdown."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.gate_proj = Projection(config.hidden_size, config.intermediate_size)
        self.up_proj = Projection(config.hidden_size, config.intermediate_size)
        self.down_proj = Projection(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor, is_read: bool = True) -> Tensor:
        """With `is_read=False` the last product is skipped: the output is NaN, only the gradients are valid."""
        inner = swiglu(*project(x, self.gate_proj, self.up_proj))
        return self.down_proj(inner, is_read)
