"""One token of the recurrence, for generation: the state is updated in place, so memory is that of one state.

    S ← exp(g) ⊙_K S + k vᵀ,    o = scale · qᵀ S

On CUDA, with flash-linear-attention installed, this is one of its kernels; otherwise three passes over the state in
PyTorch. No gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zeco_train.ops.gla.chunk_layout import check_inputs, check_state

logger = logging.getLogger(__name__)


def recurrent_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float | None = None) -> Tensor:
    """Compute the next token of each sequence of a batch.

    Args:
        q, k: [B, 1, H, K]; bf16, fp32 or fp64.
        v: [B, 1, H, V], same dtype.
        g: [B, 1, H, K], log-decay ≤ 0; fp32 (fp64 for fp64 inputs).
        state: [B, H, K, V] in the dtype of g, contiguous, state after the previous token; updated in place.
        scale: factor of the output, K^-1/2 if None.

    Returns:
        o: [B, 1, H, V] in the dtype of v.

    Raises:
        ValueError: shapes or dtypes do not fit; the message names the tensor.
    """
    check_inputs(None, q=q, k=k, v=v, g=g)
    check_state(state, "state", torch.Size((q.shape[0], *q.shape[2:], v.shape[-1])))
    if q.shape[1] != 1:
        raise ValueError(f"q: expected one token of each sequence, got {q.shape[1]}")
    if state.dtype != g.dtype:
        raise ValueError(f"state: expected the dtype of g, {g.dtype}, got {state.dtype}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    fused = _fused_step() if q.is_cuda and g.dtype == torch.float32 else None
    if fused is None:
        return _plain_step(q, k, v, g, state, scale)
    o, final_state = fused(q, k, v, gk=g, scale=scale, initial_state=state, output_final_state=True)
    state.copy_(final_state)
    return o


def _plain_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
    heads = state.view(-1, *state.shape[-2:])
    query, key, value, log_decay = (x.to(state.dtype).reshape(len(heads), 1, -1) for x in (q, k, v, g))
    heads.mul_(log_decay.exp().mT).baddbmm_(key.mT, value)
    return torch.bmm(query * scale, heads).view(v.shape).to(v.dtype)


@cache
def _fused_step() -> Callable[..., Any] | None:
    """fla's kernel; None, with a single log message, if fla is not installed."""
    try:
        from fla.ops.gla import fused_recurrent_gla
    except ImportError:
        logger.info("flash-linear-attention is not installed: single tokens go through PyTorch")
        return None
    return fused_recurrent_gla
