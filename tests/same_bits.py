"""Train with two versions of this project, and compare losses and gradient norms to the last bit.

    python -m tests.same_bits COMMIT|FOLDER [--dtypes fp32,fp64] [--device cpu] [--ranks 2] [--steps 20] [--only TEXT]
        [KEY=VALUE of train.py …]

COMMIT is checked out in a temporary folder; FOLDER is another copy of the sources, for machines without git. Each case
of `cases` is trained by both, in separate processes. Prints one line per case; exits with 1 if one differs or fails.

For refactorings that must not change what is computed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.commands import REPOSITORY
from zeco_train.system.run_files import METRICS_FILE
from zeco_train.tracking.metrics import read_metrics

COLUMNS = ("loss", "grad_norm")
BACKENDS = {
    "dp": ["sp=dp", "sp.size=1"],
    "lasp1": ["sp=lasp1"],
    "lasp2": ["sp=lasp2"],
    "chain": ["sp=zeco", "sp.all_scan.algorithm=chain"],
    "two_shot": ["sp=zeco", "sp.all_scan.algorithm=two_shot"],
}
WAYS = {
    "plain": [],
    "documents, 2 segments, full recompute": [
        "data.reset_state_at_document=true",
        "train.segments=2",
        "train.recompute=full",
    ],
}
STRATEGIES = ("ddp", "hsdp", "zero2", "zero3")
_LIMIT_SECONDS = 580.0
_SETTINGS = [
    "model.num_layers=2",
    "data.seq_len=512",
    "data.global_batch=4",
    "sched.warmup_steps=2",
    "train.log_every=1",
    "train.eval_every=0",
    "checkpoint.every=0",
]


@dataclass(frozen=True)
class Case:
    """A configuration that both versions train.

    Attributes:
        settings: arguments of `train.py`.
    """

    name: str
    settings: list[str]


def cases(dtypes: list[str]) -> Iterator[Case]:
    """Every backend, plain and with carries and replayed states; then every strategy."""
    for dtype in dtypes:
        for (backend, split), (way, settings) in itertools.product(BACKENDS.items(), WAYS.items()):
            yield Case(f"{dtype} {backend}, {way}", [f"train.dtype={dtype}", *split, *settings])
        for strategy in STRATEGIES:
            settings = [f"train.dtype={dtype}", *BACKENDS["chain"], f"parallel={strategy}", "train.recompute=selective"]
            yield Case(f"{dtype} chain, {strategy}, selective recompute", settings)


@contextmanager
def sources(name: str) -> Iterator[Path]:
    """The folder of that name, or a temporary checkout of that commit."""
    if Path(name).is_dir():
        yield Path(name).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="zeco-sources-") as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(REPOSITORY), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), name], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def train(tree: Path, ranks: int, settings: list[str]) -> list[tuple[float, ...]]:
    """Losses and norms of a run with the sources in `tree`.

    Raises:
        RuntimeError: it failed; the message is its output.
    """
    with tempfile.TemporaryDirectory(prefix="zeco-bits-") as folder:
        run = Path(folder) / "run"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(
            [*launcher, str(tree / "train.py"), *_SETTINGS, *settings, f"run_dir='{run}'"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip() or f"exit code {done.returncode}")
        return [tuple(row[column] for column in COLUMNS) for row in read_metrics(run / METRICS_FILE)]


def verdict(rows: list[tuple[float, ...]], others: list[tuple[float, ...]], steps: int) -> str:
    """`same` followed by the number of steps, or the first difference."""
    if len(rows) != steps or len(others) != steps:
        return f"DIFFERENT: {len(others)} and {len(rows)} steps of {steps}"
    for step, (row, other) in enumerate(zip(rows, others, strict=True), start=1):
        for column, value, expected in zip(COLUMNS, row, other, strict=True):
            if value != expected:
                return f"DIFFERENT at step {step}: {column} {expected!r} became {value!r}"
    return f"same {steps} steps, last loss {rows[-1][0]!r}"


def main() -> int:
    """Compare all cases; returns 1 if one differs or fails."""
    parser = argparse.ArgumentParser(description="train with two versions, and compare losses and norms bit by bit")
    parser.add_argument("other", metavar="COMMIT|FOLDER")
    parser.add_argument("--dtypes", default="fp32,fp64")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their name")
    options, more = parser.parse_known_args()
    failed = 0
    with sources(options.other) as tree:
        for case in cases(options.dtypes.split(",")):
            if options.only not in case.name:
                continue
            began = time.monotonic()
            settings = [*case.settings, f"train.steps={options.steps}", f"train.device={options.device}", *more]
            try:
                others, rows = (train(folder, options.ranks, settings) for folder in (tree, REPOSITORY))
                found = verdict(rows, others, options.steps)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                found = f"FAILED: {error}"
            failed += not found.startswith("same")
            print(f"{case.name}: {found} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{failed} failed" if failed else "all the same")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
