"""HGRN2 (Qin et al., 2024, arXiv 2404.07904).

Parameters have the names and shapes of `fla.models.HGRN2ForCausalLM` 0.6.0 (without short convolution, with lower
bounds). The lower bounds of the forget gates are one parameter of the model, `model.lower_bounds` [L, D].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor, nn
from torch.nn import functional as F

from models.config import LanguageModelConfig
from models.mixers.base import OperatorMixer, Run
from models.mixers.hgrn import HGRN, forget_gate
from models.modules import RMSNorm
from models.projections import Projection, project
from zeco_train.errors import ConfigError

# fla's layer leaves `norm_eps` out where it normalises o, and takes its function's default.
_NORM_EPS = 1e-5


@dataclass
class HGRN2Config(LanguageModelConfig):
    """Shape of an HGRN2 model. The defaults are those of `hgrn2_tiny`.

    Attributes:
        num_heads: H, heads; it divides hidden_size = H·K, and K = V.
        expand_ratio: K, width of a head's keys, as the papers give it; null: hidden_size / num_heads.
    """

    mixer: str = "hgrn2"
    name: str = "hgrn2_tiny"
    expand_ratio: int | None = None

    def validate(self) -> None:
        super().validate()
        width, heads = self.hidden_size, self.num_heads
        self._require_heads_divide({"hidden_size": width})
        if self.expand_ratio is not None and self.expand_ratio != width // heads:
            allowed = f"must be hidden_size / num_heads = {width // heads}, or null"
            raise ConfigError("model.expand_ratio", self.expand_ratio, allowed)

    @property
    def head_dim(self) -> int:
        """K = V."""
        return self.hidden_size // self.num_heads

    def canonical(self) -> Self:
        """See `LanguageModelConfig`; `expand_ratio` says nothing that `num_heads` does not."""
        return replace(super().canonical(), expand_ratio=None)

    def _shape_rows(self) -> Mapping[str, str]:
        return {"heads": f"{self.num_heads} of K and V {self.head_dim}"}


class HGRN2(OperatorMixer):
    """One HGRN2 layer: x [B, T, D] → [B, T, D].

    q, i      = swish(x Wq), x Wi
    f         = b + (1 − b) ⊙ σ(x Wf)                             the forget gate, above the layer's lower bound b
    o         = GLA(q, k = 1 − f, v = i, g = log f)               over the whole sequence, all shards
    y         = RMSNorm over all heads of o, Wo
    """

    config_class = HGRN2Config
    operators = ("gla",)
    title = "HGRN2 (Qin et al., 2024, arXiv 2404.07904)"
    shared = HGRN.shared._replace(shape=lambda config: (config.num_layers, config.hidden_size))

    def __init__(self, config: HGRN2Config, layer: int) -> None:
        super().__init__(config, layer)
        self.state_shapes = ((config.num_heads, config.head_dim, config.head_dim),)
        width = config.hidden_size
        # `init_weights` draws in this order: reordering the modules changes the initial values.
        self.q_proj = Projection(width, width)
        self.f_proj = nn.Linear(width, width, bias=False)
        self.i_proj = Projection(width, width)
        self.g_norm = RMSNorm(width, _NORM_EPS)
        self.o_proj = Projection(width, width)

    def mix(self, x: Tensor, positions: Tensor | None, shared: Tensor | None, run: Run) -> Tensor:
        assert shared is not None, "the model has lower bounds"
        q, logits, v = project(x, self.q_proj, self.f_proj, self.i_proj)
        k, g = forget_gate(logits, shared)
        width = self.config.head_dim
        q, k, v, g = (tensor.unflatten(-1, (-1, width)) for tensor in (F.silu(q), k, v, g))
        return self.o_proj(self.g_norm(run("gla", (q, k, v, g), width**-0.5).flatten(-2)))
