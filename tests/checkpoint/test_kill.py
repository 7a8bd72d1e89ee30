"""A run killed with SIGKILL at random moments, including saves, has the results of an uninterrupted run.

This is the short version of `python -m tests.kill_many 50`, which takes a quarter of an hour.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.kill_many import OTHERS, SAME, Campaign, run_campaign


@pytest.mark.slow
@pytest.mark.parametrize(("campaign", "kills"), [(SAME, 1), (OTHERS, 2)], ids=["same", "others"])
def test_run_killed_at_random_equals_uninterrupted_run(campaign: Campaign, kills: int, tmp_path: Path) -> None:
    seed = time.time_ns() % 10**6
    print(f"seed {seed}")
    print(run_campaign(campaign, kills, tmp_path / "campaign", random.Random(seed)))
