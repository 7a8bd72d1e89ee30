"""A bench case of the lab, as a command of its own: `python -m lab.NAME [KEY=VALUE …]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from zeco_train.bench.case import ADVICE, Case, Report
from zeco_train.bench.config import CaseConfig, describe
from zeco_train.bench.session import Session
from zeco_train.lifecycle.end import Job, run_job
from zeco_train.system.command import docstring


@dataclass(frozen=True)
class LabCase(Case):
    """`keeps_log`: store what the project logs meanwhile; not of cases that train, which log every step."""

    keeps_log: bool = True

    def measure(self, config: CaseConfig, session: Session) -> Report:
        if self.keeps_log:
            return super().measure(config, session)
        report = Report(self.name, config, session, self.columns)
        self.run(config, session, report)
        report.finish()
        return report

    def main(self, arguments: Sequence[str]) -> int:
        """Returns the exit code."""
        return run_job(partial(self._main, arguments), ADVICE)

    def _main(self, arguments: Sequence[str], job: Job) -> int:
        if {"-h", "--help"}.isdisjoint(arguments):
            return self.start(arguments, job)
        if job.launch.rank == 0:
            print(f"{docstring(sys.modules[self.run.__module__])}\n\n{describe({self.name: self.config})}")
        return 0
