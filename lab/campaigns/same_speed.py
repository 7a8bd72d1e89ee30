"""Question: are two versions of this project, or two configurations of one, equally fast within one session?
Command: python -m lab.campaigns.same_speed COMMIT|FOLDER [--case step|operator] [--turns 5] [--seconds 5] [KEY=VALUE …]
    python -m lab.campaigns.same_speed . --this optim=muon model=gla_340m     two configurations of one version
Date: –
Answer: medians of the turns and their ratio; tests/gpu_results.md has those of GPUs.

Measured are training steps, with settings of train.py, or one layer's operator.

The two versions run in separate processes, one at a time: the other one is stopped (SIGSTOP) and its device idle. They
take turns, so that a slowdown of the machine affects both. Prints the median of each turn, the ratio of speeds with its
spread over the turns (this version over the other one: above 1 is faster), and for `step` whether the losses of all
common steps are bitwise equal.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from lab.campaigns.same_bits import sources
from tests.support.commands import REPOSITORY

_START_SECONDS = 240.0
# Steps to drop at the start of a turn: the one in progress when the process was stopped, and those with cold caches.
_LEFT_OUT = 3
_OPERATOR = Path(__file__).with_name("operator_rows.py")
_ENDLESS = ["train.steps=1000000", "train.log_every=1", "train.eval_every=0", "checkpoint.every=0", "logger=none"]


class Contender:
    """A running version, which appends a row with `step_seconds` to a file for each step.

    Args:
        tree: sources.
        case: `step` or `operator`.
        settings: of train.py; of the operator: B, T, H, K, V, dtype, device.
        folder: for output files.
    """

    def __init__(self, tree: Path, case: str, settings: Sequence[str], folder: Path) -> None:
        run = folder / "run"
        self._rows = run / "metrics.jsonl" if case == "step" else folder / "rows.jsonl"
        train = [str(tree / "train.py"), *_ENDLESS, *settings, f"run_dir='{run}'"]
        command = train if case == "step" else [str(_OPERATOR), str(self._rows), *settings]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, *command], cwd=folder, env=environment, stdout=self._log, stderr=subprocess.STDOUT
        )

    def rows(self) -> list[dict[str, float]]:
        """All complete rows so far."""
        text = self._rows.read_text() if self._rows.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def warm_up(self) -> None:
        """Wait for the first steps, then stop.

        Raises:
            RuntimeError: it ended, or timed out.
        """
        deadline = time.monotonic() + _START_SECONDS
        while len(self.rows()) < 2 * _LEFT_OUT:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(Path(self._log.name).read_text()[-3000:])
            time.sleep(0.2)
        self._process.send_signal(signal.SIGSTOP)

    def turn(self, seconds: float) -> list[float]:
        """Run for this many seconds; returns the seconds of each step."""
        done = len(self.rows())
        self._process.send_signal(signal.SIGCONT)
        time.sleep(seconds)
        while len(self.rows()) < done + 2 * _LEFT_OUT and self._process.poll() is None:
            time.sleep(0.1)
        self._process.send_signal(signal.SIGSTOP)
        return [row["step_seconds"] for row in self.rows()[done + _LEFT_OUT :]]

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        self._log.close()


@contextmanager
def contenders(other: str, case: str, settings: Sequence[str], own: Sequence[str]) -> Iterator[list[Contender]]:
    """The other version with `settings`, and this one with `own` on top, both warmed up and stopped."""
    with ExitStack() as stack:
        tree = stack.enter_context(sources(other))
        both = []
        for name, path, more in (("other", tree, ()), ("this", REPOSITORY, own)):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"zeco-{name}-")))
            contender = Contender(path, case, [*settings, *more], folder)
            stack.callback(contender.close)
            contender.warm_up()
            both.append(contender)
        yield both


def main() -> int:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description="the speed of two versions, in turns")
    parser.add_argument("other", metavar="COMMIT|FOLDER")
    parser.add_argument("--case", choices=("step", "operator"), default="step")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn (default: 5)")
    parser.add_argument("--this", action="append", default=[], metavar="KEY=VALUE", help="for this version only")
    options, settings = parser.parse_known_args()
    ratios = []
    with contenders(options.other, options.case, settings, options.this) as both:
        for number in range(1, options.turns + 1):
            # Alternate which version goes first.
            order = both if number % 2 else both[::-1]
            times = {contender: contender.turn(options.seconds) for contender in order}
            other, this = (median(times[contender]) for contender in both)
            ratios.append(other / this)
            print(f"turn {number}: other {1e3 * other:.3f} ms, this {1e3 * this:.3f} ms, {ratios[-1]:.3f}", flush=True)
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"{options.case}: ratio of speeds {median(ratios):.3f} (turns: {spread})")
        if options.case == "step":
            pairs = [(a["loss"], b["loss"]) for a, b in zip(*(c.rows() for c in both), strict=False)]
            different = [step for step, (a, b) in enumerate(pairs, start=1) if a != b]
            print(f"losses of {len(pairs)} steps: " + (f"differ from step {different[0]}" if different else "the same"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
