"""Which numbers a step has; metrics.jsonl, a JSON object per logged step, and starts.jsonl, one per start of a run.

`zeco_train.training.step` adds those up that the passes measure.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypedDict, TypeVar

import torch

from zeco_train.errors import DataError
from zeco_train.system.files import jsonable, read_errors, write_errors
from zeco_train.system.numbers import compact, length_name
from zeco_train.system.small_files import parse_json, read_small, shown_value

# A million rows are about 0.4 GB.
_LARGEST_BYTES = 1 << 32
_REMEDY = "free space there or name another run_dir"

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Column(TypedDict, total=False):
    """Metadata of a column's field. Every column is in metrics.jsonl and in the trackers.

    Attributes:
        across: of `PassNumbers`: how the parts of segments, micro-batches and ranks become one number. A mean is a sum
            of parts that were divided by the count of the whole step.
        shown: its text in the progress line; without it, it is not shown.
        behind: the column whose text it follows, instead of the order of the fields.
        in_lines_only: not shown in a terminal's bar, which has less room.
    """

    across: Literal["sum", "max"]
    shown: Callable[[Any], str]
    behind: str
    in_lines_only: bool


@dataclass(frozen=True, kw_only=True)
class PassNumbers(Generic[T]):
    """What the passes of a step measure: scalars, each a `Tensor` of this rank's part, or a float of all ranks.

    Attributes:
        loss: mean token loss of the global batch, in nats.
    """

    loss: T = field(metadata=Column(across="sum", shown="loss {:.4f}".format))


@dataclass(frozen=True, kw_only=True)
class StepNumbers(PassNumbers[T]):
    """All numbers of a step; those declared here are computed the same on every rank.

    Attributes:
        grad_norm: global gradient norm before clipping.
    """

    grad_norm: T = field(metadata=Column(shown="grad_norm {:.3g}".format, in_lines_only=True))


@dataclass(frozen=True, kw_only=True)
class StepMetrics(StepNumbers[float]):
    """One row of metrics.jsonl. Times and rates are means over the steps since the previous row.

    Attributes:
        step: optimizer steps done, from 1.
        tokens: tokens trained on since the start of the run, over all ranks.
        tokens_per_second, tokens_per_second_per_device: throughput of the steps over all ranks, and divided by them.
        step_seconds: wall-clock time per step, without validation and saves.
        data_seconds: time per step spent waiting for the loader, maximum over ranks.
        job_tokens_per_second: throughput over all the time since the previous row, or since the start: with validation,
            saves, and all else between the steps.
        validation_seconds: time per step spent on validation, maximum over ranks.
        save_seconds: time per step that training waited for checkpoints, maximum over ranks.
        val_loss: mean token loss over the held-out sequences; for a mixture, the weighted mean of its stores' losses
            (`val_loss/NAME` in `extra`). `val_perplexity` in `extra` is its exponential.
        memory_gb: peak device memory allocated by PyTorch since this process started, in 10^9 bytes, maximum over
            ranks; it never decreases. GPUs only.
        mfu: model FLOPs over the device's peak; hfu: the same including recomputation. GPUs only, and for dtypes and
            devices with a known peak (`peak_flops`).
        comm_exposed_seconds: exposed communication: time per step that compute waited for scans over ranks and for
            messages of softmax attention, maximum over ranks (`zeco_train.sp.exposed`); absent if none cross ranks.
        extra: further values by name, JSON types only; each becomes a column. With `train.nonfinite=skip:N`,
            `skipped_steps` is the number of steps skipped so far, if any, and the row of a skipped step has
            `nonfinite`: the non-finite quantity, and the first tensor concerned.
    """

    step: int
    lr: float = field(metadata=Column(shown="lr {:.2e}".format, in_lines_only=True))
    tokens: int
    tokens_per_second: float = field(metadata=Column(shown=lambda rate: f"{compact(rate)} tokens/s"))
    tokens_per_second_per_device: float
    step_seconds: float
    data_seconds: float
    job_tokens_per_second: float | None = field(
        default=None, metadata=Column(shown=lambda rate: f" (job {compact(rate)})", behind="tokens_per_second")
    )
    validation_seconds: float | None = None
    save_seconds: float | None = None
    val_loss: float | None = field(default=None, metadata=Column(shown="  val_loss {:.4f}".format, behind="loss"))
    memory_gb: float | None = field(default=None, metadata=Column(shown="{:.1f} GB".format))
    mfu: float | None = field(default=None, metadata=Column(shown="mfu {:.1%}".format))
    hfu: float | None = field(default=None, metadata=Column(shown="hfu {:.1%}".format, in_lines_only=True))
    comm_exposed_seconds: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The columns that have a value, `step` first, `extra` last; `ValueError` if a name in `extra` is a column."""
        names = ["step", *(column.name for column in fields(self) if column.name not in ("step", "extra"))]
        if clash := sorted({*names} & {*self.extra}):
            raise ValueError(f"extra metrics may not be named {', '.join(clash)}")
        row = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {**row, **self.extra}


