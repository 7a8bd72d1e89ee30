"""Measurements to compare: one for each run and layout, or benchmark row, with common field names."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from zeco_train.bench.stored import OtherResultsError, load_results
from zeco_train.compare import Run, read_runs
from zeco_train.errors import ConfigError, DataError
from zeco_train.sp.backend_registry import BACKENDS
from zeco_train.system.files import IDENTITY_FILE, METRICS_FILE
from zeco_train.system.small_files import read_json
from zeco_train.tracking.metrics import STARTS_FILE, Layout, read_starts

Row = dict[str, Any]
_RATE = "tokens_per_second_per_device"
# In a run's identity: what its tokens are, and of how many ids.
_DATA = (
    "data.tokens_sha256",
    "data.tokenizer",
    "data.weights",
    "data.min_document_tokens",
    "model.vocab_size",
    "task.name",
)


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile (interpolated), and count of values."""

    median: float
    p10: float
    p90: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        p10, middle, p90 = (float(np.percentile(values, q)) for q in (10, 50, 90))
        return cls(middle, p10, p90, len(values))


@dataclass(frozen=True)
class Measurement:
    """One measured layout: of a run, or of a row of a benchmark; None: not measured."""

    name: str  # of the run, or the benchmark's file
    source: str  # `training` or `benchmark`
    layout: Layout
    rate: Spread  # tokens per second and device
    step_seconds: float  # median duration of a step, and of the parts of it spent waiting for scans and for data
    exposed_seconds: float | None = None
    data_seconds: float | None = None
    memory_gb: float | None = None  # peak memory of a device, in 10^9 bytes
    mfu: float | None = None  # median, as is the next
    hfu: float | None = None
    loss: float | None = None  # last value, as is the next
    val_loss: float | None = None
    ratio: float | None = None  # throughput relative to sp=dp with the same work on as many devices, if that was run

    def as_dict(self) -> Row:
        return asdict(self) | {"layout": self.layout.as_dict()}


@dataclass(frozen=True)
class Comparison:
    """Runs and benchmarks to compare."""

    measurements: list[Measurement]  # in input order
    # Runs that train on the same data, batches and seed, so that their losses are comparable; the first of each is the
    # reference.
    families: list[list[Run]]
    benchmarks: dict[str, dict[str, Any]]  # parsed results, by name
    notes: list[str]  # omissions, and their reasons
    # Of each run, by name, what it trains on: losses of other data or vocabularies cannot be compared.
    data: dict[str, str] = field(default_factory=dict)


def read(paths: Sequence[Path]) -> Comparison:
    """Read runs and benchmarks; see the command for PATH.

    Raises:
        DataError: a path is neither, or cannot be read; other results among several files are noted only.
        ConfigError: a duplicate run.
    """
    files = [path for path in paths if path.is_file()]
    notes: list[str] = []
    folders = [folder for path in paths if not path.is_file() for folder in _run_folders(path, notes)]
    runs = read_runs(folders) if folders else []
    measurements = []
    families: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        families[_identity(run.path)].append(run)
        measurements += _of_run(run, notes)
    measurements = _with_ratios(measurements, {run.name: _identity(run.path) for run in runs})
    benchmarks: dict[str, dict[str, Any]] = {}
    for name, path in zip(_file_names(files), files, strict=True):
        try:
            benchmarks[name] = load_results(path)
        except OtherResultsError as error:
            # Folders of results have other files, too.
            if len(paths) == 1:
                raise
            notes.append(f"left out: {error}")
    for name, results in benchmarks.items():
        measurements += _of_benchmark(name, results, notes)
    data = {run.name: _identity(run.path, _DATA) for run in runs}
    if apart := _grouped(data):
        notes.insert(0, f"losses of different data or vocabularies cannot be compared: {apart}")
    return Comparison(measurements, list(families.values()), benchmarks, notes, data)


def _grouped(data: Mapping[str, str]) -> str:
    # Names of runs by their data; empty if all have the same.
    groups: dict[str, list[str]] = defaultdict(list)
    for name, key in data.items():
        groups[key].append(name)
    return " | ".join(", ".join(names) for names in groups.values()) if len(groups) > 1 else ""


def _run_folders(path: Path, notes: list[str]) -> list[Path]:
    # `path` itself if it is a run's folder, else its subfolders that are; those without metrics yet are noted.
    if (path / METRICS_FILE).exists():
        return [path]
    files = sorted(path.glob(f"*/{METRICS_FILE}"))
    found = [file.parent for file in files if file.stat().st_size]
    notes += [f"{file.parent.name} has no rows yet" for file in files if file.parent not in found]
    if not found:
        problem = f"has no {METRICS_FILE}, nor has a folder in it"
        raise DataError(path, problem, "give folders of runs that have trained")
    return found


def _file_names(files: Sequence[Path]) -> list[str]:
    # The file's own name, prefixed by parent folders as far as needed.
    parts = [path.resolve().with_suffix("").parts[1:] for path in files]
    for depth in range(max(map(len, parts), default=0) + 1):
        names = ["-".join(own[-depth - 1 :]) for own in parts]
        if len(set(names)) == len(names):
            return names
    raise ConfigError("PATH", " ".join(map(str, files)), "names a file twice")


