"""Question: do tests pass beside busy processes, and with the code paths of other processors?
Command: python -m lab.campaigns.under_load --rounds 10 (tests marked `processes`, beside 4 busy processes), or
    --processors (tests marked `numeric`, under each of `PROCESSORS`) [PYTEST_ARGUMENT …]
Date: of each change to tests that wait
Answer: the end of pytest's output of each run with a failure, then for each test the numbers of passes and failures,
    its longest time and its highest CPU time; it exits with 1 if a test has failed, or if pytest could not run at all.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.support.commands import REPOSITORY

# Make math libraries take the code paths of processors with fewer instructions.
PROCESSORS = (
    {"MKL_CBWR": "COMPATIBLE"},
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"ONEDNN_MAX_CPU_ISA": "AVX2"},
)
_TAIL_CHARACTERS = 20_000


@dataclass
class Tally:
    """Results of one test, over all runs.

    Attributes:
        slowest: seconds, setup included.
        cpu: maximum CPU seconds of a run.
    """

    passes: int = 0
    failures: int = 0
    slowest: float = 0.0
    cpu: float = 0.0


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """This many busy-looping processes; they end with this one, however it ends."""
    code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def read_report(path: Path, tallies: dict[str, Tally]) -> None:
    """Add pytest's JUnit report; skipped tests are ignored."""
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if case.find("skipped") is not None:
            continue
        tally = tallies.setdefault(f"{case.get('classname')}::{case.get('name')}", Tally())
        failed = case.find("failure") is not None or case.find("error") is not None
        tally.failures += failed
        tally.passes += not failed
        tally.slowest = max(tally.slowest, float(case.get("time", 0)))
        seconds = [float(found.get("value", 0)) for found in case.iter("property") if found.get("name") == "cpu"]
        tally.cpu = max(tally.cpu, *seconds, 0.0)


def run_tests(arguments: Sequence[str], environment: dict[str, str], tallies: dict[str, Tally]) -> bool:
    """Run pytest once; returns whether it ran and nothing failed."""
    with tempfile.TemporaryDirectory(prefix="zeco-load-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        done = subprocess.run(
            command, cwd=REPOSITORY, env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(done.stdout[-_TAIL_CHARACTERS:], done.stderr[-_TAIL_CHARACTERS:], sep="\n", flush=True)
        if report.exists():
            read_report(report, tallies)
        else:
            # Killed, or stopped before collection.
            print(f"pytest left no report; it ended with {done.returncode}", flush=True)
            return False
    return done.returncode == 0


def table(tallies: dict[str, Tally]) -> str:
    """Failing tests first, then by time."""
    order = sorted(tallies.items(), key=lambda item: (-item[1].failures, -item[1].slowest))
    lines = [
        f"{tally.passes:6} {tally.failures:8} {tally.slowest:9.1f} {tally.cpu:5.1f}  {name}" for name, tally in order
    ]
    return "\n".join(["passes failures slowest s CPU s  test", *lines])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="how often to run the tests")
    parser.add_argument("--busy", type=int, default=None, help="busy processes; 4, but none with --processors")
    parser.add_argument("--processors", action="store_true", help="a round for each set of variables")
    options, rest = parser.parse_known_args(arguments)
    if options.rounds < 1 or (options.busy or 0) < 0:
        parser.error("--rounds must be ≥ 1, and --busy ≥ 0")
    if not any(argument == "-m" or argument.partition("::")[0].endswith(".py") for argument in rest):
        rest = ["-m", "numeric" if options.processors else "processes", *rest]
    environments = PROCESSORS if options.processors else ({},)
    busy = options.busy if options.busy is not None else 0 if options.processors else 4
    tallies: dict[str, Tally] = {}
    sound = True
    with busy_processes(busy):
        for number in range(options.rounds):
            for environment in environments:
                began = time.monotonic()
                passed = run_tests(rest, environment, tallies)
                sound = sound and passed
                what = " ".join(f"{name}={value}" for name, value in environment.items()) or f"{busy} busy processes"
                how = "passed" if passed else "FAILED"
                print(f"round {number + 1}, {what}: {how} in {time.monotonic() - began:.0f} s", flush=True)
    print(f"\n{table(tallies)}")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
