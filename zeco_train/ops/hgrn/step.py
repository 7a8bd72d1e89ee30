"""One token of the recurrence, for generation: h ← exp(g) ⊙ h + x, in place, in PyTorch. No gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.ops.passes import check_state


@torch.no_grad()
def hgrn_step(x: Tensor, g: Tensor, state: Tensor, scale: float | None = None) -> Tensor:
    """Compute the next token of each sequence of a batch.

    Args:
        x: [B, 1, H, K]; bf16, fp32 or fp64.
        g: [B, 1, H, K], log-decay ≤ 0; fp32 (fp64 for fp64 inputs).
        state: [B, H, K, 1] in the dtype of g, state after the previous token; updated in place.
        scale: None or 1.

    Returns:
        o: [B, 1, H, K] in the dtype of x.

    Raises:
        ValueError: shapes or dtypes do not fit; the message names the tensor.
    """
    if scale not in (None, 1.0):
        raise ValueError(f"scale: the operator has none, expected 1; got {scale:g}")
    check_state(state, "state", torch.Size((x.shape[0], *x.shape[2:], 1)))
    if x.shape[1] != 1:
        raise ValueError(f"x: expected one token of each sequence, got {x.shape[1]}")
    if state.dtype != g.dtype:
        raise ValueError(f"state: expected the dtype of g, {g.dtype}, got {state.dtype}")
    h = state.squeeze(-1)
    h.mul_(g[:, 0].exp()).add_(x[:, 0])
    return h[:, None].to(x.dtype, copy=True)
