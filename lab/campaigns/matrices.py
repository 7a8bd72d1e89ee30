"""Question: do the cases pass that the gate leaves out, since another case stands for their mechanism?
Command: python -m lab.campaigns.matrices [--jobs N] [--minutes M] [--again] [FILE ...]
Date: 2026-11-27, all 136 files
Answer: results/matrices.txt, a row for each file of tests/ and cases/ that has tests marked `campaign`

Each file has a pytest of its own, which is interrupted after M minutes. Its row is written as soon as it has ended. The
next call goes on with the files without a row, or whose row lacks cases; `--again` runs all, and names run theirs.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.support.commands import REPOSITORY
from zeco_train.system.command import available_cores
from zeco_train.system.environment import processor

FOLDERS = ("tests", "lab/campaigns/cases")
TABLE = Path(__file__).with_name("results") / "matrices.txt"
LINE = "{:52}{:>6}{:>8}{:>9}{:>8}{:>9}  {:11}{:12}{}"
COLUMNS = ("file", "cases", "passed", "skipped", "failed", "seconds", "commit", "date", "machine")
FAILED, MISSING = "Failed:", "Not run, or not to the end:"
# What an interrupted pytest may take to end its ranks and to write its report.
SECONDS_TO_END = 60.0
_TAIL_CHARACTERS = 20_000


@dataclass
class Row:
    """The last run of a file's cases.

    Attributes:
        cases: all; those that are neither passed, skipped nor failed have not been run.
        failures: a line each: the test's id, and how its message begins.
    """

    file: str
    cases: int
    passed: int
    skipped: int
    failed: int
    seconds: float
    commit: str
    date: str
    machine: str
    failures: list[str] = field(default_factory=list)

    @property
    def missing(self) -> int:
        return self.cases - self.passed - self.skipped - self.failed


class Run:
    """A pytest of one file's cases."""

    def __init__(self, file: str, folder: Path) -> None:
        self.file, self.began, self._interrupted = file, time.monotonic(), 0.0
        self.report = folder / f"{file.replace('/', '.')}.xml"
        self.output = self.report.with_suffix(".txt")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "campaign", file]
        with self.output.open("w") as output:
            self._process = subprocess.Popen(
                [*command, f"--junitxml={self.report}"],
                cwd=REPOSITORY,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def has_ended(self, limit: float) -> bool:
        """Whether it has; interrupts it after `limit` seconds, and kills it where that does not help."""
        now = time.monotonic()
        if self._process.poll() is not None or (self._interrupted and now > self._interrupted + SECONDS_TO_END):
            self.kill()
        elif not self._interrupted and now > self.began + limit:
            self._interrupted = now
            self._process.send_signal(signal.SIGINT)
        return self._process.poll() is not None

    def kill(self) -> None:
        """End the processes that it has left, and itself."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def row(self, cases: int, commit: str, date: str, machine: str) -> Row:
        """What its report says."""
        found = [*ElementTree.parse(self.report).iter("testcase")] if self.report.exists() else []
        if self._interrupted:
            # The last one was, of which the report has no outcome.
            found = found[:-1]
        outcomes, failures = {}, []
        for case in found:
            child = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
            # A second entry is of an error afterwards.
            outcomes[case.get("name")] = "passed" if child is None else child.tag
            if child is not None and child.tag != "skipped":
                failures.append(f"{self.file}::{case.get('name')}  {_first_line(child)}")
        counts = Counter(outcomes.values())
        failed = counts["failure"] + counts["error"]
        seconds = round(time.monotonic() - self.began, 1)
        row = Row(self.file, cases, counts["passed"], counts["skipped"], failed, seconds, commit, date, machine)
        if row.missing and not self._interrupted:
            failures.append(f"{self.file}::  pytest ended with {self._process.returncode}")
        row.failures = failures
        return row


def _first_line(failure: ElementTree.Element) -> str:
    line = (failure.get("message") or "").partition("\n")[0]
    return line if len(line) <= 150 else f"{line[:150]}…"


def written(rows: dict[str, Row], cases: dict[str, int]) -> str:
    """The table of all files with `cases`."""
    done = [rows[file] for file in sorted(cases) if file in rows]
    lines = [LINE.format(*COLUMNS)]
    lines += [LINE.format(*(getattr(row, name) for name in COLUMNS)).rstrip() for row in done]
    totals = [round(sum(getattr(row, name) for row in done), 1) for name in COLUMNS[1:6]]
    lines.append(LINE.format(f"{len(done)} of {len(cases)} files", *totals, "", "", "").rstrip())
    lines += ["", FAILED, *(line for row in done for line in row.failures)]
    left = {file: rows[file].missing if file in rows else number for file, number in sorted(cases.items())}
    lines += ["", MISSING, *(f"{file}: {left[file]} of {cases[file]} cases" for file in left if left[file])]
    return "\n".join(lines) + "\n"


def read(text: str) -> dict[str, Row]:
    """The rows of a table."""
    rows: dict[str, Row] = {}
    table, _, rest = text.partition(f"\n{FAILED}\n")
    for line in table.splitlines()[1:]:
        match line.split(maxsplit=8):
            case [file, cases, passed, skipped, failed, seconds, commit, date, machine] if file.endswith(".py"):
                counts = int(cases), int(passed), int(skipped), int(failed)
                rows[file] = Row(file, *counts, float(seconds), commit, date, machine)
    for line in rest.partition(f"\n{MISSING}\n")[0].splitlines():
        if (file := line.partition("::")[0]) in rows:
            rows[file].failures.append(line)
    return rows


def collect(names: list[str]) -> dict[str, int]:
    """The number of cases of each file that has any."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "campaign"]
    done = subprocess.run([*command, *names], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"error: pytest cannot collect the cases:\n{done.stdout[-_TAIL_CHARACTERS:]}")
    return dict(Counter(line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line))


def run_all(files: list[str], jobs: int, limit: float, folder: Path, store: Any) -> None:
    """Run the files, `jobs` at a time; a signal interrupts those that run, and begins no other."""
    waiting, running, stopped = [*files], list[Run](), list[int]()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopped.append(number))
    try:
        while running or (waiting and not stopped):
            while waiting and len(running) < jobs and not stopped:
                running.append(Run(waiting.pop(0), folder))
            time.sleep(0.2)
            for run in [*running]:
                if run.has_ended(0.0 if stopped else limit):
                    running.remove(run)
                    store(run)
    finally:
        for run in running:
            run.kill()


