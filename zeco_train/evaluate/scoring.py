"""Scores texts and examples of any length on all ranks: in batches of one length, segments and shards.

Each text is one sequence, whatever its length: a recurrent model has no maximum input, so there is no truncation and no
sliding window. An answer of an example is right if each of its tokens is the model's first choice given those before.
That equals greedy generation, but takes one forward pass, with the head on the answers' tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from data.loader.batches import Batch, DataSplit
from data.synthetic.tasks import Answer, Example, ExampleReader
from zeco_train.system.numbers import IGNORE_INDEX
from zeco_train.training.forward import SequenceForward


@dataclass(frozen=True)
class Cut:
    """Shape of a batch of segmented sequences."""

    # Of each sequence, padded at its end if it has fewer tokens than shards, which is harmless for a causal model.
    length: int
    segments: int
    batch: int

    @classmethod
    def of(cls, length: int, sp_size: int, least_segments: int, tokens: int) -> Cut:
        """The cut with the fewest segments, a multiple of `least_segments`, and then the largest batch.

        A rank has at most `tokens` in a forward pass.
        """
        least = sp_size * least_segments
        times = -(-length // (least * tokens))
        longest = -(-length // (least * times))
        return cls(max(length, least * times), least_segments * times, tokens // longest)


@dataclass(frozen=True)
class ScoreRequest:
    """A text [n] int64 whose tokens from `first` ≥ 1 on are scored, each given those before it."""

    tokens: NDArray[np.int64]
    first: int

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [start, stop): as an example, a request is a filler without pieces."""
        return self.tokens[start:stop]

    @property
    def example(self) -> Example:
        """The request as an example, to be sharded by `ExampleReader`."""
        return Example(len(self.tokens) - 1, self, [], [Answer(self.first, len(self.tokens))])


# Padding for a rank without requests.
_NOTHING = ScoreRequest(np.zeros(1, dtype=np.int64), 1)


class Score(NamedTuple):
    """Result of a request."""

    log_likelihood: float  # sum over the scored tokens, in nats
    is_greedy: bool  # every scored token is the model's likeliest


def _read(examples: Sequence[Example], split: DataSplit) -> list[Batch]:
    reader = ExampleReader(examples.__getitem__, len(examples), split)
    return [reader.read(list(range(len(examples))), segment) for segment in range(split.segments)]


def score(forward: SequenceForward, requests: Sequence[ScoreRequest], batch_tokens: int) -> list[Score]:
    """Score all requests; takes the same list and returns the same scores on every rank. Collective.

    A rank has at most `batch_tokens` in a forward pass, padding included, which bounds memory.
    """
    mesh, device = forward.mesh, forward.mesh.device
    plan = _deal(requests, batch_tokens, mesh.dp_size, mesh.sp_size)
    # Sum of losses, and number of scored tokens that are not the likeliest.
    found = torch.zeros(len(requests), 2, dtype=torch.float64, device=device)
    for numbers, cut in plan[mesh.dp_rank]:
        rows = [requests[number].example for number in numbers] or [_NOTHING.example]
        segments = _read(rows, mesh.split(cut.length, len(rows), segments=cut.segments))
        for batch, scores in zip(segments, forward.scores(segments), strict=True):
            wrong = scores.predictions != batch.labels.to(device)
            both = torch.stack([scores.losses.sum(1, dtype=torch.float64), wrong.sum(1).double()], dim=1)
            # A padding batch has a row but no request.
            found[numbers] += both[: len(numbers)]
    dist.all_reduce(found)
    return [Score(-loss, wrong == 0) for loss, wrong in found.tolist()]


def _deal(
    requests: Sequence[ScoreRequest], batch_tokens: int, dp_size: int, sp_size: int
) -> list[list[tuple[list[int], Cut]]]:
    # Batches, of the numbers of their requests, for each group of ranks that share sequences. The groups have equally
    # many forward passes: with sharded parameters, every one is collective over all ranks.
    # Longest first: a batch has the length of its first request, so similar lengths need little padding.
    order = sorted(range(len(requests)), key=lambda number: -len(requests[number].tokens))
    plan: list[list[tuple[list[int], Cut]]] = [[] for _ in range(dp_size)]
    passes = [0] * dp_size
    while order:
        # The last token is never an input.
        cut = Cut.of(max(len(requests[order[0]].tokens) - 1, 1), sp_size, 1, batch_tokens)
        least = passes.index(min(passes))
        plan[least].append((order[: cut.batch], cut))
        passes[least] += cut.segments
        order = order[cut.batch :]
    for own, done in zip(plan, passes, strict=True):
        own += [([], Cut(sp_size, 1, 1))] * (max(passes) - done)
    return plan


@dataclass(frozen=True)
class Scores:
    """Scores of examples, the same on all ranks."""

    right: Tensor  # [examples, answers] bool
    losses: Tensor  # [examples] fp64, mean loss of the answers' tokens in nats


def score_examples(
    examples: Sequence[Callable[[], Example]], forward: SequenceForward, cut: Cut, enter: Callable[[str], None]
) -> Scores:
    """Score examples, distributed over the data-parallel ranks. Collective.

    Args:
        examples: functions that generate them; all have the length of `cut` and the same number of answers.
        enter: sets the name of this rank's current phase.
    """
    mesh = forward.mesh
    wrong = torch.zeros(len(examples), len(examples[0]().answers), dtype=torch.int64)
    losses = torch.zeros(len(examples), 2, dtype=torch.float64)
    # At most a rank's share, so that few examples still occupy all data-parallel ranks.
    batch = min(cut.batch, -(-len(examples) // mesh.dp_size))
    split = mesh.split(cut.length, batch, segments=cut.segments)
    for start in range(0, len(examples), batch * mesh.dp_size):
        enter(f"{cut.length} tokens, example {start + 1} of {len(examples)}")
        own = range(start + mesh.dp_rank * batch, min(start + (mesh.dp_rank + 1) * batch, len(examples)))
        # A rank without examples still takes part in the collectives.
        made = [examples[number]() for number in own] or [examples[0]()]
        segments = _read(made, split)
        for part, scores in zip(segments, forward.scores(segments), strict=True):
            is_wrong = scores.predictions.cpu() != part.labels
            own_losses = scores.losses.double().sum(1).cpu()
            for row, number in enumerate(own):
                wrong[number] += _by_answer(is_wrong[row], made[row], part.position.start)
                losses[number] += torch.stack([own_losses[row], (part.labels[row] != IGNORE_INDEX).sum()])
    wrong, losses = wrong.to(mesh.device), losses.to(mesh.device)
    # Over the shards of a sequence, too: an answer's tokens may lie on two ranks.
    dist.all_reduce(wrong)
    dist.all_reduce(losses)
    return Scores((wrong == 0).cpu(), (losses[:, 0] / losses[:, 1]).cpu())


def _by_answer(is_wrong: Tensor, example: Example, offset: int) -> Tensor:
    # Number of wrong tokens per answer on this shard, [answers]; is_wrong [T] is of the labels from `offset` on.
    total = torch.cat([torch.zeros(1, dtype=torch.int64), is_wrong.cumsum(0)])
    # − 1: the token at position p is the label of the input before it.
    borders = torch.tensor([[answer.start, answer.stop] for answer in example.answers]) - 1 - offset
    before, after = total[borders.clamp(0, len(is_wrong))].unbind(1)
    return after - before
