"""AdamW (Loshchilov & Hutter, 2019), fused."""

from __future__ import annotations

import torch

from zeco_train.training.optim.spec import Group, OptimizerSettings, OptimizerSpec


def _build(groups: list[Group], settings: OptimizerSettings) -> torch.optim.AdamW:
    # One pass over weights, gradient and moments; and the only kind that can leave a step out on the device.
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


ADAMW = OptimizerSpec(
    name="adamw",
    build=_build,
    # Two moments, and a step count in fp32.
    state_bytes=lambda elements, itemsize: 2 * elements * itemsize + 4,
    settings=("betas", "eps"),
)