def _place() -> tuple[str, str, str]:
    # Commit, its date, and this machine.
    import torch

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout

    commit, date = git("log", "-1", "--format=%h %cs").split()
    changes = git("status", "--porcelain", "--untracked-files=no", "--", f":!{TABLE.relative_to(REPOSITORY)}")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return commit + ("+" if changes else ""), date, f"{available_cores()} × {processor()}, {gpu}, {torch.__version__}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=available_cores(), help="files beside each other")
    parser.add_argument("--minutes", type=float, default=20.0, help="limit of a file")
    parser.add_argument("--again", action="store_true", help="also files whose row is whole")
    parser.add_argument("files", nargs="*", metavar="FILE", help="these, whatever their row says; default: all")
    options = parser.parse_args()
    cases = collect([*FOLDERS])
    if unknown := [file for file in options.files if file not in cases]:
        parser.error(f"{unknown[0]} has no tests marked campaign")
    rows = read(TABLE.read_text()) if TABLE.exists() else {}
    rows = {file: row for file, row in rows.items() if file in cases}
    for file, row in rows.items():
        row.cases = cases[file]
    chosen = options.files or [f for f in cases if options.again or f not in rows or rows[f].missing]
    # The longest first, by the last run or else by their cases, so that no long one is left at the end.
    chosen.sort(key=lambda file: -rows[file].seconds if file in rows else -cases[file])
    where = _place()

    def store(run: Run) -> None:
        row = rows[run.file] = run.row(cases[run.file], *where)
        print(LINE.format(*(getattr(row, name) for name in COLUMNS)), flush=True)
        if row.failures:
            print(run.output.read_text(errors="replace")[-_TAIL_CHARACTERS:], flush=True)
        TABLE.write_text(written(rows, cases))

    with tempfile.TemporaryDirectory(prefix="zeco-matrices-") as folder:
        run_all(chosen, options.jobs, 60 * options.minutes, Path(folder), store)
    print(written(rows, cases))
    return int(any(row.failures or row.missing for row in rows.values()) or rows.keys() != cases.keys())


if __name__ == "__main__":
    sys.exit(main())