def _identity(path: Path, keys: Sequence[str] = ()) -> str:
    # Of everything that determines a run's losses, or of some keys; the path itself if the folder does not record it.
    try:
        identity = read_json(path / IDENTITY_FILE)
        return json.dumps({key: identity.get(key) for key in keys} if keys else identity, sort_keys=True)
    except (OSError, ValueError):
        return str(path)


def _of_run(run: Run, notes: list[str]) -> list[Measurement]:
    # One for each layout of the run, in chronological order.
    last = [*run.rows.values()][-1]
    starts = read_starts(run.path)
    if not starts:
        raise DataError(run.path / STARTS_FILE, "is not there, or empty", "give the folders of runs")
    by_layout: dict[Layout, list[Row]] = defaultdict(list)
    for index, start in enumerate(starts):
        # A repeated step has the row of the later start, so each start ends before the next start's first step.
        following = [later.step for later in starts[index + 1 :]]
        stop = min(following, default=math.inf)
        rows = [row for step, row in run.rows.items() if start.step < step <= stop]
        # The first step includes kernel compilation and connection setup.
        by_layout[start.layout] += rows[1:] or rows
    measured = [_of_rows(run.name, layout, rows) for layout, rows in by_layout.items() if _values(rows, _RATE)]
    if len(measured) > 1:
        notes.append(f"{run.name} was split in {len(measured)} ways, one after the other, and has a line for each")
    if not measured:
        notes.append(f"{run.name} has no throughput yet")
    if last.get("loss") is None:
        problem = f": {last['nonfinite']}" if last.get("nonfinite") else ""
        notes.append(f"{run.name} ends with step {max(run.rows)}, whose loss is not finite{problem}")
    return measured


def _of_rows(name: str, layout: Layout, rows: list[Row]) -> Measurement:
    def middle(column: str) -> float | None:
        values = _values(rows, column)
        return median(values) if values else None

    losses, val_losses = _values(rows, "loss"), _values(rows, "val_loss")
    return Measurement(
        name=name,
        source="training",
        layout=layout,
        rate=Spread.of(_values(rows, _RATE)),
        step_seconds=middle("step_seconds") or math.nan,
        exposed_seconds=middle("comm_exposed_seconds"),
        data_seconds=middle("data_seconds"),
        memory_gb=max(_values(rows, "memory_gb"), default=None),
        mfu=middle("mfu"),
        hfu=middle("hfu"),
        loss=losses[-1] if losses else None,
        val_loss=val_losses[-1] if val_losses else None,
    )


def _values(rows: Iterable[Row], column: str) -> list[float]:
    return [row[column] for row in rows if row.get(column) is not None]


def _with_ratios(measurements: list[Measurement], identities: Mapping[str, str]) -> list[Measurement]:
    # To the first `dp` measurement with the same work on as many devices of the same kind.
    def work(measurement: Measurement) -> tuple[object, ...]:
        layout = measurement.layout
        return identities[measurement.name], layout.devices, layout.device_name, layout.strategy

    # Reversed, since the last entry of a key stays: the first measurement is the reference.
    base = {work(m): m.rate.median for m in reversed(measurements) if m.layout.backend == "dp"}
    return [
        replace(m, ratio=m.rate.median / base[work(m)]) if base.get(work(m)) else m  # a rate of 0 is no reference
        for m in measurements
    ]


def _of_benchmark(name: str, results: Mapping[str, Any], notes: list[str]) -> list[Measurement]:
    if results["case"] != "model":  # the other cases time parts of a step, and have their own plots
        return []
    found = []
    for row in results["rows"]:
        if not row.get("median_ms"):
            notes.append(f"{name}: {row.get('variant')} was not measured ({row.get('note', 'no reason is given')})")
        elif row["variant"].split(":")[0] in BACKENDS:
            found.append(_of_benchmark_row(name, results, row))
        else:
            notes.append(f"{name}: {row['variant']} is in the benchmark's own picture only")
    return found


def _of_benchmark_row(name: str, results: Mapping[str, Any], row: Row) -> Measurement:
    config, devices, tokens = results["config"], results["world_size"], row["tokens"]
    heads = {other["heads"] for other in results["rows"] if other.get("median_ms")}
    sp_size = 1 if row["variant"] == "dp" else devices
    layout = Layout(
        backend=row["variant"],
        model=row["model"] if len(heads) == 1 else f"{row['model']}_h{row['heads']}",
        seq_len=row.get("seq_len") or tokens * sp_size,
        sp_size=sp_size,
        devices=devices,
        strategy=config["strategy"],
        segments=config["segments"],
        dtype=config["dtype"],
        device_name=str(results["environment"].get("device_name", "")),
    )
    # The slowest step has the lowest throughput.
    rates = [
        1e3 * tokens * (row.get("micro_batches") or 1) / row[column] for column in ("median_ms", "p90_ms", "p10_ms")
    ]
    exposed = row.get("exposed_ms")
    return Measurement(
        name=name,
        source="benchmark",
        layout=layout,
        rate=Spread(row.get("tokens_per_second_per_gpu") or rates[0], rates[1], rates[2], row["runs"]),
        step_seconds=row["median_ms"] / 1e3,
        exposed_seconds=None if exposed is None else exposed / 1e3,
        memory_gb=row.get("peak_gb"),
        mfu=row.get("mfu"),
        hfu=row.get("hfu"),
        loss=row.get("loss"),
        ratio=row.get("ratio"),
    )
