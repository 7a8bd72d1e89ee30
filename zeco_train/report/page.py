"""The report as a self-contained HTML file, from page.html: pictures, styles and script are embedded."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from zeco_train.compare import COMPARED, Run, describe, show_difference
from zeco_train.errors import DataError
from zeco_train.report.measurements import Comparison, Measurement
from zeco_train.report.panels import PANEL_DPI, PANEL_INCHES, Panel, panel_png
from zeco_train.system.numbers import compact, length_name


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
    environment.filters["sort_key"] = _sort_key
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


def _sort_key(value: float) -> str:
    # JavaScript reads `Infinity` but not Python's `inf`.
    return "Infinity" if value == math.inf else repr(value)