# Dense bf16 FLOP/s by a substring of the device's name, from the vendor's data sheets; the first match counts.
PEAK_FLOPS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
}


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak dense matmul throughput of a device for a dtype, in FLOP/s; None if unknown.

    bf16 only: fp32 matmuls run partly on tensor cores, as tf32 products, so no single peak applies.
    """
    if dtype is not torch.bfloat16:
        return None
    return next((flops for part, flops in PEAK_FLOPS.items() if part in device_name), None)


def utilisation(flops_per_second: float, device: torch.device, dtype: torch.dtype) -> float | None:
    """Part of its peak that a GPU reaches; None if the peak is unknown, and on CPUs."""
    peak = peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
    return None if peak is None else flops_per_second / peak


_NUMBERS = tuple(column.name for column in fields(StepMetrics) if column.name not in ("step", "extra"))
LARGEST_STEP = 10**15
_LARGEST = 1e100


class LineWriter:
    """Appends JSON objects to a file, one system call per row, so a kill can tear only the last line.

    Opening an existing file, which is created if missing, truncates a torn last line, and nothing else.

    Floats are written with all digits; NaN and infinities, which JSON lacks, as `null`. A resumed run appends: a
    repeated step has two rows, of which the last counts (`read_metrics`). While the disk is full, rows are kept in
    memory and written later; a warning is logged when this begins.

    Raises:
        DataError: it cannot be written, here or in `flush`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with write_errors(self.path, _REMEDY):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab+", buffering=0)
        self._pending = b""
        self._repair()

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row, immediately visible to other processes."""
        line = json.dumps(jsonable(row, lambda value: None), allow_nan=False, separators=(", ", ": ")) + "\n"
        was_pending = bool(self._pending)
        self._pending += line.encode()
        error = self._try_to_write()
        if error is not None and not was_pending:
            logger.warning("%s; the run goes on, its rows are kept until then", self._unwritable(error))

    def flush(self) -> None:
        """Write pending rows, or raise `DataError`."""
        error = self._try_to_write()
        if error is not None:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Close the file. May be called again."""
        if not self._file.closed:
            if self._try_to_write() is not None:
                logger.warning("%s: %d bytes of rows are lost", self.path, len(self._pending))
            self._file.close()

    def _try_to_write(self) -> OSError | None:
        assert not self._file.closed, "write after close"
        try:
            # A write to a regular file is complete, except on a full disk: partial first, then an error.
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
        except OSError as error:
            return error
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            if error is None:
                self.flush()
        finally:
            self.close()

    def _repair(self) -> None:
        size = end = os.fstat(self._file.fileno()).st_size
        while end > 0:
            start = max(0, end - 65536)
            newline = os.pread(self._file.fileno(), end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            self._file.truncate(end)
            logger.warning("%s: dropped its last line of %d bytes, which a kill has left torn", self.path, size - end)

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(self.path, f"cannot be written ({error.strerror})", _REMEDY)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, one per step, sorted by step; the run may still be writing.

    The last of several rows of a step counts. A last line without a newline is incomplete or was torn by a kill, and is
    skipped. Columns of `StepMetrics` that were NaN or infinite are None. A missing file has no rows.

    Raises:
        DataError: a line is not a JSON object with a `step`, a column of `StepMetrics` is not a number, or the file
            cannot be read; names the line and the field.
    """
    rows: dict[int, dict[str, Any]] = {}
    for number, row in read_lines(path):
        step = step_of_row(path, number, row)
        rows[step] = row | {name: _number(path, number, name, row[name]) for name in _NUMBERS if name in row}
    return [rows[step] for step in sorted(rows)]


def step_of_row(path: str | Path, number: int, row: Mapping[str, Any]) -> int:
    """The `step` of a row; raises `DataError` if it has none."""
    step = row.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= LARGEST_STEP:
        problem = wrong_value(number, "step", step, f"a whole number from 0 to {LARGEST_STEP}")
        raise DataError(path, problem, "correct or remove the line")
    return step


def wrong_value(number: int, name: str, value: object, expected: str) -> str:
    """Error text for a field of a line; long values are truncated."""
    return f"line {number}: {name} is {shown_value(value)}, not {expected}"


def _number(path: str | Path, number: int, name: str, value: object) -> float | None:
    # None for null, NaN and infinities. Magnitudes beyond 1e±100, from diverged or corrupted runs, become None or zero:
    # ratios and plot axes would overflow.
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Integers are unbounded in JSON and in Python.
    if not is_number or (isinstance(value, int) and abs(value) > _LARGEST):
        raise DataError(path, wrong_value(number, name, value, "a number or null"), "correct or remove the line")
    assert isinstance(value, int | float)
    if not abs(value) <= _LARGEST:
        return None
    return value if abs(value) >= 1 / _LARGEST else 0.0


def read_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON-lines file, numbered from 1; without an incomplete last line.

    Raises:
        DataError: a line is not a JSON object, or the file cannot be read.
    """
    path = Path(path)
    with read_errors(path):
        if not path.exists():
            return
        # What follows the last newline is empty, or a line that is not complete.
        lines = read_small(path, _LARGEST_BYTES).split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise DataError(path, f"line {number} is not a row of {path.stem}", "correct or remove the line")
        yield number, row


# --- starts.jsonl, and the labels by which runs are compared ---

# A run may resume with another backend, parallelism or machine, so its last configuration does not describe all of its
# metrics. Each start appends one line; a row of metrics.jsonl belongs to the last start before its step.
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
