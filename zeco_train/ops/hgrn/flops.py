"""FLOPs of the elementwise recurrence per token: 0, since matrix products only are counted and it has none.

Its operations per channel are a few thousandths of those of the projections that make its operands.
"""

from __future__ import annotations


def forward_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """FLOPs per token of the forward pass."""
    return 0.0


def recomputed_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """FLOPs per token that the backward pass recomputes."""
    return 0.0
