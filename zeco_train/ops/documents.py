"""Where the state restarts inside a rank's tokens, for packed documents (DESIGN, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """The restarts of one rank. A restart at token t means that t sees nothing before itself: its decay is 0.

    Attributes:
        restarts: [T] bool, true at the first token of every piece of a document on this rank, but for the first piece
            where that continues a document of the rank before.
        pieces: [T] int32, the number of restarts through each token: equal for tokens that may see each other.
    """

    restarts: Tensor
    pieces: Tensor

    @classmethod
    def from_restarts(cls, restarts: Tensor) -> Documents:
        """Count the restarts, [T] bool."""
        return cls(restarts, restarts.cumsum(0, dtype=torch.int32))

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Tensor | None, continues: bool, num_tokens: int, device: torch.device
    ) -> Documents | None:
        """Find the restarts of `num_tokens` tokens.

        Args:
            cu_seqlens: [D + 1] integers from 0 to `num_tokens`, never falling; equal neighbours are empty pieces and
                mean nothing. None: one document, in which nothing restarts, whatever `continues` says.
            continues: whether the first piece continues a document from before these tokens.
            num_tokens: T, the number of tokens on this rank.
            device: where the tokens are.

        Returns:
            The restarts, or None where `cu_seqlens` is None.

        Raises:
            ValueError: `cu_seqlens` is not such a list of borders.
        """
        if cu_seqlens is None:
            return None
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.is_floating_point():
            raise ValueError(
                f"cu_seqlens: expected a list of at least two integers, got shape {list(cu_seqlens.shape)} "
                f"of {cu_seqlens.dtype}"
            )
        borders = cu_seqlens.to(device="cpu", dtype=torch.int64)
        if borders[0] != 0 or borders[-1] != num_tokens or bool((borders.diff() < 0).any()):
            raise ValueError(
                f"cu_seqlens: expected borders that rise from 0 to {num_tokens}, got {_shorten(borders.tolist())}"
            )
        restarts = torch.zeros(num_tokens, dtype=torch.bool)
        starts = borders[borders < num_tokens]
        restarts[starts[starts > 0] if continues else starts] = True
        return cls.from_restarts(restarts.to(device))


def _shorten(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"{values[:4]} … {values[-4:]} ({len(values)} values)"
