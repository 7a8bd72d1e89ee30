"""Positions of shards for tests of operators with states, which read no other rank's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import Exchange


def position_of(
    exchange: Exchange, start: int, stop: int, documents: Sequence[int] | None = None, *, continues: bool = False
) -> SequencePosition:
    """Of the tokens [start, stop); `documents` are the borders of the whole sequence's.

    If the first document `continues` one from before the sequence, the record has one token before it.
    """
    before = int(continues)
    borders = None if documents is None else [[0, *(border + before for border in documents[1:])]]
    seq_len = None if borders is None else borders[0][-1]
    return SequencePosition((start + before, stop + before), seq_len=seq_len, documents=borders, exchange=exchange)
