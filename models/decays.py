"""Decays by time steps, g = −exp(A_log) · softplus(logits + dt_bias), as in Mamba-2 and the delta rules: parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from models.parameters import Init, ParameterRule, uniform
from zeco_train.ops import accumulation_dtype

# The delta rules' initial time steps: range, and lower bound.
_STEPS = 0.001, 0.1, 1e-4
# No draw may be 0, whose logarithm is −∞.
_LEAST_RATE = 1e-6


def initial_steps(low: float, high: float, floor: float) -> Init:
    """Initial dt_bias: the inverse of softplus at time steps whose logarithms are uniform."""

    def biases(logs: Tensor) -> Tensor:
        steps = logs.exp_().clamp_min_(floor)
        return steps + torch.log(-torch.expm1(-steps))

    return uniform(math.log(low), math.log(high), biases)


def initial_rates(low: float, high: float) -> Init:
    """Initial A_log: logarithms of uniform rates."""
    return uniform(low, high, lambda rates: rates.clamp_min_(_LEAST_RATE).log_())


class StepDecay(nn.Module):
    """`Mixer.wide_parameters` A_log [H] and dt_bias [H·channels]: they act on decays summed over the sequence.

    `rates` is the range of the initial exp(A_log).
    """

    def __init__(self, heads: int, channels: int, rates: tuple[float, float]) -> None:
        super().__init__()
        self._rates = rates
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads * channels))

    def forward(self) -> Tensor:
        """A_log, dt_bias: [H + H·channels]."""
        return torch.cat((self.A_log, self.dt_bias))

    def parameter_rules(self) -> Mapping[str, ParameterRule]:
        """Initial values as in flash-linear-attention."""
        return {
            "A_log": ParameterRule(initial_rates(*self._rates), decays=False, wide=True, draws=1),
            "dt_bias": ParameterRule(initial_steps(*_STEPS), decays=False, wide=True, draws=1),
        }


def step_log_decays(logits: Tensor, parameters: Tensor, heads: int) -> Tensor:
    """Log-decays −exp(A_log) · softplus(logits + dt_bias), [..., H] or [..., H, K] in fp32 (fp64 for fp64 logits).

    Logits are [..., H] or [..., H·K], the parameters those of `StepDecay`, [H + H] or [H + H·K].
    """
    if torch.compiler.is_compiling():
        return _log_decays(logits, parameters, heads)[0]
    return _LogDecays.apply(logits, parameters, heads)


# With softplus' argument in the same shape.
def _log_decays(logits: Tensor, parameters: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    a_log, dt_bias = parameters[:heads], parameters[heads:]
    # fp32: the log-decays are summed over the whole shard, so bf16 rounding errors would add up.
    shifted = logits.to(accumulation_dtype(logits.dtype)) + dt_bias
    rates = -a_log.exp()
    if len(dt_bias) > heads:
        shifted, rates = shifted.unflatten(-1, (heads, -1)), rates[:, None]
    return rates * F.softplus(shifted), shifted


class _LogDecays(torch.autograd.Function):
    # Keeps the logits x alone, where autograd would keep three tensors in fp32:
    # dx = db by token = −dg e^a σ(x + b);  da = Σ dg ⊙ g over all but the heads

    @staticmethod
    def forward(ctx: Any, logits: Tensor, parameters: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(logits, parameters)
        ctx.heads = heads
        return _log_decays(logits, parameters, heads)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dg: Tensor) -> tuple[Tensor, Tensor, None]:
        logits, parameters = ctx.saved_tensors
        heads = ctx.heads
        g, shifted = _log_decays(logits, parameters, heads)
        rates = -parameters[:heads].exp().view(heads, *(1,) * (g.dim() - logits.dim()))
        da_log = (dg * g).reshape(-1, heads, g.numel() // (logits.shape[:-1].numel() * heads)).sum((0, 2))
        dshifted = (dg * rates * shifted.sigmoid()).view(logits.shape)
        dbias = dshifted.reshape(-1, logits.shape[-1]).sum(0)
        return dshifted.to(logits.dtype), torch.cat((da_log, dbias)), None
