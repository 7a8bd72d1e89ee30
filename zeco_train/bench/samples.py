"""Statistics of samples: the slowest rank of each run, then median and spread over runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from zeco_train.ops.slow_paths import SlowPath

Row = dict[str, Any]


@dataclass(frozen=True)
class Summary:
    """Times of one variant in ms, by the slowest rank of each run.

    Attributes:
        median, p10, p90, min, max: over the runs; percentiles are interpolated.
        runs: number of runs.
    """

    median: float
    p10: float
    p90: float
    min: float
    max: float
    runs: int

    @classmethod
    def of(cls, by_rank: Sequence[Sequence[float]]) -> Summary:
        """Summarise samples [ranks][runs] in ms.

        Raises:
            ValueError: no samples, or ranks that disagree on the number of runs.
        """
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
