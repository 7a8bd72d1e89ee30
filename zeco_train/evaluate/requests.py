"""Texts of any length to be scored, dealt out to all ranks: batched by length, long ones cut in time and over ranks.

A text goes through the model as one sequence, however long it is: a model whose whole past is a state has no longest
input, so nothing is cut off and no window slides.
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
from zeco_train.evaluate.cut import Cut
from zeco_train.training.forward import SequenceForward


@dataclass(frozen=True)
class ScoreRequest:
    """Attributes:
    tokens: [n] int64.
    first: tokens[first:] are scored, each by those before it; ≥ 1.
    """

    tokens: NDArray[np.int64]
    first: int

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """See `Filler`: as an example, a request is a filler without pieces."""
        return self.tokens[start:stop]

    @property
    def example(self) -> Example:
        """What an `ExampleReader` makes shards of."""
        return Example(len(self.tokens) - 1, self, [], [Answer(self.first, len(self.tokens))])


# In place of requests, where a rank has none.
_NOTHING = ScoreRequest(np.zeros(1, dtype=np.int64), 1)


@dataclass(frozen=True)
class Score:
    """Attributes:
    log_likelihood: of the scored tokens, in nats; 0 of none.
    is_greedy: each of them is the model's likeliest.
    """

    log_likelihood: float
    is_greedy: bool


@dataclass(frozen=True)
class _Pack:
    """Requests that go through the model together.

    Attributes:
        numbers: of the requests; empty for one that only keeps ranks in step.
        length: of each sequence, padded.
        segments: in time.
    """

    numbers: list[int]
    length: int
    segments: int


def score(forward: SequenceForward, requests: Sequence[ScoreRequest], batch_tokens: int) -> list[Score]:
    """Score all requests, the same list on every rank; the same scores on every rank. Collective.

    Args:
        forward: of the model.
        requests: in any order.
        batch_tokens: of a rank, padding included, that go through the model at once; bounds memory.
    """
    mesh, device = forward.mesh, forward.mesh.device
    plan = _deal(requests, batch_tokens, mesh.dp_size, mesh.sp_size)
    # Sum of losses, and scored tokens that are not the likeliest.
    found = torch.zeros(len(requests), 2, dtype=torch.float64, device=device)
    for pack in plan[mesh.dp_rank]:
        rows = [requests[number].example for number in pack.numbers] or [_NOTHING.example]
        reader = ExampleReader(rows.__getitem__, len(rows), mesh.split(pack.length, len(rows), segments=pack.segments))
        segments = [reader.read(list(range(len(rows))), segment) for segment in range(pack.segments)]
        for batch, scores in zip(segments, forward.scores(segments, pack.length), strict=True):
            wrong = scores.predictions != batch.labels.to(device)
            both = torch.stack([scores.losses.sum(1, dtype=torch.float64), wrong.sum(1).double()], dim=1)
            # Padding that keeps ranks in step has a row, and no request.
            found[pack.numbers] += both[: len(pack.numbers)]
    dist.all_reduce(found)
    return [Score(-loss, wrong == 0) for loss, wrong in found.tolist()]


def _deal(requests: Sequence[ScoreRequest], batch_tokens: int, dp_size: int, sp_size: int) -> list[list[_Pack]]:
    """The packs of each group of ranks that share sequences; all have as many passes through the model.

    With sharded parameters a pass of one rank is a communication of all.
    """
    order = sorted(range(len(requests)), key=lambda number: -len(requests[number].tokens))
    packs: list[_Pack] = []
    while order:
        # The last token is nobody's input.
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
