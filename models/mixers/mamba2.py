"""Mamba-2 (Dao & Gu, 2024, arXiv 2405.21060).

Parameters have the names and shapes of transformers' `Mamba2ForCausalLM`, up to regular renames. A block has no MLP
unless `intermediate_size` is set. Order enters through the convolution and the decays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from models.decays import initial_rates, initial_steps
from models.mixers.base import OperatorMixer, Run
from models.mixers.mamba1 import MambaConfig
from models.modules import RMSNormOfGated, ShortConvolution
from models.parameters import SCALE, ParameterRule
from models.projections import Projection, StackedProjection, parallel_linear
from zeco_train.errors import ConfigError
from zeco_train.ops.linear import Matmul
from zeco_train.ops.mamba2 import operands

# Initial values of exp(A_log), as in the paper's code and in flash-linear-attention.
_A_RANGE = (1.0, 16.0)


@dataclass
class Mamba2Config(MambaConfig):
    """Shape of a Mamba-2 model. The defaults are those of `mamba2_tiny`.

    Attributes:
        num_heads: H, heads; head_dim · num_heads must equal expand · hidden_size.
        head_dim: V, values per head.
        n_groups: G, groups; each group of keys and queries serves num_heads / n_groups heads.
        time_step_limit: range to which time steps are clamped.
    """

    mixer: str = "mamba2"
    name: str = "mamba2_tiny"
    num_heads: int = 8
    head_dim: int = 32
    state_size: int = 32
    n_groups: int = 1
    time_step_limit: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        # A list where it was read from a file.
        self.time_step_limit = cast(tuple[float, float], tuple(map(float, self.time_step_limit)))
        super().__post_init__()

    def validate(self) -> None:
        super().validate()
        self._require_positive("head_dim", "n_groups")
        if self.num_heads * self.head_dim != self.inner_dim:
            allowed = f"times num_heads={self.num_heads} must equal expand · hidden_size = {self.inner_dim}"
            raise ConfigError("model.head_dim", self.head_dim, allowed)
        self._require_divides_heads("n_groups")
        limit = self.time_step_limit
        # The comparison is also false for NaN.
        if len(limit) != 2 or not 0 <= limit[0] < limit[1]:
            raise ConfigError("model.time_step_limit", list(limit), "must be [least, most] with 0 ≤ least < most")

    @property
    def group_dim(self) -> int:
        """G·K, total width of the keys, and of the queries."""
        return self.n_groups * self.state_size

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: values, keys, queries."""
        return self.inner_dim + 2 * self.group_dim

    def _shape_rows(self) -> Mapping[str, str]:
        return {"heads": f"{self.num_heads} of K {self.state_size} and V {self.head_dim}"}

    def _variants(self) -> list[str]:
        found = [f"{self.n_groups} groups of keys and queries"] * (self.n_groups > 1)
        if self.time_step_limit != (0.0, math.inf):
            found.append("time steps from {:g} to {:g}".format(*self.time_step_limit))
        return found + super()._variants()


class Mamba2Decay(nn.Module):
    """`Mixer.wide_parameters`: they act on log-decays that are summed over the whole sequence."""

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        self._steps = config.time_step_min, config.time_step_max, config.time_step_floor
        self.dt_bias = nn.Parameter(torch.zeros(config.num_heads))
        self.A_log = nn.Parameter(torch.zeros(config.num_heads))
        self.D = nn.Parameter(torch.ones(config.num_heads))

    def forward(self) -> Tensor:
        """[3, H]: dt_bias, A_log, D."""
        return torch.stack((self.dt_bias, self.A_log, self.D))

    def parameter_rules(self) -> Mapping[str, ParameterRule]:
        return {
            "dt_bias": ParameterRule(initial_steps(*self._steps), decays=False, wide=True, draws=1),
            "A_log": ParameterRule(initial_rates(*_A_RANGE), decays=False, wide=True, draws=1),
            "D": SCALE._replace(wide=True),
        }


class Mamba2(OperatorMixer):
    """One Mamba-2 layer: x [B, T, D] → [B, T, D].

    z, u, dt  = x Win, split
    x', B, C  = silu(conv(u)), split: values, keys, queries
    dt        = softplus(dt + dt_bias), clamped
    g         = −exp(A_log) dt                                    the log-decay of a head, ≤ 0
    o         = ScalarDecay(C, B, dt x', g) + D x'                over the whole sequence, all shards
    y         = RMSNorm by group of (o ⊙ silu(z)) Wout
    """

    config_class = Mamba2Config
    needs_halo = True
    operators = ("short_conv", "scalar_decay")
    title = "Mamba-2 (Dao & Gu, 2024, arXiv 2405.21060)"

    def __init__(self, config: Mamba2Config, layer: int) -> None:
        super().__init__(config, layer)
        of_operator = config.num_heads, config.state_size, config.head_dim
        self.state_shapes = (1, config.conv_kernel - 1, config.conv_dim), of_operator
        inner, groups = config.inner_dim, config.group_dim
        # `init_weights` draws in this order: reordering the modules changes the initial values.
        self.decay = Mamba2Decay(config)
        self.conv1d = ShortConvolution(config.conv_dim, config.conv_kernel, bias=config.use_conv_bias)
        self.in_proj = StackedProjection(config.hidden_size, (inner, inner, groups, groups, config.num_heads))
        self.norm = RMSNormOfGated(inner, config.n_groups, config.norm_eps)
        self.out_proj = Projection(inner, config.hidden_size)

    def mix(self, x: Tensor, positions: Tensor | None, shared: Tensor | None, run: Run) -> Tensor:
        assert shared is not None
        config = self.config
        weights = self.in_proj.weight.split((config.inner_dim, config.conv_dim, config.num_heads))
        # Decays follow from the time steps.
        formats = self.in_proj.matmul, self.in_proj.matmul, Matmul.bf16
        # The gate [B, T, H·V], the convolution's input [B, T, H·V + 2·G·K], the time steps' logits [B, T, H].
        z, u, logits = parallel_linear(x, *weights, formats=formats)
        u = run("short_conv", (u, *self.conv1d.operands()), 1.0)
        limit = config.time_step_limit
        *of_operator, skip = operands(u, logits, shared, config.head_dim, config.n_groups, limit)
        o = run("scalar_decay", of_operator, 1.0)
        return self.out_proj(self.norm(o, skip, u, z, shared))
