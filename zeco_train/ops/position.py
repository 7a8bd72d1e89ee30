"""Where the tokens of a rank lie in their sequence.

The data loader makes one `SequencePosition` for each segment of a micro-batch, and every layer gets it; only the custom
ops (`zeco_train.ops.mix`, `zeco_train.ops.attend`) take parts of it, as tensors where they change from batch to batch.

It has the borders of packed documents, at which states restart (docs/mathematics.md). Operators take them as *document
ids*, [T] int32, or [B, T], on the device of the tokens: the number of restarts through each token. A token with a
restart sees nothing before itself, so tokens of equal numbers may see each other, and those of number 0 the state
before the shard.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from zeco_train.ops.seam import Exchange

_CPU = torch.device("cpu")


class SequencePosition:
    """Where the tokens of a rank lie in their sequence: a frozen record.

    The ranks that share a sequence have consecutive tokens of it, at least one each; their numbers may differ. A
    sequence may be cut in time into segments, each over all those ranks.

    Raises:
        ValueError: the bounds fall or leave the sequence, or documents' borders do not rise from 0 to `seq_len`.
    """

    # Not a dataclass: FSDP2 copies those among a module's inputs.
    bounds: tuple[int, ...]  # P + 1 positions: rank r has the tokens [bounds[r], bounds[r + 1]) of the segment
    rank: int  # from 0 to P − 1
    seq_len: int  # tokens of the whole sequence
    # For each sequence of the batch the borders of all its documents, [documents + 1] int64 on the CPU, from 0 to
    # `seq_len`; equal neighbours are empty documents. None: each sequence is one document.
    documents: tuple[Tensor, ...] | None
    segment: int  # from 0
    num_segments: int
    exchange: Exchange | None  # connects the ranks; None as the loader makes the record, see `over`
    handle: Tensor | None  # of the exchange, on the CPU before `on`
    borders: Tensor | None  # `documents` in one tensor, see `stack_borders`
    # On the tokens' device, made by `on`: [T] int32, of a batch of several sequences [B, T], see `find_doc_ids`, or
    # None without documents; and [T] int64, positions in the sequence, if wanted.
    doc_ids: Tensor | None
    positions: Tensor | None

    def __init__(
        self,
        bounds: Sequence[int],
        rank: int = 0,
        *,
        seq_len: int | None = None,
        documents: Sequence[Tensor | Sequence[int]] | None = None,
        segment: int = 0,
        num_segments: int = 1,
        exchange: Exchange | None = None,
    ) -> None:
        seq_len = bounds[-1] if seq_len is None else seq_len
        # Tensors made in inference mode could not be saved for a backward pass later.
        with torch.inference_mode(False):
            rows = None
            if documents is not None:
                rows = tuple(checked_borders("documents", borders, seq_len) for borders in documents)
        rises = all(start <= stop for start, stop in itertools.pairwise((0, *bounds, seq_len)))
        if not (0 <= rank < len(bounds) - 1 and rises):
            raise ValueError(f"bounds: rank {rank} of {shortened(bounds)}, which must rise within 0 to {seq_len}")
        vars(self).update(
            bounds=tuple(bounds),
            rank=rank,
            seq_len=seq_len,
            documents=rows,
            borders=None if rows is None else stack_borders(rows),
            segment=segment,
            num_segments=num_segments,
            exchange=exchange,
            handle=None if exchange is None else exchange.handle(_CPU),
            doc_ids=None,
            positions=None,
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: a position is frozen")

    @property
    def start(self) -> int:
        """Position of this rank's first token in the whole sequence."""
        return self.bounds[self.rank]

    @property
    def stop(self) -> int:
        """Position after this rank's last token."""
        return self.bounds[self.rank + 1]

    @property
    def num_tokens(self) -> int:
        """T, tokens of this rank."""
        return self.stop - self.start

    def cu_seqlens(self, row: int = 0) -> Tensor | None:
        """[parts + 1] int64, borders of the documents' parts on this rank, from 0 to T; None without documents."""
        if self.documents is None:
            return None
        borders = self.documents[row]
        inner = borders[(borders > self.start) & (borders < self.stop)] - self.start
        return torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), self.num_tokens)])

    def before(self, row: int = 0) -> int:
        """Tokens of the first token's document (without documents: of the sequence) on earlier ranks and segments."""
        if self.documents is None:
            return self.start
        borders = self.documents[row]
        return self.start - int(borders[borders <= self.start].max())

    def over(self, exchange: Exchange) -> Self:
        """The same with what connects the ranks."""
        return self._replaced(exchange=exchange, handle=exchange.handle(_CPU))

    def with_tensors(self, doc_ids: Tensor | None, positions: Tensor) -> Self:
        """The same for tokens whose documents only `doc_ids` describes, on their device."""
        return self._replaced(doc_ids=doc_ids, positions=positions, documents=None, borders=None)

    def on(self, tokens: Tensor, *, with_positions: bool = False) -> Self:
        """The same with `handle`, `doc_ids`, and `positions` if wanted, on the device of the tokens [B, T, ...].

        With documents this copies to the device, which synchronises with CUDA, so call it once for all layers. A
        ValueError says that the record is of another number of tokens or sequences.
        """
        batch, num_tokens = tokens.shape[:2]
        if num_tokens != self.num_tokens:
            raise ValueError(f"position: of {self.num_tokens} tokens, {self.start} to {self.stop}, not {num_tokens}")
        if self.documents is not None and len(self.documents) != batch:
            raise ValueError(f"position: has the documents of {len(self.documents)} sequences, not of {batch}")
        doc_ids, positions = self.doc_ids, self.positions
        if doc_ids is None and self.documents is not None:
            rows = [self._doc_ids_of(row, tokens.device) for row in range(batch)]
            doc_ids = rows[0] if batch == 1 else torch.stack(rows)
        if positions is None and with_positions:
            positions = torch.arange(self.start, self.stop, device=tokens.device)
        handle = None if self.exchange is None else self.exchange.handle(tokens.device)
        return self._replaced(doc_ids=doc_ids, positions=positions, handle=handle)

    def _doc_ids_of(self, row: int, device: torch.device) -> Tensor:
        found = find_doc_ids(self.cu_seqlens(row), self.before(row), self.num_tokens, device)
        assert found is not None, "only without documents"
        return found

    def _replaced(self, **changes: object) -> Self:
        found = copy.copy(self)
        vars(found).update(changes)
        return found


def even_bounds(seq_len: int, parts: int, first: int = 0, stop: int | None = None) -> list[int]:
    """Borders of the parts [first, stop) of a sequence in `parts` parts, whose lengths differ by at most one token."""
    return [seq_len * part // parts for part in range(first, (parts if stop is None else stop) + 1)]


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
