"""Comparisons of runs by tests and scripts: a value that is not finite fails, wherever it stands."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.many_starts import Result as ManyResult
from lab.many_starts import table
from tests.support.steps import Result, check
from tests.support.training import largest_difference
from zeco_train.tracking.metrics import LineWriter, read_metrics

GOOD = Result(
    losses=[2.0, 1.0],
    norms=[0.5, 0.25],
    gradients={"first": torch.ones(2), "second": torch.ones(2)},
    parameters={"first": torch.ones(2), "second": torch.ones(2)},
    val_loss=1.5,
)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_steps_with_a_value_that_is_not_finite_differ(place: int, value: float) -> None:
    """In a loss, a norm, a gradient or a parameter, of the result, of what is expected, or of both."""
    check(GOOD, GOOD, 0.0, "equal")
    for name in ("losses", "norms", "gradients", "parameters"):
        held = getattr(GOOD, name)
        if isinstance(held, list):
            wrong = replace(GOOD, **{name: [value if i == place else x for i, x in enumerate(held)]})
        else:
            broken = list(held)[place]
            wrong = replace(GOOD, **{name: {**held, broken: torch.tensor([1.0, value])}})
        for result, expected in ((wrong, GOOD), (GOOD, wrong), (wrong, wrong)):
            with pytest.raises(AssertionError, match=f"{name} off by"):
                check(result, expected, 1e9, "")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_rows_with_a_value_that_is_not_finite_differ(place: int, value: float, tmp_path: Path) -> None:
    """As a run has them, and as they are read back, where such a value is None."""
    good = [{"step": step, "loss": 2.0} for step in (1, 2)]
    wrong = [row | ({"loss": value} if index == place else {}) for index, row in enumerate(good)]
    with LineWriter(tmp_path / "metrics.jsonl") as writer:
        for row in wrong:
            writer.append(row)
    assert largest_difference(good, good, "loss") == 0.0
    for rows in (wrong, read_metrics(tmp_path / "metrics.jsonl")):
        assert not largest_difference(rows, good, "loss") <= 1e9
        assert not largest_difference(good, rows, "loss") <= 1e9
        assert not largest_difference(rows, rows, "loss") <= 1e9


def test_table_of_many_starts_shows_a_nan_of_a_later_run() -> None:
    runs = [ManyResult("random", number, "zeco", "", error, 1.0) for number, error in ((1, 1e-12), (2, math.nan))]
    assert all(" nan " in line for line in table(runs).splitlines()[1:])
