"""Interactions between the tokens of one chunk: the phases that need no other rank and overlap the scans.

The products of token pairs are those of `zeco_train.ops.pairs`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.chunks import matrices, to_chunks
from zeco_train.ops.pairs import own_scores, pair_grads, pair_scores


@dataclass(frozen=True)
class IntraGrads:
    """Gradients through the pairs of tokens inside chunks, [N, B, H, C, D] in the dtype of the states.

    Attributes:
        dq: D = K. dk: D = K. dv: D = V.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor


def intra_scores(q: Tensor, k: Tensor, g: Tensor, doc_ids: Tensor | None, scale: float) -> Tensor:
    """Compute the scores of the tokens of each chunk: step 3 of the forward.

        A_ij = scale · Σ_K q_i ⊙ k_j ⊙ exp(g_{j+1} + … + g_i)  for j <= i without a restart in (j, i],  else 0

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K].
        g: [B, T, H, K], fp32 or fp64, finite, at most 0.
        doc_ids: [T], see `zeco_train.ops.documents`; B must be 1 with them.
        scale: factor of the outputs.

    Returns:
        [N, B, H, C, C] in fp64 if q is fp64, else fp32; rows are queries.
    """
    dtype = accumulation_dtype(q.dtype)
    return pair_scores(to_chunks(q, dtype), to_chunks(k, dtype), g, doc_ids).mul_(scale)


def intra_grads(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, do: Tensor, doc_ids: Tensor | None, scale: float
) -> IntraGrads:
    """Compute the intra-chunk parts of dq, dk and dv: step 3 of the backward.

        dA = scale · do vᵀ,    dq_i = Σ_j dA_ij k_j ⊙ decay_ij,    dk_j = Σ_i dA_ij q_i ⊙ decay_ij,    dv = Aᵀ do

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K].
        v: [B, T, H, V].
        g: [B, T, H, K], fp32 or fp64.
        do: [B, T, H, V], gradient of o.
        doc_ids: [T], see `zeco_train.ops.documents`.
        scale: factor of the outputs.
    """
    dtype = accumulation_dtype(v.dtype)
    queries, keys = to_chunks(q, dtype), to_chunks(k, dtype)
    output_grads = matrices(to_chunks(do, dtype))
    score_grads = torch.bmm(output_grads, matrices(to_chunks(v, dtype)).mT).mul_(scale)
    scores, score_grads = own_scores(queries, keys), score_grads.view(*queries.shape[:-1], -1)
    dq, dk = pair_grads(queries, keys, score_grads, g, doc_ids, scores)
    dv = torch.bmm(matrices(scores.mul_(scale)).mT, output_grads)
    return IntraGrads(dq, dk, dv.view(*queries.shape[:-1], -1))
