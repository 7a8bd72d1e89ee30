"""State restarts inside a rank's tokens, for packed documents (docs/mathematics.md).

The data loader gives the documents' borders (`zeco_train.ops.position`); operators take them as *document ids*, [T]
int32, or [B, T], on the device of the tokens: the number of restarts through each token. A token with a restart sees
nothing before itself, so tokens of equal numbers may see each other, and those of number 0 the state before the shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def checked_borders(name: str, borders: Tensor | Sequence[int], end: int) -> Tensor:
    """Borders of documents as [D + 1] int64 on the CPU; a ValueError if they do not rise from 0 to `end`."""
    found = torch.as_tensor(borders)
    if found.dim() != 1 or found.numel() < 2 or found.is_floating_point():
        shape = f"shape {list(found.shape)} of {found.dtype}"
        raise ValueError(f"{name}: expected a list of at least two integers, got {shape}")
    found = found.to(device="cpu", dtype=torch.int64)
    if found[0] != 0 or found[-1] != end or bool((found.diff() < 0).any()):
        raise ValueError(f"{name}: expected borders that rise from 0 to {end}, got {shortened(found.tolist())}")
    return found


def shortened(values: Sequence[int]) -> str:
    """A list for a message: of more than 8 values the first and the last 4."""
    listed = [*values]
    return str(listed) if len(listed) <= 8 else f"{listed[:4]} … {listed[-4:]} ({len(listed)} values)"


def find_doc_ids(cu_seqlens: Tensor | None, before: int, num_tokens: int, device: torch.device) -> Tensor | None:
    """Count the restarts through each token, [T] int32; None where `cu_seqlens` is None, one document without restarts.

    Args:
        cu_seqlens: [D + 1] integers that rise from 0 to T; equal neighbours are empty documents.
        before: tokens of the first piece's document before these tokens; the piece continues it if it is not 0.
        num_tokens: T, on this rank.
        device: of the tokens.
    """
    if cu_seqlens is None:
        return None
    borders = checked_borders("cu_seqlens", cu_seqlens, num_tokens)
    restarts = torch.zeros(num_tokens, dtype=torch.bool)
    # The last border starts no document, nor do empty documents at the end.
    starts = borders[borders < num_tokens]
    restarts[starts[starts > 0] if before else starts] = True
    return restarts.to(device).cumsum(0, dtype=torch.int32)


def stack_borders(rows: Sequence[Tensor]) -> Tensor:
    """[B, documents + 1]: those with fewer documents end with empty ones; of one sequence [documents + 1]."""
    if len(rows) == 1:
        return rows[0]
    most = max(map(len, rows))
    return torch.stack([torch.cat([row, row[-1:].expand(most - len(row))]) for row in rows])


def find_restarts(doc_ids: Tensor) -> Tensor:
    """[T] bool: the tokens at which the state restarts."""
    return doc_ids.diff(prepend=doc_ids.new_zeros(1)) > 0
