"""More mistakes in settings of synthetic tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluate import test_synthetic as gate
from tests.evaluate.test_synthetic import run

# Fixtures.
__all__ = ["run"]
pytestmark = pytest.mark.campaign


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["recall.lengths=[64]", "train.segments=65"], "recall.lengths=64: must be ≥ 65: "),
        (["recall.examples=0"], "recall.examples=0: must be ≥ 1"),
        (["recall.alphabet=200"], "recall.alphabet=200: must be from 1 to 127"),
        (["recall.digits=3"], "recall.digits=3: is not for recall, but for needle"),
        (["--tasks=validation"], "--tasks=validation: data=synthetic holds no text out; take --tasks=recall"),
    ],
)
def test_invalid_task_settings_are_reported(run: Path, arguments: list[str], expected: str) -> None:
    gate.test_invalid_task_settings_are_reported(run, arguments, expected)
