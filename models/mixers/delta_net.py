"""DeltaNet (Yang et al., 2024, arXiv 2406.06484; Schlag et al., 2021, 2102.11174), and what all delta rules share.

Parameters have the names and shapes of `fla.models.DeltaNetForCausalLM` 0.6.0 (with short convolutions, β, silu and L2
norms of queries and keys). Order enters through the convolutions and the rule.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.config import ExpandedHeadsConfig, LanguageModelConfig
from models.decays import step_log_decays
from models.mixers.base import OperatorMixer, Run
from models.modules import GatedRMSNorm, GateFunction, RMSNorm, ShortConvolution
from models.parameters import MATRIX, ParameterRule
from models.projections import Projection, project, project_beside
from zeco_train.errors import ConfigError
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.gated_norm import l2_normalised
from zeco_train.ops.linear import Aside


class DeltaHeads(NamedTuple):
    """Heads of a layer: G of queries and keys, width K; H of values and states, width V, which share them in turn."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    @property
    def key_width(self) -> int:
        """G·K, total width of the keys, and of the queries."""
        return self.keys * self.key_dim

    @property
    def value_width(self) -> int:
        """H·V, total width of the values."""
        return self.values * self.value_dim

    def in_words(self) -> str:
        """Of the model card."""
        shared = "" if self.keys == self.values else f", queries and keys shared by {self.values // self.keys}"
        return f"{self.values} of K {self.key_dim} and V {self.value_dim}{shared}"


@dataclass
class DeltaHeadsConfig(LanguageModelConfig):
    """A model with a delta rule whose heads have a width of their own.

    Attributes:
        num_heads: G, heads of queries and keys.
        head_dim: K, width of a head of queries and keys.
        num_v_heads: H, heads of values and decays, a multiple of num_heads; null: as many.
        expand_v: V as a multiple of K.
        conv_size: width of the convolutions over queries, keys and values.
        allow_neg_eigval: whether β lies between 0 and 2 rather than 0 and 1; so a token may turn the sign of what
            the state holds for its key (arXiv 2411.12537).
    """

    head_dim: int = 32
    num_v_heads: int | None = None
    expand_v: float = 1.0
    conv_size: int = 4
    allow_neg_eigval: bool = False

    def validate(self) -> None:
        super().validate()
        self._require_positive("head_dim")
        self._require_finite("expand_v")
        # A convolution with inputs before its own.
        self._require_positive("conv_size", least=2)
        width = self.head_dim * self.expand_v
        if round(width) < 1 or not math.isclose(width, round(width)):
            nearest = max(1, round(width)) / self.head_dim
            allowed = f"times head_dim={self.head_dim} must be a whole number; nearest: {nearest}"
            raise ConfigError("model.expand_v", self.expand_v, allowed)
        if self.num_v_heads is not None and (self.num_v_heads < 1 or self.num_v_heads % self.num_heads):
            allowed = f"must be a multiple of num_heads={self.num_heads}"
            raise ConfigError("model.num_v_heads", self.num_v_heads, allowed)

    @property
    def heads(self) -> DeltaHeads:
        values = self.num_v_heads or self.num_heads
        return DeltaHeads(self.num_heads, values, self.head_dim, round(self.head_dim * self.expand_v))

    def canonical(self) -> Self:
        """As for all models; `num_v_heads` equal to `num_heads` becomes None, `expand_v` the exact quotient."""
        model, heads = super().canonical(), self.heads
        values = None if heads.values == heads.keys else heads.values
        return replace(model, num_v_heads=values, expand_v=heads.value_dim / heads.key_dim)

    def _shape_rows(self) -> Mapping[str, str]:
        return {"heads": self.heads.in_words()}

    def _variants(self) -> list[str]:
        return ["negative eigenvalues"] * self.allow_neg_eigval


class Projected(NamedTuple):
    """The projections of a layer's tokens, before the convolutions."""

    # Queries, keys and values side by side, [B, T, 2·G·K + H·V].
    inputs: Tensor
    # Logits of β, [B, T, H], and of the decays, [B, T, H] or [B, T, H·K].
    strengths: Tensor
    decays: Tensor | None = None
    # Of the output, [B, T, H·V], which the rule computes while its scan is under way.
    gate: Aside | None = None


class _Convolution(ShortConvolution):
    # Initialised as a matrix, as in flash-linear-attention.
    def __init__(self, channels: int, width: int) -> None:
        super().__init__(channels, width, bias=False)

    def parameter_rules(self) -> Mapping[str, ParameterRule]:
        return {"weight": MATRIX}


