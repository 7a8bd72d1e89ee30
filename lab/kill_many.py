"""Question: does a run that is killed at random moments, also in saves, end with the losses of an unbroken one?
Command: python -m lab.kill_many [KILLS] [FOLDER] [--campaign splits|graphs] [--side-by-side N]
Date: 2026-11-21 (50 kills, 2 CPU cores) and 2026-11-24 (graphs, 66bd5af, 20 kills on 2 H200s)
Answer: yes: on one split in fp32 and in replayed graphs in bf16 to the last bit; over splits of 1 → 4 → 2 ranks, in
    fp64, within 6.5e-16; each sequence once. N runs are killed side by side, each KILLS / N times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from tests.support.commands import is_running, torchrun
from tests.support.comparison import largest, relative
from tests.support.replays import REPLAYABLE, SEQ_LEN, can_replay, replayed_steps
from zeco_train.checkpoint.files import complete_checkpoints, step_of
from zeco_train.system.files import METRICS_FILE
from zeco_train.tracking.metrics import read_metrics
from zeco_train.training.graphs import WARM_UP

# One in this many kills comes before the first step: during startup, or while reading the checkpoint.
_EARLY = 6
# On a machine with many times more processes than cores, a step of the smallest model has taken 10 s.
_LIMIT = 600.0
_SETTINGS = ["sched=constant", "optim.lr=1e-4", "data.global_batch=4"]


@dataclass(frozen=True)
class Campaign:
    """A series of kills of one run.

    Attributes:
        name: also the name of its folder.
        splits: ranks and settings of successive starts, in turn.
        tolerance: maximum relative difference of a loss from the uninterrupted run's.
        seq_len: of its data.
        every: steps between two checkpoints.
        after: steps of a start before it may be killed.
        within: seconds after these and up to 5 more steps within which the kill comes.
        replays: its steps are replayed as CUDA graphs, where there are GPUs.
    """

    name: str
    settings: list[str]
    splits: list[tuple[int, list[str]]]
    tolerance: float
    seq_len: int = 64
    every: int = 2
    after: int = 0
    within: float = 0.3
    replays: bool = False


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
GRAPHS = Campaign(
    "graphs", REPLAYABLE, [(2, ["sp=zeco"])], 0.0, SEQ_LEN, every=5, after=WARM_UP + 2, within=2.0, replays=True
)
CAMPAIGNS = {"splits": (SAME, OTHERS), "graphs": (GRAPHS,)}


@dataclass
class Outcome:
    """Results of a campaign.

    Attributes:
        kills, early, in_save: number of kills; of those before the first step; of those with a partial checkpoint on
            disk.
        steps: of a whole run.
        replayed: steps of killed starts that were replayed as CUDA graphs.
        redone: steps of each start that the next one repeated.
        difference: maximum relative difference of a loss or gradient norm.
    """

    name: str
    kills: int = 0
    early: int = 0
    in_save: int = 0
    steps: int = 0
    replayed: int = 0
    redone: list[int] = field(default_factory=list)
    difference: float = 0.0

    def add(self, other: Outcome) -> None:
        """Add the kills of another run, or another kill."""
        for name in ("kills", "early", "in_save", "replayed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.redone += other.redone

    def __str__(self) -> str:
        counts = f"{self.kills:5} {self.early:8} {self.in_save:8} {self.steps:6} {self.replayed:8}"
        return f"{self.name:14}{counts} {sum(self.redone):6} {max(self.redone, default=0):9} {self.difference:11.1e}"


HEADER = "              kills at start  in save  steps replayed redone  at most  difference"


class Run:
    """A run's folder, the sequences read by its starts, and the replayed steps of the last one, from their logs."""

    def __init__(self, folder: Path, campaign: Campaign) -> None:
        self.folder, self._campaign = folder, campaign
        self._read: dict[Path, int] = {}
        self.sequences: dict[int, list[int]] = {}
        self.replayed = 0

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
        campaign = self._campaign
        sizes = [f"data.seq_len={campaign.seq_len}", f"checkpoint.every={campaign.every}", f"train.steps={steps}"]
        settings = [*_SETTINGS, *campaign.settings, *split, *sizes, f"run_dir='{self.folder}'"]
        return torchrun(ranks, self.folder.parent, *settings, fresh=True)

    def take_log(self, first: int) -> None:
        """Read the log of the last start, which began with step `first`; replaces earlier entries of later steps."""
        self.sequences = {step: ids for step, ids in self.sequences.items() if step < first}
        found: dict[int, set[int]] = defaultdict(set)
        replayed = []
        for path in (self.folder / "logs").glob("rank_*.log"):
            with path.open() as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
                self._read[path] = file.tell()
            for step, ids in re.findall(r"step (\d+): sequences (\[[^\]]*\])", text):
                found[int(step)].update(json.loads(ids))
            replayed.append(replayed_steps(text))
        assert not found or min(found) == first, f"the start took up step {min(found)}, not {first}"
        self.sequences |= {step: sorted(ids) for step, ids in found.items()}
        self.replayed = min(replayed, default=0)

    def check_replays(self) -> None:
        """The last start, if not killed early, has replayed steps on all ranks."""
        assert self.replayed or not (self._campaign.replays and can_replay()), f"no step in {self.folder} was replayed"


