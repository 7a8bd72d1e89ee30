"""More mistakes about tasks and unmasked models."""

from __future__ import annotations

import pytest

from tests.config import test_task as gate
from tests.config.test_task import MASKED, unmasked

# A fixture.
__all__ = ["unmasked"]
pytestmark = pytest.mark.campaign


@pytest.mark.usefixtures("unmasked")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.causal=false"], "model.causal=false: the model would read the token to predict; take task=mlm"),
        (
            [*MASKED, "train.segments=2"],
            "train.segments=2: an unmasked model reads the whole sequence at once; must be 1 with model.causal=false",
        ),
        (
            [*MASKED, "data.reset_state_at_document=true"],
            "data.reset_state_at_document=true: an unmasked model reads the whole sequence; "
            "must be false with model.causal=false",
        ),
        (["task.mask_fraction=0.2"], "task.mask_fraction=0.2: would be ignored; it needs task=mlm"),
        ([*MASKED, "task.mask_token=-1"], "task.mask_token=-1: is an id: must be ≥ 0"),
        (["task=bert"], "task=bert: must be one of lm, mlm"),
    ],
)
def test_mistakes_are_one_line(overrides: list[str], message: str) -> None:
    gate.test_mistakes_are_one_line(overrides, message)
