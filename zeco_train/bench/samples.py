"""Statistics of samples, by the slowest rank of each run; and correctness checks before timing, relative to float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from zeco_train.errors import ZecoError
from zeco_train.ops.slow_paths import SlowPath
from zeco_train.system.numbers import relative_error

Row = dict[str, Any]


@dataclass(frozen=True)
class Summary:
    """Times of one variant in ms, by the slowest rank of each run; percentiles are interpolated."""

    median: float
    p10: float
    p90: float
    min: float
    max: float
    runs: int

    @classmethod
    def of(cls, by_rank: Sequence[Sequence[float]]) -> Summary:
        """Summarise samples [ranks][runs] in ms; raises `ValueError` without any, or if numbers differ."""
        slowest = slowest_rank(by_rank)
        p10, median, p90 = (float(np.percentile(slowest, q)) for q in (10, 50, 90))
        return cls(median, p10, p90, min(slowest), max(slowest), len(slowest))

    def as_row(self) -> Row:
        """Fields by their names in results.json."""
        return {name if name == "runs" else f"{name}_ms": value for name, value in asdict(self).items()}


def marked(row: Row, slow: Sequence[SlowPath]) -> Row:
    """The row, noting what of it ran in PyTorch instead of kernels."""
    notes = [f"{path.call} in PyTorch, {path.cost}" for path in slow]
    return {**row, "note": "; ".join(filter(None, [row.get("note"), *notes]))} if notes else row


def slowest_rank(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Each run's time on its slowest rank: [ranks][runs] → [runs]."""
    if not by_rank or not by_rank[0]:
        raise ValueError("no samples")
    return [max(run) for run in zip(*by_rank, strict=True)]


class WrongResultError(ZecoError):
    """A variant to be timed computes a wrong result; `reason` is the message without the variant."""

    exit_code = 8

    def __init__(self, variant: str, rank: int, result: str, error: float, tolerance: float) -> None:
        self.reason = f"{result} on rank {rank} has a relative error of {error:.2g}, allowed are {tolerance:.0e}"
        super().__init__(f"{variant} is wrong, nothing is timed: {self.reason}")


def check_results(
    variant: str, rank: int, results: Mapping[str, tuple[Tensor, Tensor]], tolerance: float
) -> dict[str, float]:
    """Errors of `{name: (found, expected)}`; raises `WrongResultError` for the first above the tolerance, or NaN."""
    errors = {name: relative_error(found, expected) for name, (found, expected) in results.items()}
    for name, error in errors.items():
        # Not `error > tolerance`, which is false for NaN.
        if not error <= tolerance:
            raise WrongResultError(variant, rank, name, error, tolerance)
    return errors


def gradient_norms(found: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Two vectors with the same relative difference as gradients sharded over all ranks. Collective."""
    squares = torch.zeros(2, dtype=torch.float64, device=found[0].device)
    for one, other in zip(found, expected, strict=True):
        squares += torch.stack([(one - other).double().square().sum(), other.double().square().sum()])
    dist.all_reduce(squares)
    difference, norm = squares.sqrt().cpu()
    return torch.stack([norm, difference]), torch.stack([norm, torch.zeros_like(norm)])
