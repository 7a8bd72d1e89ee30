"""More invalid records of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tracking import test_records as gate
from tests.tracking.test_records import HUGE, finished, run
from zeco_train.tracking.charts import VALIDATION_FILE
from zeco_train.tracking.metrics import STARTS_FILE

# Fixtures.
__all__ = ["finished", "run"]
pytestmark = pytest.mark.campaign


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("loss", "\x1b[31m", r"'\x1b[31m', not a number"),
        ("loss", True, "True, not a number"),
        pytest.param("loss", HUGE, "1000000", id="loss-huge"),
        ("tokens_per_second", "fast", "'fast', not a number"),
        ("step", None, "None, not a whole number from 0"),
        ("step", -1, "-1, not a whole number"),
        ("step", True, "True, not a whole number"),
        pytest.param("step", HUGE, "1000000", id="step-huge"),
    ],
)
def test_metric_of_wrong_type_is_refused(field: str, value: object, shown: str, run: Path) -> None:
    gate.test_metric_of_wrong_type_is_refused(field, value, shown, run)


@pytest.mark.parametrize(
    ("file", "values", "problem"),
    [
        (STARTS_FILE, {"seq_len": "64"}, "line 1: seq_len is '64', not a whole number from 1 to "),
        (STARTS_FILE, {"environment": []}, "line 1: environment is [], not an object"),
        (VALIDATION_FILE, {"step": "1"}, "line 1: step is '1', not a whole number"),
        (VALIDATION_FILE, {"by_position": {"edges": [0, 1]}}, "line 1: by_position: losses is not a list of 1 numbers"),
        (VALIDATION_FILE, {"by_position": {"edges": [1, 0]}}, "line 1: by_position: edges do not increase"),
        (
            VALIDATION_FILE,
            {"by_position": {"edges": [0, 1], "losses": ["a"], "errors": [None]}},
            "line 1: by_position: losses has a value that is neither a number nor null",
        ),
    ],
)
def test_invalid_starts_and_validation_records_are_refused(
    file: str, values: dict[str, object], problem: str, run: Path
) -> None:
    gate.test_invalid_starts_and_validation_records_are_refused(file, values, problem, run)
