"""Question: do the commands of README.md and docs/ that need nothing but time run?
Command: python -m lab.campaigns.documented_commands [--minutes 5] [PAGE ...]
Date: 2026-11-25, 2 CPU cores
Answer: lab/campaigns/results/documented_commands.txt.

Page by page, in order, each in a checkout of its own. A training that takes longer than --minutes ends after two steps;
other commands that do are left out.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.support.documented import PAGES, checkout, commands_of, run

_SHORT = ("train.steps=2", "sched.warmup_steps=1", "train.eval_sequences=2")


def main() -> int:
    """Print a row for each command; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=5, help="longer commands are cut short; default: 5")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="as in data.md; default: all")
    given = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        (base := Path(place, "presumed")).mkdir()
        presumed = checkout(base, "data.seq_len=256", "data.global_batch=2", *_SHORT[1:])
        print("| page | command | needs | ran | seconds | exit code |\n|---|---|---|---|---:|---:|", flush=True)
        for page in PAGES:
            if given.pages and page.name not in given.pages:
                continue
            folder = shutil.copytree(presumed, Path(place) / page.stem, symlinks=True)
            for command in commands_of(page):
                trains = " train.py " in command.text
                is_long = command.minutes is not None and command.minutes > given.minutes
                ran = "-" if command.minutes is None else "whole" if not is_long else "two steps" if trains else "-"
                seconds = code = ""
                if ran != "-":
                    began = time.monotonic()
                    outcome = run(command, folder, *(_SHORT if is_long else ()), timeout=3600.0)
                    seconds, code = f"{time.monotonic() - began:.1f}", str(outcome.code)
                    if outcome.code:
                        failed += 1
                        print(outcome.err, file=sys.stderr)
                text = command.text.replace("|", "\\|")
                print(
                    f"| {page.stem} | `{text}` | {', '.join(command.needs)} | {ran} | {seconds} | {code} |", flush=True
                )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
