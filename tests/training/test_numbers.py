"""A step's numbers: parts of passes and ranks become one as their declaration says."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.support.distributed import run_distributed
from zeco_train.tracking.metrics import Column, PassNumbers, StepNumbers, T
from zeco_train.training.numbers import PendingNumbers, add, clear, new_totals, over_ranks

pytestmark = pytest.mark.numeric


@dataclass(frozen=True, kw_only=True)
class Numbers(PassNumbers[T]):
    largest: T = field(metadata=Column(across="max"))


def _totals(rank: int, world_size: int) -> list[tuple[float, float]]:
    totals: Numbers[Tensor] = new_totals(Numbers, torch.device("cpu"))
    found = []
    for parts in ([(0.1, -3.0), (0.2, -1.0)], [(0.4, -2.0)]):
        clear(totals)
        for loss, largest in parts:
            add(totals, Numbers(loss=torch.tensor(loss + rank), largest=torch.tensor(largest - rank)))
        # Replayed kernels read and write them where they are; those of a rank stay its own.
        for numbers in (totals, over_ranks(totals)):
            found.append((numbers.loss.item(), numbers.largest.item()))
    return found


def test_parts_are_added_by_their_declaration() -> None:
    zero, one = run_distributed(_totals, 2)
    tenths, ones = (torch.tensor([0.1, 0.2], dtype=torch.float32) + rank for rank in range(2))
    assert zero[0] == (tenths.double().sum().item(), -1.0)
    assert one[0] == (ones.double().sum().item(), -2.0)
    assert zero[1] == one[1] == (zero[0][0] + one[0][0], -1.0)
    assert zero[3] == one[3] == (pytest.approx(1.8), -2.0)


def test_numbers_are_read_by_name() -> None:
    numbers = PendingNumbers([torch.tensor(0.1), torch.tensor(math.inf, dtype=torch.float64)]).read()
    assert numbers == StepNumbers(loss=torch.tensor(0.1).item(), grad_norm=math.inf)
