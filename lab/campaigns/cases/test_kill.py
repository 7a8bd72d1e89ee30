"""A run killed with SIGKILL at random moments, including saves, has the results of an uninterrupted run.

The short version of `python -m lab.kill_many 50`, which takes a quarter of an hour; and that its comparison sees a
difference.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lab import kill_many
from lab.kill_many import GRAPHS, OTHERS, SAME, Campaign, Run, compare, run_campaign
from tests.support.replays import REPLAYS_BEGIN, replayed_steps

pytestmark = pytest.mark.campaign
STEPS = 4


@pytest.mark.parametrize(
    ("campaign", "kills", "side_by_side"),
    # Without GPUs nothing is replayed: GRAPHS would be SAME with a larger model, six processes at a time.
    [
        (SAME, 1, 1),
        (OTHERS, 2, 1),
        pytest.param(GRAPHS, 2, 2, marks=pytest.mark.gpu),
    ],
    ids=["same", "others", "graphs"],
)
def test_run_killed_at_random_equals_uninterrupted_run(
    campaign: Campaign, kills: int, side_by_side: int, tmp_path: Path
) -> None:
    if campaign is GRAPHS and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    seed = time.time_ns() % 10**6
    print(f"seed {seed}")
    print(run_campaign(campaign, kills, tmp_path / "campaign", random.Random(seed), side_by_side))


def written(folder: Path, log: str = "", **last: Any) -> Run:
    """A run of `STEPS` steps; `last` replaces values in the last row of its metrics."""
    (folder / "logs").mkdir(parents=True)
    rows = [
        {"step": step, "loss": 3.0 + 1 / step, "grad_norm": 1.0, "lr": 1e-4, "tokens": step * 2 * SAME.seq_len}
        for step in range(1, STEPS + 1)
    ]
    rows[-1] |= last
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for rank in range(2):
        lines = (f"step {step}: sequences [{2 * step + rank}]\n" for step in range(1, STEPS + 1))
        (folder / "logs" / f"rank_{rank}.log").write_text(log + "".join(lines))
    run = Run(folder, SAME)
    run.take_log(1)
    return run


def test_comparison_sees_last_bit_and_other_sequences(tmp_path: Path) -> None:
    unbroken, loss = written(tmp_path / "unbroken"), 3.0 + 1 / STEPS
    assert compare(written(tmp_path / "same"), unbroken, SAME, STEPS) == 0.0
    off = written(tmp_path / "last_bit", loss=loss + 4.5e-16)
    with pytest.raises(AssertionError, match=r"a loss or norm of .*last_bit differs by 1\.4e-16"):
        compare(off, unbroken, SAME, STEPS)
    assert compare(off, unbroken, replace(SAME, tolerance=1e-9), STEPS) > 0.0
    with pytest.raises(AssertionError, match="differs by nan"):
        compare(written(tmp_path / "nan", grad_norm=float("nan")), unbroken, SAME, STEPS)
    with pytest.raises(AssertionError):
        compare(written(tmp_path / "no_last_step", step=STEPS - 1), unbroken, SAME, STEPS)
    other = written(tmp_path / "other_sequence")
    other.sequences[STEPS] = [0, 1]
    with pytest.raises(AssertionError):
        compare(other, unbroken, SAME, STEPS)


def test_replays_must_be_in_logs_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = f"INFO {REPLAYS_BEGIN}, as 4 graphs\n"
    assert replayed_steps(f"{begin}step 1: sequences [0]\n{begin}step 2: sequences [1]\n") == 1
    monkeypatch.setattr(kill_many, "can_replay", lambda: True)
    replayed = written(tmp_path / "replayed", begin)
    assert replayed.replayed == STEPS
    for run in (replayed, launched := written(tmp_path / "launched")):
        run._campaign = GRAPHS
    replayed.check_replays()
    with pytest.raises(AssertionError, match=r"no step in .*launched was replayed"):
        launched.check_replays()
    # One rank has said so, the other one has not.
    with (tmp_path / "launched" / "logs" / "rank_1.log").open("a") as file:
        file.write(f"{begin}step 5: sequences [10]\n")
    launched.take_log(5)
    with pytest.raises(AssertionError, match=r"no step in .*launched was replayed"):
        launched.check_replays()
