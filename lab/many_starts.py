"""Question: do many short runs all end properly: exit code 0, empty stderr, the losses of one rank?
Command: python -m lab.many_starts [RUNS] [--kind segments|random|all] [--seed N] [--folder FOLDER]
Date: –
Answer: no result is kept. Half of the runs save asynchronously, half have a logger: threads must not outlive the
    process.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.commands import torchrun, train_here
from tests.support.comparison import largest, relative
from zeco_train.ops.recompute import Recompute
from zeco_train.system.files import METRICS_FILE
from zeco_train.tracking.metrics import read_metrics

KINDS = ("segments", "random")
TOLERANCE = 1e-9
_STEPS = (2, 3, 4)
_LIMIT_SECONDS = 300.0
# Divisible by all numbers of ranks and segments.
_COMMON = ["data.seq_len=96", "data.global_batch=12", "train.dtype=fp64", "train.device=cpu", "sched=constant"]


@dataclass(frozen=True)
class Start:
    """One run.

    Attributes:
        number: within its kind, from 1; with the seed it determines everything else.
    """

    kind: str
    number: int
    ranks: int
    backend: str
    steps: int
    settings: list[str]


@dataclass
class Result:
    """Result of a run.

    Attributes:
        problem: empty on success.
        difference: maximum relative difference of a loss from the reference's.
    """

    kind: str
    number: int
    backend: str
    problem: str
    difference: float
    seconds: float


def draw(kind: str, number: int, seed: int) -> Start:
    """The settings of a run, a pure function of the arguments."""
    rng = random.Random(f"{seed} {kind} {number}")
    steps = rng.choice(_STEPS)
    ends = [f"checkpoint.every={rng.choice((0, 1))}", f"logger={rng.choice(('none', 'tensorboard'))}"]
    if kind == "segments":
        chain = ["sp=zeco", "sp.all_scan.algorithm=chain", "parallel=zero3", f"train.segments={rng.choice((2, 3, 4))}"]
        return Start(kind, number, 2, "zeco", steps, [*chain, "data.micro_batch=4", *ends])
    ranks = rng.randint(1, 4)
    sp_size = rng.choice([n for n in (1, 2, 3, 4) if ranks % n == 0])
    backend = rng.choice(("lasp1", "lasp2", "zeco", "zeco")) if sp_size > 1 else rng.choice(("dp", "zeco"))
    split = [f"sp={backend}", f"sp.size={sp_size}", f"parallel={rng.choice(('ddp', 'hsdp', 'zero2', 'zero3'))}"]
    if backend == "zeco":
        split.append(f"sp.all_scan.algorithm={rng.choice(('auto', 'chain', 'two_shot'))}")
    share = 12 * sp_size // ranks
    split += [f"data.micro_batch={rng.choice([n for n in (1, 2, 3, 4, 6, 12) if share % n == 0 and n * 4 >= share])}"]
    split += [f"train.segments={rng.choice((1, 1, 2, 4))}", f"train.recompute={rng.choice([*Recompute]).value}"]
    split += [f"checkpoint.mode={rng.choice(('async', 'async', 'sync'))}"]
    return Start(kind, number, ranks, backend, steps, [*split, *ends])


def reference(folder: Path) -> list[float]:
    """The losses of a one-rank run with whole sequences."""
    outcome = train_here(*_COMMON, "sp=dp", f"train.steps={max(_STEPS)}", "checkpoint.every=0", f"run_dir='{folder}'")
    assert outcome.code == 0, outcome
    return [row["loss"] for row in read_metrics(folder / METRICS_FILE)]


def run(start: Start, folder: Path, losses: list[float]) -> Result:
    """Run it in `folder`, which is kept on failure."""
    folder.mkdir(parents=True)
    began = time.monotonic()
    steps = [f"train.steps={start.steps}", f"run_dir='{folder / 'run'}'"]
    with torchrun(start.ranks, folder, *_COMMON, *start.settings, *steps, fresh=True) as command:
        outcome = command.wait(_LIMIT_SECONDS)
    seconds = time.monotonic() - began
    found = [row["loss"] for row in read_metrics(folder / "run" / METRICS_FILE)]
    pairs = zip(found, losses, strict=False)
    difference = largest([relative(one, other) for one, other in pairs] or [float("inf")])
    problem = ""
    if outcome.code or outcome.err:
        problem = f"exit code {outcome.code}, stderr: {outcome.err.strip() or 'empty'}"
        (folder / "stderr").write_text(outcome.err)
    elif len(found) != start.steps:
        problem = f"{len(found)} rows of metrics for {start.steps} steps"
    elif not difference <= TOLERANCE:
        problem = f"a loss differs by {difference:.1e}"
    else:
        shutil.rmtree(folder)
    return Result(start.kind, start.number, start.backend, problem, difference, seconds)


def table(results: list[Result]) -> str:
    """Runs by kind and backend."""
    lines = ["kind      backend   runs  failed  difference  seconds a run"]
    groups = sorted({(result.kind, result.backend) for result in results})
    for kind, backend in [*groups, ("all", "")]:
        group = [r for r in results if (r.kind, r.backend) == (kind, backend) or kind == "all"]
        failed, seconds = sum(bool(r.problem) for r in group), sum(r.seconds for r in group) / len(group)
        worst = largest(r.difference for r in group)
        lines.append(f"{kind:9} {backend:7} {len(group):6} {failed:7} {worst:11.1e} {seconds:14.1f}")
    return "\n".join(lines)


def main() -> int:
    """Run everything and print a table; returns 1 if a run failed."""
    parser = argparse.ArgumentParser(description="start many short runs, and see that each ends as it should")
    parser.add_argument("runs", type=int, nargs="?", default=150, help="of each kind (default: 150)")
    parser.add_argument("--kind", choices=[*KINDS, "all"], default="all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="to go on in")
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="zeco-starts-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}, in {folder}", flush=True)
    path = folder / "results.jsonl"
    results = [Result(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(result.kind, result.number) for result in results}
    losses = reference(Path(tempfile.mkdtemp(prefix="reference-", dir=folder)) / "run")
    for number in range(1, options.runs + 1):
        for kind in KINDS if options.kind == "all" else (options.kind,):
            if (kind, number) in done:
                continue
            start = draw(kind, number, options.seed)
            place = folder / f"{kind}_{number:03}"
            # Left over from an interrupted start.
            shutil.rmtree(place, ignore_errors=True)
            result = run(start, place, losses)
            results.append(result)
            with path.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            ending = f"FAILED: {result.problem} in {place}" if result.problem else f"{result.difference:.1e}"
            settings = " ".join(start.settings)
            print(f"{kind} {number}: {start.ranks} ranks, {settings}: {result.seconds:.1f} s, {ending}", flush=True)
    print(f"\n{table(results)}")
    return int(any(result.problem for result in results))


if __name__ == "__main__":
    sys.exit(main())
