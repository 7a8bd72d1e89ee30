"""Several runs, and benchmarks, on one page: `python -m zeco_train.report PATH … [--out FOLDER] [--title TEXT]`.

A PATH is the folder of a run, a folder of such folders, or the results.json of a benchmark. The report is a PNG and a
self-contained HTML page: throughput by backend, length and devices, loss curves and their differences, and the step
time lost to communication and data loading. The page is made from page.html: pictures, styles and script are embedded.
"""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    run_command("zeco_train.report.__main__")

import argparse
import base64
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from zeco_train.bench.figures import plot
from zeco_train.compare import COMPARED, Run, describe, show_difference
from zeco_train.errors import DataError
from zeco_train.report.measurements import Comparison, Measurement, read
from zeco_train.report.panels import PANEL_DPI, PANEL_INCHES, Panel, panel_png, panels, whole_figure
from zeco_train.system.command import Parser, docstring, errors_in_a_line, user_path
from zeco_train.system.figures import save_figure
from zeco_train.system.files import write_json_result, write_result
from zeco_train.system.numbers import compact, length_name
from zeco_train.system.paths import check_output_folder, check_outputs
from zeco_train.system.terminal import visible

PAGE_FILE, PICTURE_FILE, RESULTS_FILE = "report.html", "report.png", "report.json"


@errors_in_a_line
def main(arguments: Sequence[str]) -> int:
    """Write the report; returns the process's exit code."""
    parsed = _parse(arguments)
    print(visible(write_report(parsed.paths, parsed.out, parsed.title)))
    return 0


def write_report(paths: Sequence[Path], out: Path, title: str) -> str:
    """Read runs and benchmarks, and write page, picture and figures; returns a one-line summary.

    Raises:
        ZecoError: a path is neither a run nor a benchmark, or a file cannot be written.
    """
    check_output_folder("--out", out)
    comparison = read(paths)
    # After all that may be refused, since it warns of files that it replaces.
    check_outputs("--out", out, (PAGE_FILE, PICTURE_FILE, RESULTS_FILE))
    drawn = panels(comparison)
    files = [out / PAGE_FILE]
    if drawn:
        files.append(save_figure(whole_figure(drawn, title), out / PICTURE_FILE))
    files.append(out / RESULTS_FILE)
    rows = [measurement.as_dict() for measurement in comparison.measurements]
    write_json_result(out / RESULTS_FILE, {"title": title, "measurements": rows, "notes": comparison.notes})
    write_result(out / PAGE_FILE, page(title, comparison, drawn, _benchmark_pictures(comparison)))
    for note in comparison.notes:
        print(visible(note), file=sys.stderr)
    runs = sum(len(family) for family in comparison.families)
    counts = [(runs, "run"), (len(comparison.benchmarks), "benchmark")]
    found = ", ".join(f"{count} {what}{'' if count == 1 else 's'}" for count, what in counts)
    return f"{found}: {', '.join(map(str, files))}"


def _benchmark_pictures(comparison: Comparison) -> dict[str, bytes]:
    pictures = {}
    with tempfile.TemporaryDirectory() as folder:
        # Numbers as names: a file may be called `...json`.
        for number, (name, results) in enumerate(comparison.benchmarks.items()):
            for path in plot([results], Path(folder, str(number))):
                pictures[f"{name}: {path.stem} (the dashed lines are the ZeCO paper's own figures)"] = path.read_bytes()
    return pictures


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m zeco_train.report", description=docstring(sys.modules[__name__]))
    parser.add_argument("paths", nargs="+", type=user_path, metavar="PATH", help="runs, folders of runs, results.json")
    parser.add_argument(
        "--out", type=user_path, default=Path("runs/report"), metavar="FOLDER", help="default: runs/report"
    )
    parser.add_argument("--title", default="ZeCO-Train: comparison of runs", help="of the page")
    return parser.parse_args(arguments)


@dataclass(frozen=True)
class _Column:
    """A column of the table of measurements; `hint` is its tooltip, `value` the sort key."""

    heading: str
    hint: str
    value: Callable[[Measurement], Any]
    show: Callable[[Any], str] = str


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def _spread(measurement: Measurement) -> str:
    rate = measurement.rate
    return "" if rate.count == 1 else f"{rate.p10:,.0f}–{rate.p90:,.0f}"


