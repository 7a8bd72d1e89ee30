"""FLOPs of the short convolution per token: 0, since matrix products only are counted and it has none.

Its 2w operations per channel are a few thousandths of those of the projection that makes its input.
"""

from __future__ import annotations


def forward_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """FLOPs per token of the forward pass."""
    return 0.0


def recomputed_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """FLOPs per token that the backward pass recomputes."""
    return 0.0
