"""What a layer keeps between the tokens of a sequence in generation: states of constant size, or caches of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeco_train.ops import accumulation_dtype


@dataclass(frozen=True)
class StateOf:
    """A state of constant size, [B, H, K, V] in fp32 (fp64 for an fp64 model).

    Attributes:
        sizes: H, K, V.
        is_cache: false: a step changes all of it.
    """

    sizes: tuple[int, int, int]
    is_cache = False

    def shape(self, capacity: int | None) -> tuple[int, int, int]:
        """Shape for one sequence."""
        del capacity
        return self.sizes

    def dtype(self, compute: torch.dtype) -> torch.dtype:
        """Its dtype in a model that computes in `compute`."""
        return accumulation_dtype(compute)


@dataclass(frozen=True)
class TokenCache:
    """A vector of each token and head, [B, G, tokens, D] in the model's dtype; see `zeco_train.ops.softmax.cache`.

    Attributes:
        heads: G.
        width: D.
        window: tokens that are kept, the last ones; None: all.
        is_cache: true: a step writes one token, and reads no later ones.
    """

    heads: int
    width: int
    window: int | None
    is_cache = True

    def shape(self, capacity: int | None) -> tuple[int, int, int]:
        """Shape for one sequence of at most `capacity` tokens.

        Raises:
            ValueError: no capacity is given.
        """
        if capacity is None:
            raise ValueError("softmax layers keep keys and values: give the capacity of their caches in tokens")
        return self.heads, capacity if self.window is None else min(self.window, capacity), self.width

    def dtype(self, compute: torch.dtype) -> torch.dtype:
        """Its dtype in a model that computes in `compute`."""
        return compute
