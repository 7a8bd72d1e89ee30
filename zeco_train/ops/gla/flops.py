"""FLOPs of gated linear attention for one token, a multiply-add counting as two; the sequence's length does not enter.

Counted are matrix products, and of the pairs of tokens inside a chunk of C = 64 the causal half, (C+1)/2 a token,
although kernels compute the whole square.
"""

from __future__ import annotations

from zeco_train.ops import CHUNK


def forward_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """H · (2·KV + 2·KV + (C+1)·K + (C+1)·V): adding kᵀv to the state, applying q to the state, scores q kᵀ, and scores
    times v.

    Each product has two in the backward pass: dq = do Sᵀ, dk = v dSᵀ, dv = k dS and dS itself for the states; dA, dq,
    dk and dv inside chunks.
    """
    return float(heads * (4 * key_dim * value_dim + (CHUNK + 1) * (key_dim + value_dim)))


def recomputed_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """H · 2·KV: the chunks' states, which the backward pass computes again rather than keep them.

    That is on GPUs; in PyTorch it makes the scores, too, a second time.
    """
    return float(heads * 2 * key_dim * value_dim)
