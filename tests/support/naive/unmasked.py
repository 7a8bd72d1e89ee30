"""Attention over all pairs of tokens without a softmax, under plain autograd: the oracle for the passes."""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.unmasked.passes import check_inputs


def naive_unmasked(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Unmasked linear attention, pair by pair.

        o_i = scale · Σ_j (q_i · k_j) v_j        over all tokens j, earlier and later ones

    Args:
        q: [B, T, H, K] queries.
        k: [B, T, H, K] keys.
        v: [B, T, H, V] values.
        scale: factor of the outputs, K^-1/2 if None.
        initial_state: must be None: every token reads the whole sequence, and there is no state before it.

    Returns:
        o: [B, T, H, V] in the dtype of v.
        state: [B, H, K, V], Σ_j k_j v_jᵀ, in fp64 if v is fp64, else fp32.

    Raises:
        ValueError: shapes or dtypes do not fit, or a state is given; the message names the tensor.
    """
    check_inputs(q, k, v)
    if initial_state is not None:
        raise ValueError("initial_state: an unmasked operator has none, since each token reads the whole sequence")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = (x.to(accumulation_dtype(v.dtype)) for x in (q, k, v))
    scores = torch.einsum("bihk,bjhk->bhij", query, key)
    o = scale * torch.einsum("bhij,bjhv->bihv", scores, value)
    return o.to(v.dtype), torch.einsum("bjhk,bjhv->bhkv", key, value)
