"""Kill runs with SIGKILL at random moments, including saves, and compare their results with uninterrupted runs.

    python -m tests.kill_many [KILLS] [FOLDER]          default: 50 kills

Half of the kills hit a run that resumes with the same split, in fp32: its losses must match those of the uninterrupted
run bit for bit. The other half hit a run that changes its ranks 1 → 4 → 2 and sp.size 1 → 4 → 2 from start to start, in
fp64: within 1e-9. The sequences of the steps that count, i.e. that were kept, must be those of the uninterrupted run,
each once.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from tests.support.commands import is_running, torchrun
from tests.support.comparison import largest, relative
from zeco_train.checkpoint.files import complete_checkpoints, step_of
from zeco_train.system.run_files import METRICS_FILE
from zeco_train.tracking.metrics import read_metrics

EVERY = 2
# One in this many kills comes before the first step: during startup, or while reading the checkpoint.
_EARLY = 6
_LIMIT = 120.0
_SETTINGS = [f"checkpoint.every={EVERY}", "sched=constant", "optim.lr=1e-4"]


@dataclass(frozen=True)
class Campaign:
    """A series of kills of one run.

    Attributes:
        name: also the name of its folder.
        splits: ranks and settings of successive starts, in turn.
        tolerance: maximum relative difference of a loss from the uninterrupted run's.
    """

    name: str
    settings: list[str]
    splits: list[tuple[int, list[str]]]
    tolerance: float


SAME = Campaign("same split", ["train.dtype=fp32"], [(2, ["sp=zeco"])], 0.0)
OTHERS = Campaign(
    "other splits",
    ["train.dtype=fp64"],
    [
        (1, ["sp=dp"]),
        (4, ["sp=zeco", "sp.size=4", "parallel=zero3"]),
        (2, ["sp=lasp2", "sp.size=2", "train.segments=2"]),
        (4, ["sp=lasp1", "sp.size=2", "parallel=hsdp"]),
        (2, ["sp=dp", "parallel=ddp", "checkpoint.mode=sync"]),
    ],
    1e-9,
)


@dataclass
class Outcome:
    """Results of a campaign.

    Attributes:
        kills, early, in_save: number of kills; of those before the first step; of those with a partial checkpoint on
            disk.
        steps: of the whole run.
        redone: steps of each start that the next one repeated.
        difference: maximum relative difference of a loss or gradient norm.
    """

    name: str
    kills: int = 0
    early: int = 0
    in_save: int = 0
    steps: int = 0
    redone: list[int] = field(default_factory=list)
    difference: float = 0.0

    def __str__(self) -> str:
        counts = f"{self.kills:5} {self.early:8} {self.in_save:8} {self.steps:6}"
        return f"{self.name:14}{counts} {sum(self.redone):5} {max(self.redone, default=0):9} {self.difference:11.1e}"


HEADER = "              kills at start  in save  steps redone  at most  difference"


class _Run:
    """A run's folder, and the sequences read by its starts, from their logs."""

    def __init__(self, folder: Path, campaign: Campaign) -> None:
        self.folder, self._campaign = folder, campaign
        self._read: dict[Path, int] = {}
        self.sequences: dict[int, list[int]] = {}

    @property
    def saved(self) -> int:
        """The step of the newest complete checkpoint."""
        complete = complete_checkpoints(self.folder)
        return step_of(complete[-1]) if complete else 0

    @property
    def done(self) -> int:
        """The last logged step."""
        rows = read_metrics(self.folder / METRICS_FILE)
        return rows[-1]["step"] if rows else 0

    def start(self, ranks: int, split: list[str], steps: int) -> Any:
        settings = [*_SETTINGS, *self._campaign.settings, *split, f"run_dir='{self.folder}'", f"train.steps={steps}"]
        return torchrun(ranks, self.folder.parent, *settings, fresh=True)

    def take_sequences(self, first: int) -> None:
        """Read the log of the last start, which began with step `first`; replaces earlier entries of later steps."""
        self.sequences = {step: ids for step, ids in self.sequences.items() if step < first}
        found: dict[int, set[int]] = defaultdict(set)
        for path in (self.folder / "logs").glob("rank_*.log"):
            with path.open() as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
                self._read[path] = file.tell()
            for step, ids in re.findall(r"step (\d+): sequences (\[[^\]]*\])", text):
                found[int(step)].update(json.loads(ids))
        assert not found or min(found) == first, f"the start took up step {min(found)}, not {first}"
        self.sequences |= {step: sorted(ids) for step, ids in found.items()}


