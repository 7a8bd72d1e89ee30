"""FLOPs of gated linear attention per token, a multiply-add counting as two; independent of the sequence length.

Matrix products only. Of the token pairs inside a chunk of C = 64 only the causal half counts, (C+1)/2 per token,
although kernels compute the whole square.
"""

from __future__ import annotations

from zeco_train.ops import CHUNK


def forward_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """FLOPs per token of the forward pass: H · (2·KV + 2·KV + (C+1)·K + (C+1)·V).

    In this order: adding kᵀv to the state, applying q to the state, scores q kᵀ, and scores times v.

    Each product has two in the backward pass: dq = do Sᵀ, dk = v dSᵀ, dv = k dS and dS itself for the states; dA, dq,
    dk and dv inside chunks.
    """
    return float(heads * (4 * key_dim * value_dim + (CHUNK + 1) * (key_dim + value_dim)))


def recomputed_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """H · 2·KV: the chunk states, which the backward pass recomputes instead of keeping them.

    That is on GPUs; the PyTorch implementation also recomputes the scores.
    """
    return float(heads * 2 * key_dim * value_dim)
