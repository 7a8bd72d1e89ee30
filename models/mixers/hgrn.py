"""HGRN (Qin et al., 2023, arXiv 2311.04823), and the forget gates that HGRN2 shares with it.

Parameters have the names and shapes of `fla.models.HGRNForCausalLM` 0.6.0 (without short convolutions, with lower
bounds). The lower bounds of the forget gates are one parameter of the model, `model.lower_bounds` [L, E·D]; they rise
from layer to layer, so later layers remember longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.config import LanguageModelConfig
from models.mixers.base import OperatorMixer, Run, Shared
from models.modules import GatedRMSNorm, swiglu
from models.parameters import BIAS
from models.projections import Projection, project

# Bounds the forget gate from below: 0 has no logarithm, and 1 / f must be finite. A state that it multiplies is gone.
_LEAST = 1e-30


def lower_bounds(parameter: Tensor) -> Tensor:
    """Lower bounds of the forget gates, [L, D], from the parameter [L, D]: the cumulative sum over layers of a softmax.

    Less its first, so they are 0 in the first layer, and below 1 in the last.
    """
    steps = parameter.softmax(0)[1:]
    # The first layer's is a constant, so no rounding error of the others' gradients reaches it. A sum may round to more
    # than 1, and a decay must not.
    return torch.cat([torch.zeros_like(parameter[:1]), steps.cumsum(0).clamp(max=1)])


def forget_gate(logits: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Keys k = 1 − f and log-decays g = log f of a forget gate f = b + (1 − b) σ(logits).

    Logits are [..., D], bounds b [D] from 0 to 1 in fp32 (fp64 for fp64 logits); k has the logits' dtype, g that of b.
    """
    if torch.compiler.is_compiling():
        k, g = _gate_values(logits.to(bound.dtype), bound)
        return k.to(logits.dtype), g
    return _ForgetGate.apply(logits, bound)


# To all digits both where f is nearly 1 and where it is nearly 0.
def _gate_values(logits: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    k = (1 - bound) * (-logits).sigmoid()
    f = _forgets(logits, bound)
    # Bounded on the side that is not taken, where the gradient would be 0 · ∞.
    return k, torch.where(k < 0.5, torch.log1p(-k.clamp(max=0.5)), f.log())


def _forgets(logits: Tensor, bound: Tensor) -> Tensor:
    return (bound + (1 - bound) * logits.sigmoid()).clamp(min=_LEAST)


class _ForgetGate(torch.autograd.Function):
    # With h = dg / f − dk and s = σ(−x) = 1 − σ(x):
    # db = Σ s h over all but the last dimension;  dx = (1 − b) s (1 − s) h

    @staticmethod
    def forward(ctx: Any, logits: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits, bound)
        k, g = _gate_values(logits.to(bound.dtype), bound)
        return k.to(logits.dtype), g

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: Tensor, dg: Tensor) -> tuple[Tensor, Tensor]:
        logits, bound = ctx.saved_tensors
        wide = logits.to(bound.dtype)
        of_forgotten = (dg / _forgets(wide, bound)).sub_(dk).mul_((-wide).sigmoid())
        dbound = of_forgotten.reshape(-1, bound.shape[0]).sum(0)
        return of_forgotten.mul_(wide.sigmoid()).mul_(1 - bound).to(logits.dtype), dbound


# Most channels of a head. Scans cut states between heads.
_CHANNELS = 128


@dataclass
class HGRNConfig(LanguageModelConfig):
    """Shape of an HGRN model. The defaults are those of `hgrn_tiny`.

    Attributes:
        num_heads: heads of softmax layers in hybrids, unless `attn.num_heads` is set; HGRN has none.
        expand_ratio: E, width of the recurrence as a multiple of hidden_size.
    """

    mixer: str = "hgrn"
    name: str = "hgrn_tiny"
    expand_ratio: int = 1

    def validate(self) -> None:
        super().validate()
        self._require_positive("expand_ratio")

    @property
    def width(self) -> int:
        """E·D, channels of the recurrence."""
        return self.expand_ratio * self.hidden_size

    @property
    def head_dim(self) -> int:
        """K, channels of a head: the largest power of two that divides the width, and at most 128."""
        return min(self.width & -self.width, _CHANNELS)

    def canonical(self) -> Self:
        """See `LanguageModelConfig`; `num_heads` says nothing that softmax layers do not."""
        return replace(super().canonical(), num_heads=1)

    def _shape_rows(self) -> Mapping[str, str]:
        return {"channels": f"{self.width}"}


class HGRN(OperatorMixer):
    """One HGRN layer: x [B, T, D] → [B, T, D].

    f         = b + (1 − b) ⊙ σ(x Wf)                             the forget gate, above the layer's lower bound b
    u         = swish(x Wi) ⊙ (1 − f)
    h_t       = f_t ⊙ h_{t−1} + u_t                               over the whole sequence, all shards
    y         = (RMSNorm of h ⊙ swish(x Wg)) Wo
    """

    config_class = HGRNConfig
    operators = ("hgrn",)
    title = "HGRN (Qin et al., 2023, arXiv 2311.04823)"
    shared = Shared(
        name="lower_bounds",
        shape=lambda config: (config.num_layers, config.width),
        rule=BIAS,
        parts=lower_bounds,
    )

    def __init__(self, config: HGRNConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.state_shapes = ((config.width // config.head_dim, config.head_dim, 1),)
        # `init_weights` draws in this order: reordering the modules changes the initial values.
        self.i_proj = Projection(config.hidden_size, config.width)
        self.f_proj = nn.Linear(config.hidden_size, config.width, bias=False)
        self.g_proj = Projection(config.hidden_size, config.width)
        self.g_norm = GatedRMSNorm(config.width, config.norm_eps)
        self.o_proj = Projection(config.width, config.hidden_size)

    def mix(self, x: Tensor, positions: Tensor | None, shared: Tensor | None, run: Run) -> Tensor:
        assert shared is not None, "the model has lower bounds"
        inputs, logits, gate = project(x, self.i_proj, self.f_proj, self.g_proj)
        written, g = forget_gate(logits, shared)
        u, g = (tensor.unflatten(-1, (-1, self.config.head_dim)) for tensor in (swiglu(inputs, written), g))
        return self.o_proj(self.g_norm(run("hgrn", (u, g), 1.0).flatten(-2), gate))
