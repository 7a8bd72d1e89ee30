"""Retention (Sun et al., 2023, arXiv 2307.08621), and what layers with fixed decays share with it.

Each head has one decay that is no parameter, so its memory has one length: that of head h is about 2^(5 + h) tokens.
Queries and keys have rotary position embeddings.

Parameters have the names and shapes of `fla.models.RetNetForCausalLM` 0.6.0 (with fused norms, no short convolution, as
many heads of keys and values as of queries). fla rotates with frequencies of base 10000 only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from models.attn import check_rotation
from models.config import ExpandedHeadsConfig
from models.mixers.base import OperatorMixer, Run
from models.modules import GatedRMSNorm, rotate
from models.projections import Projection, project
from zeco_train.ops import accumulation_dtype


@dataclass
class FixedDecayConfig(ExpandedHeadsConfig):
    """Shape of a model with fixed decays.

    Attributes:
        rope_theta: base of the frequencies of the rotary position embeddings; null: no position embeddings.
    """

    rope_theta: float | None = None

    def validate(self) -> None:
        super().validate()
        check_rotation("model.rope_theta", self.rope_theta, self.head_k_dim)


class FixedDecayAttention(OperatorMixer):
    """One layer: x [B, T, D] → [B, T, D]. A subclass has the log-decays (`constants`), f, and the gated norm.

    q, k, v   = f(x Wq), f(x Wk), f(x Wv), cut into heads; q and k rotated if there is a `rope_theta`
    o         = linear attention with the heads' decays, over the whole sequence, all shards
    y         = (o, normed and gated by x Wg) Wo
    """

    operators = ("fixed_decay",)
    # [H], of `constants`.
    log_decay: Tensor

    def __init__(self, config: FixedDecayConfig, layer: int, *, scale: float) -> None:
        super().__init__(config, layer)
        self.scale, self.reads_positions = scale, config.rope_theta is not None
        self.state_shapes = ((config.num_heads, config.head_k_dim, config.head_v_dim),)
        width, keys, values = config.hidden_size, config.key_dim, config.value_dim
        # `init_weights` draws in this order: reordering the modules changes the initial values.
        self.q_proj = Projection(width, keys)
        self.k_proj = Projection(width, keys)
        self.v_proj = Projection(width, values)
        self.g_proj = Projection(width, values)
        self.o_proj = Projection(values, width)

    # f, elementwise.
    def _activate(self, x: Tensor) -> Tensor:
        return x

    @abstractmethod
    def _norm_and_gate(self, o: Tensor, gate: Tensor) -> Tensor:
        """The operator's outputs o [B, T, H, V], normed and gated by x Wg [B, T, H·V]: [B, T, H·V]."""

    def mix(self, x: Tensor, positions: Tensor | None, shared: Tensor | None, run: Run) -> Tensor:
        *projected, gate = project(x, self.q_proj, self.k_proj, self.v_proj, self.g_proj)
        sizes = self.config.head_k_dim, self.config.head_k_dim, self.config.head_v_dim
        q, k, v = (self._activate(y).unflatten(-1, (-1, size)) for y, size in zip(projected, sizes, strict=True))
        if self.config.rope_theta is not None:
            assert positions is not None, "the model asks for positions"
            q, k = rotate(q, k, positions, self.config.rope_theta)
        o = run("fixed_decay", (q, k, v, self.log_decay.to(accumulation_dtype(x.dtype))), self.scale)
        return self.o_proj(self._norm_and_gate(o, gate))


@dataclass
class RetNetConfig(FixedDecayConfig):
    """Shape of a RetNet, see `FixedDecayConfig`. The defaults are those of `retnet_tiny`."""

    mixer: str = "retnet"
    name: str = "retnet_tiny"
    expand_v: float = 2.0
    rope_theta: float | None = 10000.0

    def _variants(self) -> list[str]:
        return ["no position embeddings"] if self.rope_theta is None else []


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
        self.g_norm_swish_gate = GatedRMSNorm(config.head_v_dim, config.norm_eps)

    def constants(self) -> Mapping[str, Tensor]:
        return {"log_decay": log_decays(self.config.num_heads)}

    def _norm_and_gate(self, o: Tensor, gate: Tensor) -> Tensor:
        return self.g_norm_swish_gate(o, gate.unflatten(-1, (-1, self.config.head_v_dim))).flatten(-2)
