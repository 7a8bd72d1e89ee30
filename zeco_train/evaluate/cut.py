"""How sequences of any length are cut in time, so that a rank has no more tokens at once than it is to have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """How sequences are cut.

    Attributes:
        length: of each, padded at its end: nothing before a token knows of what follows.
        segments: equal parts in time, each with equal shards.
        batch: sequences at once.
    """

    length: int
    segments: int
    batch: int

    @classmethod
    def of(cls, length: int, sp_size: int, least_segments: int, tokens: int) -> Cut:
        """The fewest segments, a multiple of `least_segments`, that leave a rank at most `tokens` tokens at once, and
        as many sequences as that takes.
        """
        least = sp_size * least_segments
        times = -(-length // (least * tokens))
        shard = -(-length // (least * times))
        return cls(shard * least * times, least_segments * times, tokens // shard)
