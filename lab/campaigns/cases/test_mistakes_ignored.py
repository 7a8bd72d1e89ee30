"""More settings that would be ignored."""

from __future__ import annotations

import pytest

from tests.config import test_config as gate

pytestmark = pytest.mark.campaign


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["sp=lasp1", "sp={all_scan:{blocks:2}}"], "it needs sp=zeco"),
        (["sp.all_scan.algorithm=two_shot", "sp.all_scan.blocks=2"], "it needs sp.all_scan.algorithm=chain"),
        (["logger.tags=[a]"], "it needs logger=wandb"),
    ],
)
def test_settings_without_effect_are_refused(overrides: list[str], expected: str) -> None:
    gate.test_settings_without_effect_are_refused(overrides, expected)
