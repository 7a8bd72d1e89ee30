"""FLOPs of unmasked linear attention per token, a multiply-add counting as two; independent of the sequence length."""

from __future__ import annotations


def forward_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """FLOPs per token of the forward pass: H · (2·KV + 2·KV), adding kᵀv to the state and applying q to it.

    Each product has two in the backward pass: dq = do Sᵀ, dS = qᵀ do, dk = v dSᵀ and dv = k dS.
    """
    return float(heads * 4 * key_dim * value_dim)


def recomputed_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """Nothing: the one state that the backward pass reads is kept."""
    return 0.0
