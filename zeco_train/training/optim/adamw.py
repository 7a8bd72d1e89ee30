"""AdamW (Loshchilov & Hutter, 2019), fused."""

from __future__ import annotations

import torch

from zeco_train.training.optim.spec import OptimizerSettings, OptimizerSpec, Parameters, decay_groups


def _build(parameters: Parameters, settings: OptimizerSettings) -> torch.optim.AdamW:
    groups = decay_groups(parameters, settings.weight_decay)
    # Fused: one pass over weights, gradients and moments, and the only variant that can skip a step on the device.
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def moments_bytes(elements: int, itemsize: int) -> int:
    """Two moments, and a step count in fp32."""
    return 2 * elements * itemsize + 4


ADAMW = OptimizerSpec(
    name="adamw",
    build=_build,
    state_bytes=lambda elements, itemsize, rule: moments_bytes(elements, itemsize),
    settings=("betas", "eps"),
)
