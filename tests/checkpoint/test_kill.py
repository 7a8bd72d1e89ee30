"""A run that is killed with SIGKILL at random moments, saves included, ends as one that never was.

`python -m tests.kill_many 50` kills as often as the project promises (a quarter of an hour); this is quicker.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.kill_many import OTHERS, SAME, Campaign, run_campaign


@pytest.mark.slow
@pytest.mark.parametrize(("campaign", "kills"), [(SAME, 1), (OTHERS, 2)], ids=["same", "others"])
def test_killed_at_random_moments(campaign: Campaign, kills: int, tmp_path: Path) -> None:
    seed = time.time_ns() % 10**6
    print(f"seed {seed}")
    print(run_campaign(campaign, kills, tmp_path / "campaign", random.Random(seed)))
