"""Question: are losses and all gradients of foreign models over ranks those of one device, class by class?
Command: python -m lab.campaigns.attach_matrix [--ranks 2,3,4] [--fla] [NAME ...]
Date: 2026-11-27
Answer: results/attach_matrix.txt: all errors are at most 1e-12, but for controls, in which one state is dropped; of all
classes over 2 ranks (17 of transformers, 8 of fla), of some over 3 and 4 until now: each row has its commit

Each class is its configuration class's default with sizes reduced (`tests/support/attach_models.py`), in fp64, over
gloo ranks with three chunks of 64 tokens each and more. A row has a batch of two rows, whole; packed, with other
documents in each row over uneven ranks, one of which has one token; the same with gradient checkpointing; the control.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support import attach_models
from tests.support.attach_models import FLA_MODELS, MODELS, Errors, build, build_fla, compare, make_batch
from tests.support.commands import REPOSITORY
from tests.support.distributed import run_distributed

TABLE = Path(__file__).with_name("results") / "attach_matrix.txt"
LINE = "{:16}{:>6}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>10}{:>9}  {}"
HEADER = (
    "# By python -m lab.campaigns.attach_matrix [--fla], a row at its commit: classes at their defaults, sizes reduced."
)
COLUMNS = ("class", "ranks", "whole", "dgrad", "packed", "dgrad", "replayed", "dgrad", "control", "seconds", "commit")
TOKENS = 200  # of a rank, on average
LARGEST = 1e-12


def rows(rank: int, size: int, names: list[str], is_fla: bool) -> list[tuple[str, list[Errors], float]]:
    """On each rank: the errors of each class, whole, packed, checkpointed, and of the control; and seconds."""
    patch = pytest.MonkeyPatch()
    (attach_models.use_plain_fla(patch) if is_fla else attach_models.hide_fla())
    length = TOKENS * size + 1
    batch = make_batch(2, length)
    lengths = [1, *[(length - 1) // (size - 1)] * (size - 2)]
    lengths = [*lengths, length - sum(lengths)]
    documents = [[0, 3, 70, 71, length - 100, length], [0, length // 2, length]]
    packed: dict[str, Any] = {"documents": documents, "lengths": lengths}
    found = []
    for name in names:
        make = functools.partial(build_fla if is_fla else build, name)
        start = time.monotonic()
        errors = [
            compare(make, [batch]),
            compare(make, [batch], **packed),
            compare(make, [batch], **packed, prepare=_checkpointed),
            compare(make, [batch], prepare=attach_models.drop_a_state),
        ]
        found.append((name, errors, time.monotonic() - start))
        dist.barrier()
    return found


def _checkpointed(attached: Any) -> None:
    attach_models.checkpoint_in_double(attached.model, reentrant=False)


def main() -> None:
    """Run the classes; rows of others in the table stay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--fla", action="store_true", help="the classes of fla")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    known = FLA_MODELS if arguments.fla else MODELS
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.strip()
    kept = TABLE.read_text().splitlines()[2:] if TABLE.exists() else []
    by_key = {tuple(line.split()[:2]): line for line in kept}
    for size in map(int, arguments.ranks.split(",")):
        for name in arguments.names or known:
            found = run_distributed(rows, size, [name], arguments.fla)[0]
            _, (whole, packed, replayed, control), seconds = found[0]
            shown = [x for errors in (whole, packed, replayed) for x in (errors.loss, errors.gradient)]
            is_wrong = max(shown) > LARGEST or control.gradient < 1e-6
            title = f"fla.{name}" if arguments.fla else name
            cells = [title, size, *(f"{x:.1e}" for x in (*shown, control.gradient)), f"{seconds:.0f}", commit]
            by_key[title, str(size)] = LINE.format(*cells) + ("  WRONG" if is_wrong else "")
            print(by_key[title, str(size)], flush=True)
            TABLE.write_text("\n".join([HEADER, LINE.format(*COLUMNS), *sorted(by_key.values())]) + "\n")


if __name__ == "__main__":
    main()
