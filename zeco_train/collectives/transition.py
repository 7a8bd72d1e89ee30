"""How the tokens of a shard change a state: the map that every scan over ranks applies.

A shard is the affine map `R ↦ exp(log_decay) ⊙_K R + state`. Backends and collectives know this function only and
contain no arithmetic on decays of their own, so that other transitions (matrices) can take its place.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fold(state: Tensor, log_decay: Tensor, incoming: Tensor) -> Tensor:
    """The state after a shard: `exp(log_decay) ⊙_K incoming + state`.

    Args:
        state: [B, H, K, V], what the shard's tokens make of a zero start.
        log_decay: [B, H, K], ≤ 0, same dtype; −inf is a decay of 0, which cuts `incoming` off.
        incoming: [B, H, K, V], same dtype, finite: the state before the shard.

    Returns:
        [B, H, K, V], a new tensor; never NaN, since 0 multiplies finite values only.
    """
    return torch.addcmul(state, log_decay.exp().unsqueeze(-1), incoming)
