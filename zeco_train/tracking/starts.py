"""Layout of each start of a run: starts.jsonl, and the labels by which runs are compared.

A run may resume with another backend, parallelism or machine, so its last configuration does not describe all of its
metrics. Each start appends one line; a row of metrics.jsonl belongs to the last start before its step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zeco_train.errors import DataError
from zeco_train.system.numbers import length_name
from zeco_train.tracking.metrics import LARGEST_STEP, LineWriter, read_lines, step_of_row, wrong_value

STARTS_FILE = "starts.jsonl"


@dataclass(frozen=True)
class Layout:
    """The conditions of a throughput measurement; the columns of every comparison, of training runs and benchmarks.

    Attributes:
        seq_len: tokens of a whole sequence.
        sp_size: ranks that share a sequence.
        devices: number of all ranks.
        segments: parts of a sequence, in time.
        dtype: of the compute.
        device_name: of rank 0's device; empty if unknown.
    """

    backend: str
    model: str
    seq_len: int
    sp_size: int
    devices: int
    strategy: str = ""
    segments: int = 1
    dtype: str = ""
    device_name: str = ""

    @property
    def tokens_per_device(self) -> int:
        """Tokens of a sequence on the rank with the most."""
        return -(-self.seq_len // self.sp_size)

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, and `tokens_per_device`."""
        return {**asdict(self), "tokens_per_device": self.tokens_per_device}

    @property
    def tags(self) -> list[str]:
        """Tags for an experiment tracker, one per dimension of comparison."""
        named = (
            ("sp", self.backend),
            ("sp.size", self.sp_size),
            ("seq_len", length_name(self.seq_len)),
            ("model", self.model),
            ("strategy", self.strategy),
            ("devices", self.devices),
        )
        # W&B rejects longer tags.
        return [f"{name}={value}"[:64] for name, value in named if value]

    @property
    def group(self) -> str:
        """Group of the runs with this model and length, which differ in their parallelism."""
        return f"{self.model}-{length_name(self.seq_len)}"


def layout_of(config: Mapping[str, Any], devices: int, device_name: str = "") -> Layout:
    """The layout of a run from its resolved configuration."""
    return Layout(
        backend=config["sp"]["backend"],
        model=config["model"]["name"],
        seq_len=int(config["data"]["seq_len"]),
        sp_size=int(config["sp"]["size"]),
        devices=devices,
        strategy=config["parallel"]["strategy"],
        segments=int(config["train"]["segments"]),
        dtype=config["train"]["dtype"],
        device_name=device_name,
    )


@dataclass(frozen=True)
class Start:
    """One start of a run, after `step` optimizer steps; `environment` has machine, versions and commit."""

    step: int
    layout: Layout
    environment: Mapping[str, Any]


def append_start(run_dir: Path, start: Start) -> None:
    """Add a line to starts.jsonl; `DataError` if it cannot be written."""
    row = {
        "step": start.step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **asdict(start.layout),
        "environment": dict(start.environment),
    }
    with LineWriter(run_dir / STARTS_FILE) as writer:
        writer.append(row)


def read_starts(run_dir: Path) -> list[Start]:
    """The starts in starts.jsonl, in order; none if the file is missing.

    Raises:
        DataError: a line is not a start; names the line and the field.
    """
    path = run_dir / STARTS_FILE
    return [_start_of(path, number, row) for number, row in read_lines(path)]


def _start_of(path: Path, number: int, row: Mapping[str, Any]) -> Start:
    def check(name: str, is_right: bool, expected: str) -> None:
        if not is_right:
            raise DataError(path, wrong_value(number, name, row.get(name), expected), "correct or remove the line")

    values = {column.name: row.get(column.name) for column in fields(Layout)}
    for column in fields(Layout):
        value = values[column.name]
        # Annotations are text in this module, by the import from __future__.
        if column.type == "int":
            is_count = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST_STEP
            check(column.name, is_count, f"a whole number from 1 to {LARGEST_STEP}")
        else:
            check(column.name, isinstance(value, str), "text")
    environment = row.get("environment")
    check("environment", isinstance(environment, dict), "an object")
    return Start(step_of_row(path, number, row), Layout(**values), environment or {})  # type: ignore[arg-type]
