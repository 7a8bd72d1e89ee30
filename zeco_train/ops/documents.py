"""State restarts inside a rank's tokens, for packed documents (docs/mathematics.md).

The data loader gives the documents' borders (`zeco_train.ops.position`); operators take them as *document ids*, [T]
int32 on the device of the tokens: the number of restarts through each token. A restart at token t means that t sees
nothing before itself, so tokens of equal numbers may see each other, and those of number 0 the state before the shard.
For several sequences in a batch they are [B, T].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def find_doc_ids(cu_seqlens: Tensor | None, before: int, num_tokens: int, device: torch.device) -> Tensor | None:
    """Count the restarts through each token.

    There is one at the first token of every piece, except a first piece that continues a document.

    Args:
        cu_seqlens: [D + 1] integers from 0 to `num_tokens`, non-decreasing; equal neighbours are empty documents and
            are ignored. None: one document without restarts, whatever `before` is.
        before: tokens of the first piece's document before these tokens; the piece is a continuation if it is not 0.
        num_tokens: T, the number of tokens on this rank.
        device: of the tokens.

    Returns:
        [T] int32, or None where `cu_seqlens` is None.

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
    # The last border starts no document, nor do empty documents at the end.
    starts = borders[borders < num_tokens]
    restarts[starts[starts > 0] if before else starts] = True
    return restarts.to(device).cumsum(0, dtype=torch.int32)


def stack_borders(rows: Sequence[Tensor]) -> Tensor:
    """The borders of the documents of each sequence of a batch, as softmax attention takes them.

    Args:
        rows: [documents + 1] int64 of each, rising to the same length.

    Returns:
        [B, documents + 1], those with fewer followed by empty documents; of one sequence [documents + 1].
    """
    if len(rows) == 1:
        return rows[0]
    most = max(map(len, rows))
    return torch.stack([torch.cat([row, row[-1:].expand(most - len(row))]) for row in rows])


def find_restarts(doc_ids: Tensor) -> Tensor:
    """[T] bool: the tokens at which the state restarts."""
    return doc_ids.diff(prepend=doc_ids.new_zeros(1)) > 0


def doc_ids_between(doc_ids: Tensor | None, start: int, stop: int) -> Tensor | None:
    """The doc_ids of the tokens [start, stop), counted from `start`."""
    if doc_ids is None or start == 0:
        return None if doc_ids is None else doc_ids[:stop]
    return doc_ids[start:stop] - doc_ids[start - 1]


def _shorten(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"{values[:4]} … {values[-4:]} ({len(values)} values)"
