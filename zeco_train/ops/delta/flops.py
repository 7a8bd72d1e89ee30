"""FLOPs of the delta rules per token, a multiply-add counting as two; independent of the sequence length.

Matrix products and the triangular systems of chunks. Of the token pairs inside a chunk of C = 64 only the causal half
counts: (C+1)/2 per token with the token itself, (C−1)/2 without. Products with matrices of transitions, which only
several ranks need, count as nothing, like the scan itself.
"""

from __future__ import annotations

from zeco_train.ops import CHUNK


def forward_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """FLOPs per token of the forward pass: H · ((C−1)·K + (C−1)·(K+V) + 2·KV + 2·KV + 2·KV + (C+1)·K + (C+1)·V).

    In this order: the products k kᵀ, the systems for W and U, W times the state, adding k̃ᵀN to the state, applying q to
    the state, scores q kᵀ, and scores times N.

    Each product has two in the backward pass.
    """
    return _systems(heads, key_dim, value_dim) + float(
        heads * (6 * key_dim * value_dim + (CHUNK + 1) * (key_dim + value_dim))
    )


def recomputed_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """H · ((C−1)·K + (C−1)·(K+V) + 4·KV + (C+1)·K): systems, states and scores, which the backward pass recomputes."""
    return _systems(heads, key_dim, value_dim) + float(heads * (4 * key_dim * value_dim + (CHUNK + 1) * key_dim))


def _systems(heads: int, key_dim: int, value_dim: int) -> float:
    return float(heads * (CHUNK - 1) * (2 * key_dim + value_dim))
