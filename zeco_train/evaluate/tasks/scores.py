"""Scores a model's answers: an answer is right if each of its tokens is the model's first choice given those before.

This equals greedy generation, but takes one forward pass, with the head on the answers' tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from data.synthetic.example import Example
from data.synthetic.source import ExampleReader
from zeco_train.evaluate.requests import Cut
from zeco_train.system.numbers import IGNORE_INDEX
from zeco_train.training.forward import SequenceForward


@dataclass(frozen=True)
class Scores:
    """Scores of examples, the same on all ranks.

    Attributes:
        right: [examples, answers] bool.
        losses: [examples] fp64, mean loss of the answers' tokens in nats.
    """

    right: Tensor
    losses: Tensor


def score(
    examples: Sequence[Callable[[], Example]],
    num_answers: int,
    forward: SequenceForward,
    cut: Cut,
    enter: Callable[[str], None],
) -> Scores:
    """Score examples, distributed over the data-parallel ranks. Collective.

    Args:
        examples: functions that generate them; all have the same length and `num_answers` answers.
        num_answers: of each example.
        forward: of the model.
        cut: of that length.
        enter: sets the name of this rank's current phase.
    """
    mesh = forward.mesh
    wrong = torch.zeros(len(examples), num_answers, dtype=torch.int64)
    losses = torch.zeros(len(examples), 2, dtype=torch.float64)
    # At most a rank's share, so that few examples still occupy all data-parallel ranks.
    batch = min(cut.batch, -(-len(examples) // mesh.dp_size))
    split = mesh.split(cut.length, batch, segments=cut.segments)
    for start in range(0, len(examples), batch * mesh.dp_size):
        enter(f"{cut.length} tokens, example {start + 1} of {len(examples)}")
        own = range(start + mesh.dp_rank * batch, min(start + (mesh.dp_rank + 1) * batch, len(examples)))
        # A rank without examples still takes part in the collectives.
        made = [examples[number]() for number in own] or [examples[0]()]
        reader = ExampleReader(made.__getitem__, len(made), split)
        segments = [reader.read(list(range(len(made))), segment) for segment in range(cut.segments)]
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
    """Number of wrong tokens per answer on this shard, [answers]; is_wrong [T] is of the labels from `offset` on."""
    total = torch.cat([torch.zeros(1, dtype=torch.int64), is_wrong.cumsum(0)])
    # − 1: the token at position p is the label of the input before it.
    borders = torch.tensor([[answer.start, answer.stop] for answer in example.answers]) - 1 - offset
    before, after = total[borders.clamp(0, len(is_wrong))].unbind(1)
    return after - before
