"""Cuts sequences of any length into segments, to bound the tokens per rank and forward pass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """Shape of a batch of segmented sequences.

    Attributes:
        length: of each sequence, padded at its end if it has fewer tokens than shards, which is harmless for a causal
            model.
        segments: parts in time.
        batch: sequences per forward pass.
    """

    length: int
    segments: int
    batch: int

    @classmethod
    def of(cls, length: int, sp_size: int, least_segments: int, tokens: int) -> Cut:
        """The cut with the fewest segments, and then the largest batch, within a limit of tokens.

        Args:
            length: of the sequences.
            sp_size: ranks that share a sequence.
            least_segments: the number of segments is a multiple of this.
            tokens: maximum per rank and forward pass.
        """
        least = sp_size * least_segments
        times = -(-length // (least * tokens))
        longest = -(-length // (least * times))
        return cls(max(length, least * times), least_segments * times, tokens // longest)
