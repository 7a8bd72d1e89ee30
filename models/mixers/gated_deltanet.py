"""Gated DeltaNet (Yang et al., 2024, arXiv 2412.06464).

Parameters have the names and shapes of `fla.models.GatedDeltaNetForCausalLM` 0.6.0 (with short convolutions). Order
enters through the convolutions and the rule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor, nn

from models.decays import StepDecay
from models.mixers.delta_net import DeltaHeadsConfig, DeltaMixer, Projected
from models.modules import GateFunction
from models.projections import Projection

# Initial values of exp(A_log), as in flash-linear-attention.
_RATES = (0.0, 16.0)


@dataclass
class GatedDeltaNetConfig(DeltaHeadsConfig):
    """Shape of a Gated DeltaNet model, see `DeltaHeadsConfig`. The defaults are those of `gated_deltanet_tiny`.

    Attributes:
        use_gate: whether a layer's output is gated, by swish of a projection, after its norm.
        o_norm_eps: added to the mean square in that norm; null: norm_eps.
    """

    mixer: str = "gated_deltanet"
    name: str = "gated_deltanet_tiny"
    use_gate: bool = True
    o_norm_eps: float | None = None

    def validate(self) -> None:
        super().validate()
        if self.o_norm_eps is not None:
            self._require_finite("o_norm_eps")

    def canonical(self) -> Self:
        """As for all delta rules; `o_norm_eps` equal to `norm_eps` becomes None."""
        model = super().canonical()
        return replace(model, o_norm_eps=None) if self.o_norm_eps == self.norm_eps else model

    def _variants(self) -> list[str]:
        return ["no output gate"] * (not self.use_gate) + super()._variants()


class GatedDeltaNet(DeltaMixer):
    """One Gated DeltaNet layer: `DeltaMixer` with one decay a head.

    g         = −exp(A_log) softplus(x Wa + dt_bias)              the log-decay, ≤ 0
    o         = GatedDelta(q, k, v, g, β)
    y         = (RMSNorm over a head of o ⊙ swish(x Wg)) Wo
    """

    config_class = GatedDeltaNetConfig
    operator = "gated_delta"
    title = "Gated DeltaNet (Yang et al., 2024, arXiv 2412.06464)"

    def __init__(self, config: GatedDeltaNetConfig, layer: int) -> None:
        super().__init__(config, layer)
        # `init_weights` draws in this order: reordering the modules changes the initial values.
        self.decay = StepDecay(self.heads.values, 1, _RATES)
        self._add_projections()
        self.a_proj = nn.Linear(config.hidden_size, self.heads.values, bias=False)
        self.g_proj = Projection(config.hidden_size, self.heads.value_width) if config.use_gate else None
        self._add_output(GateFunction.swish if config.use_gate else None, config.o_norm_eps)

    def _projections(self, x: Tensor) -> Projected:
        projected, (decays,) = self._projected(x, self.a_proj, gate=self.g_proj)
        return projected._replace(decays=decays)