_COLUMNS = (
    _Column("name", "the run, or the benchmark's file", lambda m: m.name),
    _Column("backend", "what joins the shards, sp=", lambda m: m.layout.backend),
    _Column("length", "tokens of a sequence", lambda m: m.layout.seq_len, length_name),
    _Column("tokens/device", "of a sequence, on one device", lambda m: m.layout.tokens_per_device, length_name),
    _Column("devices", "all ranks", lambda m: m.layout.devices),
    _Column("sp.size", "ranks that share a sequence", lambda m: m.layout.sp_size),
    _Column(
        "tokens/s/device", "median of the rows, the first left out", lambda m: m.rate.median, lambda v: f"{v:,.0f}"
    ),
    _Column("spread", "p10–p90: of ten rows one is slower, and one is faster", _spread),
    _Column("rows", "how many the median is of", lambda m: m.rate.count),
    _Column("of dp", "over sp=dp with the same work and devices", lambda m: m.ratio, _percent),
    _Column("step, ms", "median", lambda m: m.step_seconds, _ms),
    _Column("exposed, ms", "compute waited for scans, median", lambda m: m.exposed_seconds, _ms),
    _Column("data, ms", "waited for data, median", lambda m: m.data_seconds, _ms),
    _Column("memory, GB", "of the fullest device", lambda m: m.memory_gb, lambda v: f"{v:.1f}"),
    _Column("MFU", "model FLOPs over the device's peak", lambda m: m.mfu, _percent),
    _Column("HFU", "the same with what was computed again", lambda m: m.hfu, _percent),
    _Column("loss", "the last one, training", lambda m: m.loss, lambda v: f"{v:.4f}"),
    _Column("val. loss", "the last one, validation", lambda m: m.val_loss, lambda v: f"{v:.4f}"),
    _Column("model", "", lambda m: m.layout.model),
    _Column("strategy", "where parameters live, parallel=", lambda m: m.layout.strategy),
    _Column("dtype", "of the compute", lambda m: m.layout.dtype),
    _Column("device", "", lambda m: m.layout.device_name),
    _Column("source", "a run's own rows, or a benchmark", lambda m: m.source),
)


@dataclass(frozen=True)
class Table:
    """A table of the page."""

    caption: str
    headings: Sequence[tuple[str, str]]  # names of the columns, and their tooltips
    rows: Sequence[Sequence[tuple[Any, str]]]  # of cells, (sort key, text); the first of a row is its header

    def is_number(self, column: int) -> bool:
        return any(isinstance(row[column][0], int | float) for row in self.rows)


def page(title: str, comparison: Comparison, drawn: Sequence[Panel], pictures: dict[str, bytes]) -> str:
    """The report as an HTML page; `pictures` are further PNGs, by caption."""
    # Names come from strangers' files: all values are escaped.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # JavaScript reads `Infinity` but not Python's `inf`.
    environment.filters["sort_key"] = lambda value: "Infinity" if value == math.inf else repr(value)
    return environment.get_template("page.html").render(
        title=title,
        overview=_overview(comparison),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        throughput=_throughput(comparison.measurements),
        panels=[(panel, _data(panel_png(panel))) for panel in drawn],
        size=[round(PANEL_DPI * inches) for inches in PANEL_INCHES],
        families=[_losses(n, family) for n, family in enumerate(comparison.families, 1) if len(family) > 1],
        pictures=[(text, _data(png)) for text, png in pictures.items()],
        notes=comparison.notes,
    )


def _overview(comparison: Comparison) -> str:
    layouts = [m.layout for m in comparison.measurements]
    if not layouts:
        return "No throughput of training steps."
    parts = "; ".join(
        f"{name} {', '.join(dict.fromkeys(values))}"
        for name, values in (
            ("backends", [layout.backend for layout in layouts]),
            ("lengths", [length_name(n) for n in sorted(layout.seq_len for layout in layouts)]),
            ("devices", [str(n) for n in sorted(layout.devices for layout in layouts)]),
        )
    )
    best = max(comparison.measurements, key=lambda m: m.rate.median)
    return (
        f"{len(layouts)} measurement{'s' if len(layouts) > 1 else ''}: {parts}. Highest throughput: {best.name} "
        f"({best.layout.backend}, {length_name(best.layout.seq_len)} tokens), "
        f"{compact(best.rate.median)} tokens/s/device."
    )


def _throughput(measurements: Sequence[Measurement]) -> Table:
    # Drop columns without information.
    columns = [c for c in _COLUMNS if any(c.value(m) not in (None, "") for m in measurements)]
    rows = []
    for measurement in measurements:
        values = [column.value(measurement) for column in columns]
        rows.append([(value, "" if value is None else c.show(value)) for value, c in zip(values, columns, strict=True)])
    headings = [(column.heading, column.hint) for column in columns]
    return Table("Throughput of every run and layout. Click a column heading to sort.", headings, rows)


def _losses(number: int, family: Sequence[Run]) -> dict[str, Any]:
    # The table of `zeco_train.compare`, from the same data; or why there is none.
    try:
        rows = describe(family)
    except DataError as error:
        return {"number": number, "problem": str(error)}
    headings = [("run", ""), ("steps", "done"), ("compared", "steps that the first run has as well")]
    headings += [("first loss", ""), ("last loss", "")]
    for name in COMPARED:
        headings.append((f"largest difference of {name.replace('_', ' ')}", "absolute, relative, at step"))
    cells = []
    for row in rows:
        numbers = [(row[key], f"{row[key]:.5f}") for key in ("first_loss", "last_loss")]
        found = [row["difference"][name] for name in COMPARED]
        gaps = [(gap and gap["relative"], show_difference(gap) or "the reference") for gap in found]
        counts = [(row[key], str(row[key])) for key in ("steps", "compared")]
        cells.append([(row["name"], row["name"]), *counts, *numbers, *gaps])
    caption = f"Losses step by step, against those of {family[0].name}, of runs with the same data, batches and seed."
    return {"number": number, "problem": "", "table": Table(caption, headings, cells)}


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
