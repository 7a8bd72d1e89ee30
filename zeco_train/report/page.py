"""The report as a self-contained HTML file: pictures, styles and script are embedded."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from zeco_train.errors import DataError
from zeco_train.report.comparison import COMPARED, describe, show_difference
from zeco_train.report.measurements import Comparison, Measurement
from zeco_train.report.panels import PANEL_DPI, PANEL_INCHES, Panel, panel_png
from zeco_train.system.numbers import compact, length_name


@dataclass(frozen=True)
class Column:
    """A column of the table of measurements.

    Attributes:
        heading, hint: column header and its tooltip.
        value: sort key.
        show: the value as text.
    """

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
    Column("name", "the run, or the benchmark's file", lambda m: m.name),
    Column("backend", "what joins the shards, sp=", lambda m: m.layout.backend),
    Column("length", "tokens of a sequence", lambda m: m.layout.seq_len, length_name),
    Column("tokens/device", "of a sequence, on one device", lambda m: m.layout.tokens_per_device, length_name),
    Column("devices", "all ranks", lambda m: m.layout.devices),
    Column("sp.size", "ranks that share a sequence", lambda m: m.layout.sp_size),
    Column("tokens/s/device", "median of the rows, the first left out", lambda m: m.rate.median, lambda v: f"{v:,.0f}"),
    Column("spread", "p10–p90: of ten rows one is slower, and one is faster", _spread),
    Column("rows", "how many the median is of", lambda m: m.rate.count),
    Column("of dp", "over sp=dp with the same work and devices", lambda m: m.ratio, _percent),
    Column("step, ms", "median", lambda m: m.step_seconds, _ms),
    Column("exposed, ms", "compute waited for scans, median", lambda m: m.exposed_seconds, _ms),
    Column("data, ms", "waited for data, median", lambda m: m.data_seconds, _ms),
    Column("memory, GB", "of the fullest device", lambda m: m.memory_gb, lambda v: f"{v:.1f}"),
    Column("MFU", "model FLOPs over the device's peak", lambda m: m.mfu, _percent),
    Column("HFU", "the same with what was computed again", lambda m: m.hfu, _percent),
    Column("loss", "the last one, training", lambda m: m.loss, lambda v: f"{v:.4f}"),
    Column("val. loss", "the last one, validation", lambda m: m.val_loss, lambda v: f"{v:.4f}"),
    Column("model", "", lambda m: m.layout.model),
    Column("strategy", "where parameters live, parallel=", lambda m: m.layout.strategy),
    Column("dtype", "of the compute", lambda m: m.layout.dtype),
    Column("device", "", lambda m: m.layout.device_name),
    Column("source", "a run's own rows, or a benchmark", lambda m: m.source),
)


def page(title: str, comparison: Comparison, drawn: Sequence[Panel], pictures: dict[str, bytes]) -> str:
    """The report as an HTML page.

    Args:
        title: its heading.
        comparison: the measurements and runs to show.
        drawn: the panels.
        pictures: further PNGs, by caption.
    """
    figures = "".join(map(_figure, drawn))
    sections = [
        _section("Throughput", _measurements(comparison.measurements) if comparison.measurements else ""),
        _section("Pictures", f'<div class="figures">{figures}</div>' if figures else ""),
        *(_losses(index, family) for index, family in enumerate(comparison.families, start=1) if len(family) > 1),
        _section("Benchmarks", "".join(_picture(text, png) for text, png in pictures.items())),
        _section("Notes", _list(comparison.notes) if comparison.notes else ""),
    ]
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        # Even if a name were not escaped properly, it could not load or run anything.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{_text('page.css')}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(title)}</h1><p>{escape(_overview(comparison))} Made {made}.</p></header>\n"
        f"<main>\n{''.join(sections)}</main>\n<script>\n{_text('page.js')}</script>\n</body>\n</html>\n"
    )


def _text(file: str) -> str:
    """Content of a file next to this one."""
    return Path(__file__).with_name(file).read_text(encoding="utf-8")


def _overview(comparison: Comparison) -> str:
    layouts = [m.layout for m in comparison.measurements]
    if not layouts:
        return "No throughput of training steps."
    said = "; ".join(
        f"{name} {', '.join(dict.fromkeys(values))}"
        for name, values in (
            ("backends", [layout.backend for layout in layouts]),
            ("lengths", [length_name(n) for n in sorted(layout.seq_len for layout in layouts)]),
            ("devices", [str(n) for n in sorted(layout.devices for layout in layouts)]),
        )
    )
    best = max(comparison.measurements, key=lambda m: m.rate.median)
    return (
        f"{len(layouts)} measurement{'s' if len(layouts) > 1 else ''}: {said}. Highest throughput: {best.name} "
        f"({best.layout.backend}, {length_name(best.layout.seq_len)} tokens), "
        f"{compact(best.rate.median)} tokens/s/device."
    )


def _measurements(measurements: Sequence[Measurement]) -> str:
    # Drop columns without information.
    columns = [c for c in _COLUMNS if any(c.value(m) not in (None, "") for m in measurements)]
    rows = []
    for measurement in measurements:
        values = [column.value(measurement) for column in columns]
        rows.append([(value, "" if value is None else c.show(value)) for value, c in zip(values, columns, strict=True)])
    headings = [(column.heading, column.hint) for column in columns]
    return _table("Throughput of every run and layout. Click a column heading to sort.", headings, rows)


def _losses(index: int, family: Sequence[Any]) -> str:
    """The table of `zeco_train.compare`, from the same data."""
    heading = "How far the losses lie apart" if index == 1 else f"How far the losses lie apart ({index})"
    try:
        rows = describe(family)
    except DataError as error:
        return _section(heading, f"<p>{escape(str(error))}</p>")
    headings = [
        ("run", ""),
        ("steps", "done"),
        ("compared", "steps that the first run has as well"),
        ("first loss", ""),
        ("last loss", ""),
    ]
    headings += [
        (f"largest difference of {name.replace('_', ' ')}", "absolute, relative, at step") for name in COMPARED
    ]
    cells = []
    for row in rows:
        numbers = [(row[key], f"{row[key]:.5f}") for key in ("first_loss", "last_loss")]
        found = [row["difference"][name] for name in COMPARED]
        gaps = [(gap and gap["relative"], show_difference(gap) or "the measure") for gap in found]
        counts = [(row[key], str(row[key])) for key in ("steps", "compared")]
        cells.append([(row["name"], row["name"]), *counts, *numbers, *gaps])
    caption = f"Losses step by step, against those of {family[0].name}, of runs with the same data, batches and seed."
    return _section(heading, _table(caption, headings, cells))


def _table(caption: str, headings: Sequence[tuple[str, str]], rows: Sequence[Sequence[tuple[Any, str]]]) -> str:
    """Cells are (sort key, text); the first cell of a row is its header."""
    head = "".join(
        f'<th scope="col" title="{escape(hint)}"{_align(row[index][0] for row in rows)}>'
        f'<button type="button">{escape(name)}</button></th>'
        for index, (name, hint) in enumerate(headings)
    )
    body = []
    for row in rows:
        cells = [f'<th scope="row">{escape(row[0][1])}</th>']
        for value, text in row[1:]:
            sort = f' data-sort="{_number(value)}"{_align([value])}' if isinstance(value, int | float) else ""
            cells.append(f"<td{sort}>{escape(text)}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<p class="caption">{escape(caption)}</p>'
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>\n"
    )


def _align(values: Iterable[Any]) -> str:
    return ' class="number"' if any(isinstance(value, int | float) for value in values) else ""


def _number(value: float) -> str:
    """Format for JavaScript, which reads `Infinity` but not Python's `inf`."""
    return "Infinity" if value == math.inf else repr(value)


def _figure(panel: Panel) -> str:
    # The size below is that of `panel_png` in pixels, so that the page keeps its layout while it loads.
    light, dark = (_data(panel_png(panel, dark)) for dark in (False, True))
    width, height = (round(PANEL_DPI * inches) for inches in PANEL_INCHES)
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(panel.text)}" width="{width}" height="{height}"></picture>'
        f"<figcaption>{escape(panel.title)}</figcaption></figure>\n"
    )


def _picture(text: str, png: bytes) -> str:
    return (
        f'<figure class="wide"><img class="paper" src="{_data(png)}" alt="{escape(text)}">'
        f"<figcaption>{escape(text)}</figcaption></figure>\n"
    )


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _section(heading: str, content: str) -> str:
    """Empty if there is no content."""
    return f"<section><h2>{escape(heading)}</h2>\n{content}</section>\n" if content else ""
