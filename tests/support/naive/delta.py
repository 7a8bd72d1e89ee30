"""The delta rules, token by token under plain autograd: the oracles for all other implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.checks import check_state
from zeco_train.ops.delta.checks import check_inputs
from zeco_train.ops.documents import find_restarts


def naive_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    pieces: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`naive_gated_delta` without decay: g = 0 (Schlag et al. 2021, arXiv 2102.11174)."""
    g = beta.detach().new_zeros(1).expand(beta.shape)
    return naive_gated_delta(q, k, v, g, beta, scale=scale, initial_state=initial_state, pieces=pieces)


def naive_gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    pieces: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A gated delta rule, equation by equation (Yang et al. 2024, arXiv 2412.06464; by channel arXiv 2510.26692).

        S_t = (I − β_t k_t k_tᵀ) Diag(exp(g_t)) S_{t-1} + β_t k_t v_tᵀ,    o_t = scale · q_tᵀ S_t

    Slow, and its autograd graph holds T states: for tests, preferably in fp64.

    Args:
        q: [B, T, G, K] queries.
        k: [B, T, G, K] keys, of norm at most 1.
        v: [B, T, H, V] values; G divides H.
        g: [B, T, H] or [B, T, H, K], fp32 or fp64, log-decays, finite and at most 0.
        beta: [B, T, H], fp32 or fp64, between 0 and 2.
        scale: factor of the outputs, K^-1/2 if None.
        initial_state: [B, H, K, V], the state before token 0; None is zero.
        pieces: [T], see `zeco_train.ops.documents`; B must be 1 with them.

    Returns:
        o: [B, T, H, V] in the dtype of v.
        final_state: [B, H, K, V] in fp64 if v is fp64, else fp32.

    Raises:
        ValueError: shapes, dtypes or documents do not fit; the message names the tensor.
    """
    check_inputs(pieces, q=q, k=k, v=v, g=g, beta=beta)
    dtype, key_dim = accumulation_dtype(v.dtype), q.shape[-1]
    batch, num_tokens, heads, value_dim = v.shape
    zero = torch.zeros(batch, heads, key_dim, value_dim, dtype=dtype, device=v.device)
    if initial_state is not None:
        check_state(initial_state, "initial_state", zero.shape)
    state = zero if initial_state is None else initial_state.to(dtype)
    restarts = [False] * num_tokens if pieces is None else find_restarts(pieces).tolist()
    scale = key_dim**-0.5 if scale is None else scale

    q, k = (x.repeat_interleave(heads // q.shape[2], dim=2) for x in (q, k))
    decays = g.to(dtype).exp()
    # unbind: the gradient of indexing `q[:, t]` would be a zero tensor of T tokens for every token
    tokens = [x.to(dtype).unbind(1) for x in (q, k, v, decays if g.dim() == 4 else decays[..., None], beta)]
    o = []
    for q_t, k_t, v_t, decay_t, beta_t, restart in zip(*tokens, restarts, strict=True):
        carried = zero if restart else decay_t[..., None] * state
        change = beta_t[..., None] * (v_t - (k_t[..., None, :] @ carried).squeeze(-2))
        state = carried + k_t[..., None] * change[..., None, :]
        o.append((q_t[..., None, :] @ state).squeeze(-2))
    return (scale * torch.stack(o, dim=1)).to(v.dtype), state