def run_campaign(campaign: Campaign, kills: int, folder: Path, rng: random.Random) -> Outcome:
    """Kill a run `kills` times, let it finish, and compare it; raises `AssertionError` on any mismatch."""
    folder.mkdir(parents=True)
    outcome, run, splits = Outcome(campaign.name), _Run(folder / "killed", campaign), cycle(campaign.splits)
    while outcome.kills < kills:
        ranks, split = next(splits)
        saved = run.saved
        early = outcome.kills % _EARLY == _EARLY - 1
        with run.start(ranks, split, 1_000_000) as job:
            before = run.done
            if early:
                time.sleep(rng.uniform(0, 8))
            else:
                rows = _rows(run.folder) + rng.randint(1, 5)
                job.wait_until(lambda: _rows(run.folder) >= rows, f"steps after {before}", _LIMIT)  # noqa: B023
                time.sleep(rng.uniform(0, 0.3))
            processes = [*job.ranks().values()]
            assert early or len(processes) == ranks
        # Leaving the block sent SIGKILL to the launcher and all ranks.
        while any(is_running(process) for process in processes):
            time.sleep(0.02)
        run.take_sequences(saved + 1)
        in_save = any((run.folder / "checkpoints").glob("step_*.tmp"))
        outcome.kills, outcome.early, outcome.in_save = (
            outcome.kills + 1,
            outcome.early + early,
            outcome.in_save + in_save,
        )
        outcome.redone.append(max(0, run.done - run.saved))
        # A save begins only after the previous one is complete, so a kill costs at most the steps of two.
        assert outcome.redone[-1] <= 2 * EVERY, f"step {run.done} was done, and only {run.saved} saved"
        where = "at the start" if early else "in a save" if in_save else ""
        print(
            f"kill {outcome.kills:2} on {ranks} ranks: steps {saved + 1}–{run.done}, saved {run.saved} {where}",
            flush=True,
        )
    outcome.steps = max(run.done, run.saved) + 5
    ranks, split = next(splits)
    saved = run.saved
    _end(run, ranks, split, outcome.steps)
    run.take_sequences(saved + 1)
    unbroken = _Run(folder / "unbroken", campaign)
    _end(unbroken, *campaign.splits[0], outcome.steps)
    unbroken.take_sequences(1)
    _compare(run, unbroken, campaign, outcome)
    return outcome


def _end(run: _Run, ranks: int, split: list[str], steps: int) -> None:
    with run.start(ranks, split, steps) as job:
        result = job.wait(_LIMIT + steps)
    assert result.code == 0, result.err


def _rows(run_dir: Path) -> int:
    path = run_dir / METRICS_FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _compare(run: _Run, unbroken: _Run, campaign: Campaign, outcome: Outcome) -> None:
    expected, found = (read_metrics(r.folder / METRICS_FILE) for r in (unbroken, run))
    assert [row["step"] for row in found] == [row["step"] for row in expected] == list(range(1, outcome.steps + 1))
    for one, other in zip(found, expected, strict=True):
        assert (one["lr"], one["tokens"]) == (other["lr"], other["tokens"])
        for key in ("loss", "grad_norm"):
            outcome.difference = largest([outcome.difference, relative(one[key], other[key])])
    assert outcome.difference <= campaign.tolerance, f"a loss or norm differs by {outcome.difference:.1e}"
    assert run.sequences == unbroken.sequences
    ids = [i for step in range(1, outcome.steps + 1) for i in run.sequences[step]]
    assert len(ids) == len(set(ids)) == expected[-1]["tokens"] // 64


def main() -> int:
    """Both campaigns, and a table."""
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp(prefix="zeco-kills-"))
    seed = int(os.environ.get("SEED", time.time_ns() % 10**6))
    rng = random.Random(seed)
    print(f"{kills} kills, seed {seed}, runs in {folder}", flush=True)
    began = time.monotonic()
    outcomes = []
    for campaign, count in ((SAME, kills // 2), (OTHERS, kills - kills // 2)):
        outcomes.append(run_campaign(campaign, count, folder / campaign.name.replace(" ", "_"), rng))
    print(f"\n{HEADER}")
    for outcome in outcomes:
        print(outcome)
    print(f"losses and sequences as in the unbroken runs; {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
