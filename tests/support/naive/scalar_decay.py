"""The recurrences, token by token under plain autograd: the oracles for all other implementations.

They are `naive_gla` with the group's queries and keys for each head, and a head's decay for each channel of the keys.
"""

from __future__ import annotations

from torch import Tensor

from tests.support.naive.gla import naive_gla
from zeco_train.ops.scalar_decay.checks import check_inputs


def naive_scalar_decay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    pieces: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention with one decay a head and token, equation by equation (Dao & Gu 2024, arXiv 2405.21060).

        S_t = exp(g_t) S_{t-1} + k_t v_tᵀ,    o_t = scale · q_tᵀ S_t

    Slow, and its autograd graph holds T states: for tests, preferably in fp64.

    Args:
        q: [B, T, G, K] queries.
        k: [B, T, G, K] keys.
        v: [B, T, H, V] values; G divides H.
        g: [B, T, H] fp32 or fp64, log-decays, finite and at most 0.
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
    heads_per_group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(heads_per_group, dim=2) for x in (q, k))
    g = g[..., None].expand(q.shape)
    return naive_gla(q, k, v, g, scale=scale, initial_state=initial_state, pieces=pieces)


def naive_fixed_decay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    pieces: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`naive_scalar_decay` with g_t = log_decay for all tokens; log_decay [H], fp32 or fp64, a constant."""
    check_inputs(pieces, q=q, k=k, v=v, log_decay=log_decay)
    g = log_decay.detach().expand(v.shape[:3])
    return naive_scalar_decay(q, k, v, g, scale=scale, initial_state=initial_state, pieces=pieces)
