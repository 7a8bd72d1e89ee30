"""The recurrence, token by token under plain autograd: the oracle for all other implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.checks import check_state
from zeco_train.ops.documents import find_restarts
from zeco_train.ops.gla.checks import check_inputs


def naive_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    pieces: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated linear attention, equation by equation (Yang et al. 2024, arXiv 2312.06635, section 4.1).

        S_t = exp(g_t) ⊙_K S_{t-1} + k_t v_tᵀ,    o_t = scale · q_tᵀ S_t

    Slow, and its autograd graph holds T states: for tests, preferably in fp64.

    Args:
        q: [B, T, H, K] queries.
        k: [B, T, H, K] keys.
        v: [B, T, H, V] values.
        g: [B, T, H, K] fp32 or fp64, log-decays, finite and at most 0.
        scale: factor of the outputs, K^-1/2 if None.
        initial_state: [B, H, K, V], the state before token 0; None is zero.
        pieces: [T], see `zeco_train.ops.documents`; B must be 1 with them.

    Returns:
        o: [B, T, H, V] in the dtype of v.
        final_state: [B, H, K, V] in fp64 if v is fp64, else fp32.

    Raises:
        ValueError: shapes, dtypes or documents do not fit; the message names the tensor.
    """
    check_inputs(pieces, q=q, k=k, v=v, g=g)
    dtype = accumulation_dtype(v.dtype)
    batch, num_tokens, heads, key_dim = q.shape
    zero = torch.zeros(batch, heads, key_dim, v.shape[-1], dtype=dtype, device=v.device)
    if initial_state is not None:
        check_state(initial_state, "initial_state", zero.shape)
    state = zero if initial_state is None else initial_state.to(dtype)
    restarts = [False] * num_tokens if pieces is None else find_restarts(pieces).tolist()
    scale = key_dim**-0.5 if scale is None else scale

    # unbind: the gradient of indexing `q[:, t]` would be a zero tensor of T tokens for every token
    tokens = [x.to(dtype).unbind(1) for x in (q, k, v, g.to(dtype).exp())]
    o = []
    for q_t, k_t, v_t, decay_t, restart in zip(*tokens, restarts, strict=True):
        carried = zero if restart else decay_t[..., None] * state
        state = carried + k_t[..., None] * v_t[..., None, :]
        o.append((q_t[..., None, :] @ state).squeeze(-2))
    return (scale * torch.stack(o, dim=1)).to(v.dtype), state
