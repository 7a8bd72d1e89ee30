"""A mixer without decays, for tests of unmasked models."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from models.mixers.base import OperatorMixer, Run
from models.mixers.gla import GLAConfig


class UnmaskedMixer(OperatorMixer):
    """Linear attention of positive features in both directions, with the shape of a GLA model; never causal.

    Patch it over GLA: `mock.patch.dict(MIXERS, gla=UnmaskedMixer)`.
    """

    config_class = GLAConfig
    can_be_unmasked = True
    operators = ("unmasked",)

    def __init__(self, config: GLAConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.state_shapes = ((config.num_heads, config.head_k_dim, config.head_v_dim),)
        self.qkv_proj = nn.Linear(config.hidden_size, 2 * config.key_dim + config.value_dim, bias=False)
        self.o_proj = nn.Linear(config.value_dim, config.hidden_size, bias=False)

    def mix(self, x: Tensor, positions: Tensor | None, shared: Tensor | None, run: Run) -> Tensor:
        config = self.config
        widths = config.key_dim, config.key_dim, config.value_dim
        q, k, v = (y.unflatten(-1, (config.num_heads, -1)) for y in self.qkv_proj(x).split(widths, dim=-1))
        # Of order one over any length: the sum over all tokens is not normalised.
        return self.o_proj(run("unmasked", (F.relu(q), F.relu(k), v), 0.1).flatten(-2))
