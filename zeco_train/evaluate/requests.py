"""Scores texts of any length on all ranks: batched by length, long texts cut into segments and sharded over ranks.

Each text is one sequence, whatever its length: a recurrent model has no maximum input, so there is no truncation and no
sliding window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from data.synthetic.example import Answer, Example
from data.synthetic.source import ExampleReader
from zeco_train.training.forward import SequenceForward


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


@dataclass(frozen=True)
class ScoreRequest:
    """A text whose last tokens are scored.

    Attributes:
        tokens: [n] int64.
        first: tokens[first:] are scored, each given those before it; ≥ 1.
    """

    tokens: NDArray[np.int64]
    first: int

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """See `Filler`: as an example, a request is a filler without pieces."""
        return self.tokens[start:stop]

    @property
    def example(self) -> Example:
        """The request as an example, to be sharded by `ExampleReader`."""
        return Example(len(self.tokens) - 1, self, [], [Answer(self.first, len(self.tokens))])


# Padding for a rank without requests.
_NOTHING = ScoreRequest(np.zeros(1, dtype=np.int64), 1)


@dataclass(frozen=True)
class Score:
    """Result of a request.

    Attributes:
        log_likelihood: sum over the scored tokens, in nats.
        is_greedy: whether every scored token is the model's likeliest.
    """

    log_likelihood: float
    is_greedy: bool


@dataclass(frozen=True)
class _Pack:
    """A batch of requests.

    Attributes:
        numbers: of the requests; empty for a padding batch, which only keeps ranks in step.
        length: of each sequence, padded.
        segments: in time.
    """

    numbers: list[int]
    length: int
    segments: int


def score(forward: SequenceForward, requests: Sequence[ScoreRequest], batch_tokens: int) -> list[Score]:
    """Score all requests; takes the same list and returns the same scores on every rank. Collective.

    Args:
        forward: of the model.
        requests: in any order.
        batch_tokens: maximum tokens per rank and forward pass, padding included; bounds memory.
    """
    mesh, device = forward.mesh, forward.mesh.device
    plan = _deal(requests, batch_tokens, mesh.dp_size, mesh.sp_size)
    # Sum of losses, and number of scored tokens that are not the likeliest.
    found = torch.zeros(len(requests), 2, dtype=torch.float64, device=device)
    for pack in plan[mesh.dp_rank]:
        rows = [requests[number].example for number in pack.numbers] or [_NOTHING.example]
        reader = ExampleReader(rows.__getitem__, len(rows), mesh.split(pack.length, len(rows), segments=pack.segments))
        segments = [reader.read(list(range(len(rows))), segment) for segment in range(pack.segments)]
        for batch, scores in zip(segments, forward.scores(segments), strict=True):
            wrong = scores.predictions != batch.labels.to(device)
            both = torch.stack([scores.losses.sum(1, dtype=torch.float64), wrong.sum(1).double()], dim=1)
            # A padding batch has a row but no request.
            found[pack.numbers] += both[: len(pack.numbers)]
    dist.all_reduce(found)
    return [Score(-loss, wrong == 0) for loss, wrong in found.tolist()]


def _deal(requests: Sequence[ScoreRequest], batch_tokens: int, dp_size: int, sp_size: int) -> list[list[_Pack]]:
    """Distribute packs over the groups of ranks that share sequences, with equally many forward passes each.

    With sharded parameters, every forward pass is collective over all ranks.
    """
    # Longest first: a pack has the length of its first request, so similar lengths need little padding.
    order = sorted(range(len(requests)), key=lambda number: -len(requests[number].tokens))
    packs: list[_Pack] = []
    while order:
        # The last token is never an input.
        longest = max(len(requests[order[0]].tokens) - 1, 1)
        cut = Cut.of(longest, sp_size, 1, batch_tokens)
        packs.append(_Pack(order[: cut.batch], cut.length, cut.segments))
        order = order[cut.batch :]
    plan: list[list[_Pack]] = [[] for _ in range(dp_size)]
    passes = [0] * dp_size
    for pack in packs:
        least = passes.index(min(passes))
        plan[least].append(pack)
        passes[least] += pack.segments
    for own, done in zip(plan, passes, strict=True):
        own += [_Pack([], sp_size, 1)] * (max(passes) - done)
    return plan