def run_campaign(campaign: Campaign, kills: int, folder: Path, rng: random.Random, side_by_side: int = 1) -> Outcome:
    """Kill runs `kills` times in all, let them finish, and compare them; raises `AssertionError` on any mismatch."""
    folder.mkdir(parents=True)
    runs = [Run(folder / f"killed_{number}", campaign) for number in range(1, side_by_side + 1)]
    shares = [kills // side_by_side + (number < kills % side_by_side) for number in range(side_by_side)]
    total, seeds = Outcome(campaign.name), [rng.random() for _ in runs]
    kill = lambda run, share, seed: _kill(run, campaign, share, random.Random(seed))  # noqa: E731
    for outcome in _together(kill, runs, shares, seeds):
        total.add(outcome)
    total.steps = max(max(run.done, run.saved) for run in runs) + 5
    unbroken = Run(folder / "unbroken", campaign)
    splits = [campaign.splits[share % len(campaign.splits)] for share in shares]
    _together(lambda run, split: _end(run, split, total.steps), [*runs, unbroken], [*splits, campaign.splits[0]])
    for run in runs:
        total.difference = largest([total.difference, compare(run, unbroken, campaign, total.steps)])
    return total


def _together(work: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
    """As `map`, in a thread each."""
    with ThreadPoolExecutor(len(arguments[0])) as pool:
        return [*pool.map(work, *arguments)]


def _kill(run: Run, campaign: Campaign, kills: int, rng: random.Random) -> Outcome:
    """Kill a run `kills` times."""
    outcome, splits = Outcome(campaign.name), cycle(campaign.splits)
    while outcome.kills < kills:
        ranks, split = next(splits)
        saved = run.saved
        early = outcome.kills % _EARLY == _EARLY - 1
        with run.start(ranks, split, 1_000_000) as job:
            before = run.done
            if early:
                time.sleep(rng.uniform(0, 8))
            else:
                rows = _rows(run.folder) + campaign.after + rng.randint(1, 5)
                job.wait_until(lambda: _rows(run.folder) >= rows, f"steps after {before}", _LIMIT)  # noqa: B023
                time.sleep(rng.uniform(0, campaign.within))
            processes = [*job.ranks().values()]
            assert early or len(processes) == ranks
        # Leaving the block sent SIGKILL to the launcher and all ranks.
        while any(is_running(process) for process in processes):
            time.sleep(0.02)
        run.take_log(saved + 1)
        if not early:
            run.check_replays()
        in_save = any((run.folder / "checkpoints").glob("step_*.tmp"))
        redone = max(0, run.done - run.saved)
        outcome.add(Outcome(campaign.name, 1, early, in_save, replayed=run.replayed, redone=[redone]))
        # A save begins only after the previous one is complete, so a kill costs at most the steps of two.
        assert redone <= 2 * campaign.every, f"step {run.done} was done, and only {run.saved} saved"
        where = "at the start" if early else "in a save" if in_save else ""
        print(
            f"{run.folder.name}: kill {outcome.kills:2} on {ranks} ranks: steps {saved + 1}–{run.done}, "
            f"{run.replayed} replayed, saved {run.saved} {where}",
            flush=True,
        )
    return outcome


def _end(run: Run, split: tuple[int, list[str]], steps: int) -> None:
    """Let a run finish."""
    saved = run.saved
    with run.start(*split, steps) as job:
        result = job.wait(_LIMIT + steps)
    assert result.code == 0, result.err
    run.take_log(saved + 1)
    run.check_replays()


def _rows(run_dir: Path) -> int:
    path = run_dir / METRICS_FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


def compare(run: Run, unbroken: Run, campaign: Campaign, steps: int) -> float:
    """The largest relative difference of a loss or norm.

    Raises:
        AssertionError: it is beyond the campaign's, or the runs differ in their steps or sequences.
    """
    expected, found = (read_metrics(r.folder / METRICS_FILE) for r in (unbroken, run))
    assert [row["step"] for row in found] == [row["step"] for row in expected] == list(range(1, steps + 1))
    difference = 0.0
    for one, other in zip(found, expected, strict=True):
        assert (one["lr"], one["tokens"]) == (other["lr"], other["tokens"])
        for key in ("loss", "grad_norm"):
            difference = largest([difference, relative(one[key], other[key])])
    assert difference <= campaign.tolerance, f"a loss or norm of {run.folder} differs by {difference:.1e}"
    assert run.sequences == unbroken.sequences
    ids = [i for step in range(1, steps + 1) for i in run.sequences[step]]
    assert len(ids) == len(set(ids)) == expected[-1]["tokens"] // campaign.seq_len
    return difference


def main() -> int:
    """Run the campaigns, and print a table."""
    parser = argparse.ArgumentParser(description="kill runs at random moments, and compare them with unbroken ones")
    parser.add_argument("kills", nargs="?", type=int, default=50)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--campaign", choices=[*CAMPAIGNS], default="splits")
    parser.add_argument("--side-by-side", type=int, default=1, metavar="N", help="runs of a campaign")
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="zeco-kills-"))).resolve()
    seed = int(os.environ.get("SEED", time.time_ns() % 10**6))
    rng = random.Random(seed)
    print(f"{options.kills} kills, seed {seed}, runs in {folder}", flush=True)
    campaigns = CAMPAIGNS[options.campaign]
    if any(campaign.replays for campaign in campaigns) and not can_replay():
        print("fewer than 2 GPUs: steps are launched, none is replayed", flush=True)
    began = time.monotonic()
    outcomes = []
    for number, campaign in enumerate(campaigns):
        count = options.kills // len(campaigns) + (number >= len(campaigns) - options.kills % len(campaigns))
        place = folder / campaign.name.replace(" ", "_")
        outcomes.append(run_campaign(campaign, count, place, rng, options.side_by_side))
    print(f"\n{HEADER}")
    for outcome in outcomes:
        print(outcome)
    print(f"losses and sequences as in the unbroken runs; {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
