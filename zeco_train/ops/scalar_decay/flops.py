"""FLOPs of linear attention with one decay a head, per token, a multiply-add counting as two.

Matrix products only. Of the token pairs inside a chunk of C = 64 only the causal half counts, (C+1)/2 per token.
"""

from __future__ import annotations

from zeco_train.ops import CHUNK


def forward_flops(heads: int, key_dim: int, value_dim: int, *, groups: int | None = None) -> float:
    """FLOPs per token of the forward pass: H · (2·KV + 2·KV + (C+1)·V) + G · (C+1)·K.

    In this order: adding kᵀv to the state, applying q to the state, scores times v; and the scores q kᵀ, which the
    heads of a group share. `groups` is G, as many as heads if None.

    Each product has two in the backward pass: dq = do Sᵀ, dk = v dSᵀ, dv = k dS and dS itself for the states; dA and dv
    inside chunks, and dq and dk there, once a group.
    """
    groups = heads if groups is None else groups
    return float(heads * (4 * key_dim * value_dim + (CHUNK + 1) * value_dim) + groups * (CHUNK + 1) * key_dim)


def recomputed_flops(heads: int, key_dim: int, value_dim: int, *, groups: int | None = None) -> float:
    """H · 2·KV: the chunk states, which the backward pass recomputes instead of keeping them.

    That is on GPUs; the PyTorch implementation also recomputes the scores, and q S for the gradient of the decays.
    """
    del groups
    return float(heads * 2 * key_dim * value_dim)
