"""One token of the recurrence, for generation: the state is updated in place, so memory is that of one state.

    S ← exp(g) S + k vᵀ,    o = scale · qᵀ S

On all devices a few passes over the state in PyTorch. No gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.passes import check_state


def scalar_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float | None = None) -> Tensor:
    """Compute the next token of each sequence of a batch.

    Args:
        q: [B, 1, G, K]; bf16, fp32 or fp64.
        k: [B, 1, G, K], same dtype.
        v: [B, 1, H, V], same dtype; G divides H.
        g: [B, 1, H], log-decay ≤ 0; fp32 or fp64.
        state: [B, H, K, V], fp64 if v is, else fp32; contiguous, state after the previous token; updated in place.
        scale: factor of the output, K^-1/2 if None.

    Returns:
        o: [B, 1, H, V] in the dtype of v.

    Raises:
        ValueError: a state that does not fit, or several tokens; `Operator.step` checks the operands before.
    """
    return _step(q, k, v, g, state, scale)


def fixed_step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, scale: float | None = None) -> Tensor:
    """`scalar_step` with log_decay [H], fp32 or fp64, in place of g."""
    return _step(q, k, v, log_decay.expand(v.shape[:3]), state, scale)


@torch.no_grad()
def _step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float | None) -> Tensor:
    batch, num_tokens, groups, key_dim = q.shape
    check_state(state, "state", torch.Size((batch, v.shape[2], key_dim, v.shape[3])))
    dtype = accumulation_dtype(v.dtype)
    if num_tokens != 1:
        raise ValueError(f"q: expected one token of each sequence, got {num_tokens}")
    if state.dtype != dtype:
        raise ValueError(f"state: expected {dtype}, for v is {v.dtype}; got {state.dtype}")
    if not state.is_contiguous():
        raise ValueError("state: expected a contiguous tensor, since it is updated in place")
    scale = key_dim**-0.5 if scale is None else scale

    of_groups = state.unflatten(1, (groups, -1))
    key, query = (x.to(dtype).view(batch, groups, 1, 1, key_dim) for x in (k, scale * q.to(dtype)))
    value = v.to(dtype).view(batch, groups, -1, 1, v.shape[-1])
    decay = g.to(dtype).exp().view(batch, groups, -1, 1, 1)
    of_groups.mul_(decay).addcmul_(key.mT, value)
    return (query @ of_groups).view(v.shape).to(v.dtype)
