"""DeltaNet (Yang et al., 2024, arXiv 2406.06484; Schlag et al., 2021, arXiv 2102.11174): layer and configuration.

Names and shapes of its parameters equal those of `fla.models.DeltaNetForCausalLM` 0.6.0 (with short convolutions, β,
silu and L2 norms of queries and keys), so a checkpoint maps one to one, in both directions (`zeco_train.hf`).

There is no positional embedding: order enters through the convolutions and the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from models.heads import ExpandedHeadsConfig
from models.mixers.delta_base import DeltaHeads, DeltaMixer, Projected, check_conv_size, describe_heads
from models.modules import GateFunction
from models.projections import Projection, project


@dataclass
class DeltaNetConfig(ExpandedHeadsConfig):
    """Shape of a DeltaNet model, see `ExpandedHeadsConfig`. The defaults are those of `delta_net_tiny`.

    Attributes:
        conv_size: width of the convolutions over queries, keys and values.
        use_gate: whether a layer's output is gated, by swish of a projection, after its norm.
        allow_neg_eigval: whether β lies between 0 and 2 rather than 0 and 1 (arXiv 2411.12537).
    """

    mixer: str = "delta_net"
    name: str = "delta_net_tiny"
    conv_size: int = 4
    use_gate: bool = False
    allow_neg_eigval: bool = False

    def validate(self) -> None:
        """Raise `ConfigError` for a value out of range, or heads that do not divide the width."""
        super().validate()
        check_conv_size(self.conv_size)

    @property
    def heads(self) -> DeltaHeads:
        """Heads of a layer."""
        return DeltaHeads(self.num_heads, self.num_heads, self.head_k_dim, self.head_v_dim)

    def describe(self) -> Mapping[str, str]:
        """See `LanguageModelConfig`."""
        variants = ["output gate"] * self.use_gate + ["negative eigenvalues"] * self.allow_neg_eigval
        return describe_heads(self.heads, variants + ["tied embeddings"] * self.tie_word_embeddings)


class DeltaNet(DeltaMixer):
    """One DeltaNet layer: `DeltaMixer` without decays.

    o         = Delta(q, k, v, β)
    y         = RMSNorm over a head of o, Wo; or (that ⊙ swish(x Wg)) Wo
    """

    config_class = DeltaNetConfig
    operator = "delta"
    title = "DeltaNet (Yang et al., 2024, arXiv 2406.06484)"

    def __init__(self, config: DeltaNetConfig, layer: int) -> None:
        super().__init__(config, layer, config.heads)
        # `init_weights` draws in this order: reordering the modules changes the initial values.
        self._add_projections()
        if config.use_gate:
            self.g_proj = Projection(config.hidden_size, self.heads.value_width)
        self._add_output(GateFunction.swish if config.use_gate else None)

    def projections(self, x: Tensor) -> Projected:
        """See `DeltaMixer`."""
        gates = (self.g_proj,) if self.config.use_gate else ()
        layers = self.q_proj, self.k_proj, self.v_proj, self.b_proj, *gates
        q, k, v, strengths, *gate = project(x, *layers)
        return Projected(torch.cat([q, k, v], -1), strengths, None, gate[0] if gate else None)

    def gate_width(self) -> int:
        """See `DeltaMixer`."""
        return self.heads.value_width * self.config.use_gate