class DeltaMixer(OperatorMixer):
    """One layer: x [B, T, D] → [B, T, D].

    q, k, v   = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv)), cut into heads
    q, k      = q / |q|, k / |k|
    β         = σ(x Wb), or 2 σ(x Wb) with negative eigenvalues
    o         = the operator of q, k, v, β and the decays       over the whole sequence, all shards
    y         = (RMSNorm over a head of o, gated) Wo

    The convolutions are one operator over all channels, so a layer sends one message to the next rank beside its scan.
    A subclass names its operator and has the projections; its configuration has `heads: DeltaHeads`.
    """

    needs_halo = True

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        self.heads: DeltaHeads = config.heads
        heads, self.operators = self.heads, ("short_conv", self.operator)
        channels = 2 * heads.key_width + heads.value_width
        self.state_shapes = (1, config.conv_size - 1, channels), (heads.values, heads.key_dim, heads.value_dim)

    # `init_weights` draws in the order in which a subclass adds these modules and its own.
    def _add_projections(self) -> None:
        width, heads = self.config.hidden_size, self.heads
        self.q_proj = Projection(width, heads.key_width)
        self.k_proj = Projection(width, heads.key_width)
        self.v_proj = Projection(width, heads.value_width)
        self.b_proj = nn.Linear(width, heads.values, bias=False)
        self.q_conv1d = _Convolution(heads.key_width, self.config.conv_size)
        self.k_conv1d = _Convolution(heads.key_width, self.config.conv_size)
        self.v_conv1d = _Convolution(heads.value_width, self.config.conv_size)

    # The norm of o over a head, gated by a function or not, and the last projection.
    def _add_output(self, gate_function: GateFunction | None, eps: float | None = None) -> None:
        value_dim, eps = self.heads.value_dim, self.config.norm_eps if eps is None else eps
        self.o_norm: nn.Module = (
            RMSNorm(value_dim, eps) if gate_function is None else GatedRMSNorm(value_dim, eps, gate_function)
        )
        self.o_proj = Projection(self.heads.value_width, self.config.hidden_size)

    @abstractmethod
    def _projections(self, x: Tensor) -> Projected: ...

    # With more layers, and the gate's if there is one; the outputs of the former, too.
    def _projected(self, x: Tensor, *more: nn.Linear, gate: nn.Linear | None) -> tuple[Projected, list[Tensor]]:
        layers = self.q_proj, self.k_proj, self.v_proj, self.b_proj, *more
        outputs, aside = (project(x, *layers), None) if gate is None else project_beside(x, *layers, aside=gate)
        return Projected(torch.cat(outputs[:3], -1), outputs[3], gate=aside), outputs[4:]

    def mix(self, x: Tensor, positions: Tensor | None, shared: Tensor | None, run: Run) -> Tensor:
        heads, (inputs, strengths, decays, gate) = self.heads, self._projections(x)
        taps = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])
        inputs = run("short_conv", (inputs, taps, taps.new_zeros(len(taps))), 1.0)
        # Each by itself: of silu of all, the values' part would keep the whole.
        q, k, v = map(F.silu, inputs.split((heads.key_width, heads.key_width, heads.value_width), dim=-1))
        q, k = (l2_normalised(x.unflatten(-1, (heads.keys, heads.key_dim))) for x in (q, k))
        # fp32: the rule solves for what its tokens write.
        beta = strengths.to(accumulation_dtype(inputs.dtype)).sigmoid()
        if self.config.allow_neg_eigval:
            beta = 2 * beta
        g: tuple[Tensor, ...] = ()
        if decays is not None:
            assert shared is not None
            g = (step_log_decays(decays, shared, heads.values),)
        v = v.unflatten(-1, (heads.values, heads.value_dim))
        rule = self.operator, (q, k, v, *g, beta), heads.key_dim**-0.5
        if gate is None:
            return self.o_proj(self.o_norm(run(*rule)).flatten(-2))
        o, of_output = run(*rule, gate)
        return self.o_proj(self.o_norm(o, of_output.unflatten(-1, o.shape[-2:])).flatten(-2))


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
        super().validate()
        self._require_positive("conv_size", least=2)

    @property
    def heads(self) -> DeltaHeads:
        return DeltaHeads(self.num_heads, self.num_heads, self.head_k_dim, self.head_v_dim)

    def _shape_rows(self) -> Mapping[str, str]:
        return {"heads": self.heads.in_words()}

    def _variants(self) -> list[str]:
        return ["output gate"] * self.use_gate + ["negative eigenvalues"] * self.allow_neg_eigval


class DeltaNet(DeltaMixer):
    """One DeltaNet layer: `DeltaMixer` without decays.

    o         = Delta(q, k, v, β)
    y         = RMSNorm over a head of o, Wo; or (that ⊙ swish(x Wg)) Wo
    """

    config_class = DeltaNetConfig
    operator = "delta"
    title = "DeltaNet (Yang et al., 2024, arXiv 2406.06484)"

    def __init__(self, config: DeltaNetConfig, layer: int) -> None:
        super().__init__(config, layer)
        # `init_weights` draws in this order: reordering the modules changes the initial values.
        self._add_projections()
        self.g_proj = Projection(config.hidden_size, self.heads.value_width) if config.use_gate else None
        self._add_output(GateFunction.swish if config.use_gate else None)

    def _projections(self, x: Tensor) -> Projected:
        return self._projected(x, gate=self.g_proj)[0]
