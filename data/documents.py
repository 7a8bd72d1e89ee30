"""Where documents begin and end on one shard of a sequence."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def shard_cu_seqlens(
    doc_offsets: NDArray[np.int64], sequence_start: int, seq_len: int, offset: int, length: int
) -> tuple[Tensor, bool]:
    """The pieces of documents on the shard tokens[sequence_start + offset : sequence_start + offset + length].

    A sequence begins with a fresh state: a document that began before `sequence_start` begins again there.

    Args:
        doc_offsets: [documents + 1] int64, strictly increasing, the borders of the documents in the token stream.
        sequence_start: position of the sequence's first token in the stream.
        seq_len: tokens of the sequence.
        offset: position of the shard's first token in the sequence.
        length: tokens of the shard, at least 1.

    Returns:
        cu_seqlens: [pieces + 1] int64, from 0 to `length`.
        continues: the first piece continues a document that began on an earlier shard of this sequence, be it another
            rank's or one of an earlier segment.
    """
    assert 0 <= offset < offset + length <= seq_len, (offset, length, seq_len)
    start = sequence_start + offset
    first_inside = int(np.searchsorted(doc_offsets, start, side="right"))
    first_beyond = int(np.searchsorted(doc_offsets, start + length, side="left"))
    inside = doc_offsets[first_inside:first_beyond] - start
    continues = offset > 0 and int(doc_offsets[first_inside - 1]) != start
    return torch.from_numpy(np.concatenate(([0], inside, [length])).astype(np.int64)), continues
