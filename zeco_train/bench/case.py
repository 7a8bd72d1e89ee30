"""A case of the benchmarks: its settings and what it measures, as a job of all ranks, and its output.

The output is a table on the terminal, and results.json, table.txt and plots in a folder.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from zeco_train.bench import figures
from zeco_train.bench.config import CaseConfig
from zeco_train.bench.session import Row, Session
from zeco_train.bench.stored import FORMAT
from zeco_train.config.schema import to_plain
from zeco_train.distributed.mesh import Device
from zeco_train.errors import ConfigError
from zeco_train.lifecycle.end import Advice, Job
from zeco_train.system.environment import environment
from zeco_train.system.files import write_result
from zeco_train.system.paths import check_outputs
from zeco_train.system.terminal import Columns, format_table

T = TypeVar("T")
RESULTS_FILE, TABLE_FILE = "results.json", "table.txt"

ADVICE = Advice(
    lost_peer="the results so far stand",
    memory="fewer tokens, heads or MiB need less, and so do segments=M and recompute=full; the results so far stand",
    timeout_key="timeout_seconds",
)


class Report:
    """Collects rows; rank 0 writes them to a folder after each configuration.

    Attributes:
        rows: one for each configuration, variant, pass and mode; a note explains missing results.
        notes: about the whole run.
        failures: measurements that failed a check; the command then ends with exit code 1.
    """

    def __init__(self, case: str, config: Any, session: Session, columns: Columns) -> None:
        self.folder = Path(config.out or f"runs/bench/{case}-{session.world_size}")
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.failures: list[str] = []
        self._session, self._columns = session, columns
        # Before anything is measured: results that cannot be written would be lost.
        names = RESULTS_FILE, TABLE_FILE
        session.agree(lambda: check_outputs("out", self.folder, names) if session.mesh.is_main else None)
        self._header = {
            "format": FORMAT,
            "case": case,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv[1:],
            "config": to_plain(config),
            "world_size": session.world_size,
            "environment": environment(session.device, config.commit),
        }

    def note(self, text: str) -> None:
        self.notes.append(text)
        self._session.say(text)

    def fail(self, text: str) -> None:
        """Record that a measurement failed its check, and print it on stderr."""
        self.failures.append(text)
        self.notes.append(f"FAILED: {text}")
        self._session.say(self.notes[-1], sys.stderr)

    def add(self, rows: Sequence[Row]) -> None:
        """Add the rows of a configuration, print them, and write all results so far.

        Raises:
            DataError: the folder cannot be written, on all ranks.
        """
        self._session.say(format_table(rows, self._columns, heading=not self.rows))
        self.rows += rows
        self._session.agree(self._write)

    def in_budget(self, items: Iterable[T], name: Callable[[T], str]) -> Iterator[T]:
        """The items that may be measured, as long as the longest so far would still end in time; then a note."""
        for item in items:
            if not self._session.within_budget():
                budget = self._header["config"]["budget_seconds"]
                self.note(f"{name(item)} and what follows is not measured: budget_seconds={budget:g}")
                return
            self._session.enter(name(item))
            started = time.monotonic()
            yield item
            self._session.spent(time.monotonic() - started)

    def finish(self) -> None:
        """Write everything, final notes included, and plot it."""
        self._session.agree(self._write)
        if self._session.mesh.is_main:
            figures.plot([self.as_json()], self.folder)

    def as_json(self) -> dict[str, Any]:
        return {**self._header, "notes": self.notes, "rows": self.rows}

    def _write(self) -> None:
        if self._session.mesh.is_main:
            write_result(self.folder / RESULTS_FILE, json.dumps(self.as_json()))
            table = "\n".join([format_table(self.rows, self._columns), *self.notes])
            write_result(self.folder / TABLE_FILE, f"{table}\n")


@contextmanager
def log_lines(session: Session) -> Iterator[list[str]]:
    """Print and collect each distinct line of level INFO that the project logs: choices of `auto`, and fallbacks."""
    texts: list[str] = []

    def emit(record: logging.LogRecord) -> None:
        if (text := record.getMessage()) not in texts:
            texts.append(text)
            session.say(text)

    logger, handler = logging.getLogger("zeco_train"), logging.Handler(logging.INFO)
    handler.emit = emit  # type: ignore[method-assign]
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def time_columns(unit: str, digits: int, kinds: Sequence[str] = ("median", "p10", "p90", "min", "max")) -> Columns:
    """Columns for the times of rows; `unit` as in field names, `ms` or `us`."""
    headings = {kind: f"median {unit.replace('u', 'µ')}" if kind == "median" else kind for kind in kinds}
    return {f"{kind}_{unit}": (heading, f">10:.{digits}f") for kind, heading in headings.items()}


@dataclass(frozen=True)
class Case:
    """A benchmark: its settings, the columns of its table, and what measures with them into a report.

    `starts_ranks`: it is one process without a GPU, which starts those that it measures.
    """

    name: str
    config: type[CaseConfig]
    columns: Columns
    run: Callable[[Any, Session, Report], None]
    starts_ranks: bool = False

    def measure(self, config: CaseConfig, session: Session) -> Report:
        """Run, store what the project logs meanwhile, and plot the results.

        Raises:
            ZecoError: a wrong result, an unwritable folder, or a lost rank.
        """
        with log_lines(session) as lines:
            report = Report(self.name, config, session, self.columns)
            self.run(config, session, report)
        report.notes += lines
        report.finish()
        return report

    def start(self, arguments: Sequence[str], job: Job) -> int:
        """Join the other ranks and run; returns the exit code, 1 if a measurement fails its check."""
        config = self.config.load(arguments)
        if self.starts_ranks and job.launch.world_size > 1:
            raise ConfigError("case", self.name, "starts its ranks itself (ranks=N); start it without torchrun")
        own = replace(config, device=Device.cpu) if self.starts_ranks else config
        with job.joining(timedelta(seconds=config.timeout_seconds)):
            session = Session.open(own, job.launch, job)
        report = self.measure(config, session)
        session.drain()
        if session.mesh.is_main:
            print(f"results are in {report.folder}", flush=True)
        return 1 if report.failures else 0
