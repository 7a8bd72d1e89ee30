"""A case of the benchmarks: its settings and what it measures, as a job of all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from zeco_train.bench import figures
from zeco_train.bench.config import CaseConfig, describe
from zeco_train.bench.report import LogLines, Report
from zeco_train.bench.session import Session
from zeco_train.lifecycle.end import Advice, Job, run_job
from zeco_train.system.command import docstring

ADVICE = Advice(
    lost_peer="the results so far stand",
    memory="fewer tokens, heads or MiB need less, and so do segments=M and recompute=full; the results so far stand",
    timeout_key="timeout_seconds",
)


@dataclass(frozen=True)
class Case:
    """A benchmark: its settings, and what measures with them.

    Attributes:
        keeps_log: store what the project logs meanwhile; not of cases that train, which log every step.
    """

    config: type[CaseConfig]
    run: Callable[[Any, Session], Report]
    keeps_log: bool = True

    def measure(self, config: CaseConfig, session: Session) -> Report:
        """Run, and plot the results.

        Raises:
            ZecoError: a wrong result, an unwritable folder, or a lost rank.
        """
        lines = LogLines(session)
        with lines if self.keeps_log else nullcontext():
            report = self.run(config, session)
        report.notes += lines.texts
        report.finish()
        if session.mesh.is_main:
            figures.plot([report.as_json()], report.folder)
        return report

    def start(self, arguments: Sequence[str], job: Job) -> int:
        """Join the other ranks and run; returns the process's exit code, 1 if a measurement fails its check."""
        config = self.config.load(arguments)
        with job.joining(timedelta(seconds=config.timeout_seconds)):
            session = Session.open(config, job.launch, job)
        report = self.measure(config, session)
        session.drain()
        if session.mesh.is_main:
            print(f"results are in {report.folder}", flush=True)
        return 1 if report.failures else 0

    def main(self, arguments: Sequence[str]) -> int:
        """The case as a command of its own, `python -m MODULE [KEY=VALUE …]`; returns the exit code."""
        return run_job(partial(self._main, arguments), ADVICE)

    def _main(self, arguments: Sequence[str], job: Job) -> int:
        if {"-h", "--help"}.isdisjoint(arguments):
            return self.start(arguments, job)
        if job.launch.rank == 0:
            module = sys.modules[self.run.__module__]
            name = module.__name__.removesuffix(".__main__").rpartition(".")[2]
            print(f"{docstring(module)}\n\n{describe({name: self.config})}")
        return 0
