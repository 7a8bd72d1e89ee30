"""Mamba (Gu & Dao, 2023, arXiv 2312.00752), and the fields that Mamba-2 shares with it.

Parameters have the names and shapes of transformers' `MambaForCausalLM`, up to regular renames. A block has no MLP
unless `intermediate_size` is set. Order enters through the convolution and the decays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.config import LanguageModelConfig
from models.decays import initial_steps
from models.mixers.base import OperatorMixer, Run
from models.modules import ShortConvolution, swiglu
from models.parameters import PROJECTION, SCALE, ParameterRule, uniform
from models.projections import Projection, StackedProjection
from zeco_train.errors import ConfigError


@dataclass
class MambaConfig(LanguageModelConfig):
    """What Mamba and Mamba-2 have in common.

    Attributes:
        state_size: K, states of a channel (Mamba), keys of a group (Mamba-2); the size of B and C in the papers.
        expand: inner width as a multiple of hidden_size.
        conv_kernel: width of the convolution.
        use_conv_bias: whether that convolution has a bias.
        time_step_min: least initial time step; they are drawn log-uniformly from here to `time_step_max`.
        time_step_max: largest initial time step.
        time_step_floor: lower bound of the initial time steps, applied after the draw.
        residual_in_fp32: whether the residual stream is fp32 even if the model computes in bf16.
    """

    mlp_optional: ClassVar[bool] = True

    intermediate_size: int = 0
    norm_eps: float = 1e-5
    state_size: int = 16
    expand: int = 2
    conv_kernel: int = 4
    use_conv_bias: bool = True
    time_step_min: float = 0.001
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4
    residual_in_fp32: bool = True

    def validate(self) -> None:
        super().validate()
        self._require_positive("state_size", "expand")
        self._require_finite("time_step_min", "time_step_max", "time_step_floor")
        self._require_positive("conv_kernel", least=2)
        if self.time_step_min > self.time_step_max:
            allowed = f"must be ≤ time_step_max={self.time_step_max}"
            raise ConfigError("model.time_step_min", self.time_step_min, allowed)

    @property
    def inner_dim(self) -> int:
        """Channels of the recurrence; of Mamba-2 H·V, total width of the values."""
        return self.expand * self.hidden_size

    @property
    def has_wide_residual(self) -> bool:
        return self.residual_in_fp32

    def _variants(self) -> list[str]:
        return ["convolutions without bias"] * (not self.use_conv_bias)


@dataclass
class Mamba1Config(MambaConfig):
    """Shape of a Mamba model. The defaults are those of `mamba1_tiny`.

    Attributes:
        num_heads: heads of softmax layers in hybrids, unless `attn.num_heads` is set; Mamba has none.
        time_step_rank: R, width of the projection to time steps; null: hidden_size / 16, rounded up.
    """

    mixer: str = "mamba1"
    name: str = "mamba1_tiny"
    time_step_rank: int | None = None

    def validate(self) -> None:
        super().validate()
        if self.time_step_rank is not None:
            self._require_positive("time_step_rank")

    @property
    def rank(self) -> int:
        """R."""
        return -(-self.hidden_size // 16) if self.time_step_rank is None else self.time_step_rank

    def canonical(self) -> Self:
        """See `LanguageModelConfig`; `num_heads` says nothing that softmax layers do not."""
        return replace(super().canonical(), num_heads=1, time_step_rank=self.rank)

    def _shape_rows(self) -> Mapping[str, str]:
        return {"channels": f"{self.inner_dim}, of {self.state_size} states; time steps of rank {self.rank}"}


class Mamba1Decay(nn.Module):
    """`Mixer.wide_parameters`: they act on log-decays that are summed over the whole sequence."""

    def __init__(self, config: Mamba1Config) -> None:
        super().__init__()
        self._steps = config.time_step_min, config.time_step_max, config.time_step_floor
        self.A_log = nn.Parameter(torch.zeros(config.inner_dim, config.state_size))
        self.dt_bias = nn.Parameter(torch.zeros(config.inner_dim))
        self.D = nn.Parameter(torch.ones(config.inner_dim))

    def forward(self) -> Tensor:
        """[K + 2, H]: A_log of each state, dt_bias, D."""
        return torch.cat((self.A_log.mT, self.dt_bias[None], self.D[None]))

    def parameter_rules(self) -> Mapping[str, ParameterRule]:
        """Initial rates 1 … K (S4D-Real), as in the paper's code."""
        return {
            "A_log": ParameterRule(_initial_rates, decays=False, wide=True, draws=0),
            "dt_bias": ParameterRule(initial_steps(*self._steps), decays=False, wide=True, draws=1),
            "D": SCALE._replace(wide=True),
        }


def _initial_rates(parameter: Tensor, *_: object) -> None:
    parameter.copy_(torch.arange(1, parameter.shape[1] + 1, device=parameter.device).log().expand(parameter.shape))


class TimeSteps(nn.Linear):
    """The projection from rank R to the time steps' logits, whose bias is in `Mamba1Decay`: uniform to R^-1/2."""

    def __init__(self, rank: int, channels: int) -> None:
        super().__init__(rank, channels, bias=False)

    def parameter_rules(self) -> Mapping[str, ParameterRule]:
        bound = self.in_features**-0.5
        return {"weight": PROJECTION._replace(init=uniform(-bound, bound))}


class Mamba1(OperatorMixer):
    """One Mamba layer: x [B, T, D] → [B, T, D].

    u, z      = x Win, split
    u         = silu(conv(u))
    t, B, C   = u Wx, split: R and twice K channels
    dt        = t Wdt
    o         = SelectiveScan(u, dt, A_log, B, C, D, dt_bias)     over the whole sequence, all shards
    y         = (o ⊙ silu(z)) Wout
    """

    config_class = Mamba1Config
    needs_halo = True
    operators = ("short_conv", "mamba1")
    title = "Mamba (Gu & Dao, 2023, arXiv 2312.00752)"

    def __init__(self, config: Mamba1Config, layer: int) -> None:
        super().__init__(config, layer)
        inner, size = config.inner_dim, config.state_size
        self.state_shapes = (1, config.conv_kernel - 1, inner), (inner, size, 1)
        # `init_weights` draws in this order: reordering the modules changes the initial values.
        self.decay = Mamba1Decay(config)
        self.conv1d = ShortConvolution(inner, config.conv_kernel, bias=config.use_conv_bias)
        self.in_proj = StackedProjection(config.hidden_size, (inner, inner))
        # Decays follow from the time steps, so both products are in the compute dtype.
        self.x_proj = nn.Linear(inner, config.rank + 2 * size, bias=False)
        self.dt_proj = TimeSteps(config.rank, inner)
        self.out_proj = Projection(inner, config.hidden_size)

    def mix(self, x: Tensor, positions: Tensor | None, shared: Tensor | None, run: Run) -> Tensor:
        assert shared is not None
        config = self.config
        u, z = self.in_proj(x).chunk(2, -1)
        u = F.silu(run("short_conv", (u, *self.conv1d.operands()), 1.0))
        low, B, C = self.x_proj(u).split((config.rank, config.state_size, config.state_size), -1)
        A_log, dt_bias, D = shared.split((config.state_size, 1, 1))
        operands = u, self.dt_proj(low), A_log.mT, B, C, D.squeeze(0), dt_bias.squeeze(0)
        return self.out_proj(swiglu(z, run("mamba1", operands, 1.0)))
