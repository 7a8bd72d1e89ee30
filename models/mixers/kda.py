"""Kimi Delta Attention (Kimi Team, 2025, arXiv 2510.26692).

Parameters have the names and shapes of `fla.models.KDAForCausalLM` 0.6.0 (with short convolutions, without a lower
bound of the decays). Order enters through the convolutions and the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from models.decays import StepDecay
from models.mixers.delta_net import DeltaHeadsConfig, DeltaMixer, Projected
from models.modules import GateFunction
from models.projections import project_beside

# Initial values of exp(A_log), as in flash-linear-attention.
_RATES = (1.0, 16.0)


@dataclass
class KDAConfig(DeltaHeadsConfig):
    """Shape of a KDA model, see `DeltaHeadsConfig`. The defaults are those of `kda_tiny`."""

    mixer: str = "kda"
    name: str = "kda_tiny"


class KimiDeltaAttention(DeltaMixer):
    """One KDA layer: `DeltaMixer` with a decay for each channel of the keys, of low rank as the output's gate is.

    g         = −exp(A_log) softplus(x Wf1 Wf2 + dt_bias)         the log-decays of a head's channels, ≤ 0
    o         = KDA(q, k, v, g, β)
    y         = (RMSNorm over a head of o ⊙ σ(x Wg1 Wg2 + b)) Wo
    """

    config_class = KDAConfig
    operator = "kda"
    title = "Kimi Delta Attention (Kimi Team, 2025, arXiv 2510.26692)"

    def __init__(self, config: KDAConfig, layer: int) -> None:
        super().__init__(config, layer)
        width, heads = config.hidden_size, self.heads
        # `init_weights` draws in this order: reordering the modules changes the initial values.
        self.decay = StepDecay(heads.values, heads.key_dim, _RATES)
        self._add_projections()
        self.f_proj = nn.Sequential(
            nn.Linear(width, heads.value_dim, bias=False),
            nn.Linear(heads.value_dim, heads.values * heads.key_dim, bias=False),
        )
        self.g_proj = nn.Sequential(
            nn.Linear(width, heads.value_dim, bias=False),
            nn.Linear(heads.value_dim, heads.value_width, bias=True),
        )
        self._add_output(GateFunction.sigmoid)

    def _projections(self, x: Tensor) -> Projected:
        (f_down, f_up), (g_down, g_up) = (cast(list[nn.Linear], list(each)) for each in (self.f_proj, self.g_proj))
        projected, (decays, gate) = self._projected(x, f_down, g_down, gate=None)
        return projected._replace(decays=f_up(decays), gate=project_beside(gate, aside=g_up)[1])
