"""The exact results: sums over pairs of tokens, see `zeco_train.ops.oracle`."""

from __future__ import annotations

import torch
from torch import Tensor

# Tokens of which all pairs are computed at once.
_BLOCK = 16


def by_sums(x: Tensor, g: Tensor, *, scale: float | None, initial_state: Tensor) -> tuple[Tensor, Tensor]:
    """h_i = exp(G_i) ⊙ h + Σ_{j≤i} exp(G_i − G_j) ⊙ x_j, with h before a block and G the sums of log-decays since.

    Args:
        x: [B, T, H, K], fp64.
        g: [B, T, H, K], fp64.
        scale: None or 1.
        initial_state: [B, H, K, 1], fp64.

    Returns:
        o [B, T, H, K], and the state after the last token, [B, H, K, 1].
    """
    assert scale in (None, 1.0)
    state, outputs = initial_state.squeeze(-1), []
    for start in range(0, x.shape[1], _BLOCK):
        x_b, g_b = x[:, start : start + _BLOCK], g[:, start : start + _BLOCK]
        later = torch.ones(x_b.shape[1], x_b.shape[1], dtype=torch.bool, device=x.device).tril(-1)
        # [B, i, j, H, K]: of the tokens after j up to i; sums of their own, since differences would cancel.
        between = (g_b[:, :, None] * later[..., None, None]).cumsum(1).exp()
        seen = between * ~later.mT[..., None, None]
        outputs.append(g_b.cumsum(1).exp() * state[:, None] + (seen * x_b[:, None]).sum(2))
        state = outputs[-1][:, -1]
    return torch.cat(outputs, 1), state.unsqueeze(-1)
