"""The report's pictures: each panel draws into its own axes, so that report.png and the page show the same ones."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING

from zeco_train.compare import Run, draw_differences, draw_losses, legend_of_runs
from zeco_train.report.measurements import Comparison, Measurement, Spread
from zeco_train.sp.backend_registry import BACKENDS
from zeco_train.system.figures import CURVES, amount_ticks, finish_axes, new_figure, plain, render
from zeco_train.system.numbers import length_name

if TYPE_CHECKING:
    from zeco_train.system.figures import Axes, Figure

_COLORS = {name: spec.color for name, spec in BACKENDS.items()}
_MARKERS = "osD^vPX*"
_RATE = "tokens/s of a device (p10, median, p90)"
# With more bars their names do not fit, and more names make no title.
_MOST_BARS, _MOST_NAMED = 16, 6
# (backend, kind, points).
Line = tuple[str, str, list[tuple[int, Spread]]]
# Size of a panel on the page: small, so that its text can still be read on a phone, at 360 pixels.
PANEL_INCHES = (5.4, 3.4)
PANEL_DPI = 165


@dataclass(frozen=True)
class Panel:
    """One picture of the report."""

    title: str
    text: str  # alternative text: the axes, and the values if there are few
    draw: Callable[[Axes], None]


def panels(comparison: Comparison) -> list[Panel]:
    """All panels that have data."""
    measurements = comparison.measurements
    found = []
    for model, source, device in dict.fromkeys(_kind(m) for m in measurements):
        own = sorted((m for m in measurements if _kind(m) == (model, source, device)), key=_place)
        where = f"{model}, {source}" + (f" on {device}" if device else "")
        found += _throughput(own, where)
        found += _costs(own, where)
    for family in comparison.families:
        found += _losses(family, _colors(family, measurements)) if len(family) > 1 else []
    # Their losses are not comparable, so one panel shows that they all fall.
    alone = [family[0] for family in comparison.families if len(family) == 1]
    if alone:
        found.append(_loss(alone, {}, are_apart=len({comparison.data.get(run.name) for run in alone}) > 1))
    return found


def whole_figure(drawn: Sequence[Panel], title: str) -> Figure:
    """All panels in one picture, two per row."""
    columns = min(2, max(1, len(drawn)))
    lines = -(-max(1, len(drawn)) // columns)
    figure = new_figure(title, (7.2 * columns, 4.6 * lines + 0.4), dpi=110, title_size=13)
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes, panel in zip(grid.flat, drawn, strict=False):
        panel.draw(axes)
        _finish(axes, panel.title)
    for axes in list(grid.flat)[len(drawn) :]:
        axes.set_axis_off()
    return figure


def panel_png(panel: Panel) -> bytes:
    """One panel as a PNG; the page adds its title, and inverts it where it is dark."""
    figure = new_figure("", PANEL_INCHES, dpi=PANEL_DPI, title_size=11)
    axes = figure.subplots()
    panel.draw(axes)
    _finish(axes, "")
    buffer = io.BytesIO()
    render(figure, buffer)
    return buffer.getvalue()


def _place(measurement: Measurement) -> tuple[int, str, int, int]:
    layout = measurement.layout
    known = [*BACKENDS]
    name = layout.backend.split(":")[0]
    order = known.index(name) if name in known else len(known)
    return order, layout.backend, layout.seq_len, layout.devices


def _kind(measurement: Measurement) -> tuple[str, str, str]:
    # Those that may share axes.
    return measurement.layout.model, measurement.source, measurement.layout.device_name


def _throughput(measurements: Sequence[Measurement], where: str) -> list[Panel]:
    # A benchmark fixes the tokens per device, a training run the sequences.
    benchmark = measurements[0].source == "benchmark"
    length = "tokens a device" if benchmark else "tokens of a sequence"
    rates = [(m, m.rate) for m in measurements]
    by_length = _lines(
        rates,
        lambda m: m.layout.tokens_per_device if benchmark else m.layout.seq_len,
        lambda m: _ranks(m.layout.devices),
    )
    values = _format_values((m, f"{rate.median:,.0f}") for m, rate in rates)
    text, draw = "Tokens per second and device over", partial(_draw_lines, by_length, length, length_name, _RATE)
    found = [Panel(f"Throughput by length ({where})", f"{text} {length}: {values}.", draw)]
    if len({m.layout.devices for m in measurements}) > 1:
        draw = partial(_draw_lines, _by_devices(rates), "devices", str, _RATE)
        found.append(Panel(f"Scaling ({where})", f"{text} the number of devices: {values}.", draw))
    return found


def _by_devices(values: Sequence[tuple[Measurement, Spread]]) -> list[Line]:
    return _lines(values, lambda m: m.layout.devices, lambda m: f"{length_name(m.layout.tokens_per_device)} a device")


def _ranks(devices: int) -> str:
    return f"{devices} device{'s' if devices > 1 else ''}"


def _format_values(figures: Iterable[tuple[Measurement, str]]) -> str:
    return "; ".join(f"{_label(m)} {figure}" for m, figure in islice(figures, 24))


def _label(measurement: Measurement) -> str:
    layout = measurement.layout
    shape = f"{layout.backend}, {length_name(layout.seq_len)}, {_ranks(layout.devices)}"
    return shape if measurement.source == "benchmark" else f"{_short(measurement.name)}: {shape}"


def _lines(
    values: Sequence[tuple[Measurement, Spread]], x: Callable[[Measurement], int], kind: Callable[[Measurement], str]
) -> list[Line]:
    # Several measurements at one x are one point: the middle of their medians, and all of their range.
    lines: dict[tuple[str, str], dict[int, list[Spread]]] = {}
    for measurement, value in values:
        line = lines.setdefault((measurement.layout.backend, kind(measurement)), {})
        line.setdefault(x(measurement), []).append(value)
    return [
        (backend, name, sorted((place, _joined(spreads)) for place, spreads in points.items()))
        for (backend, name), points in lines.items()
    ]


def _joined(spreads: Sequence[Spread]) -> Spread:
    lows, highs = [spread.p10 for spread in spreads], [spread.p90 for spread in spreads]
    middle = median(spread.median for spread in spreads)
    return Spread(middle, min(lows), max(highs), sum(spread.count for spread in spreads))


def _draw_lines(lines: Sequence[Line], label: str, name: Callable[[int], str], unit: str, axes: Axes) -> None:
    kinds = list(dict.fromkeys(kind for _, kind, _ in lines))
    places = sorted({place for _, _, points in lines for place, _ in points})
    for index, (backend, kind, points) in enumerate(lines):
        # Offset horizontally, since backends are often equally fast.
        apart = 2 ** (min(0.05, 0.5 / len(lines)) * (index - (len(lines) - 1) / 2))
        # A percentile of few values, or of a bimodal distribution, can be on the other side of the median.
        below = [max(0.0, value.median - value.p10) for _, value in points]
        above = [max(0.0, value.p90 - value.median) for _, value in points]
        axes.errorbar(
            [place * apart for place, _ in points],
            [value.median for _, value in points],
            yerr=[below, above],
            color=_color(backend),
            marker=_MARKERS[kinds.index(kind) % len(_MARKERS)],
            linestyle=("-", "--", "-.", ":")[kinds.index(kind) % 4],
            capsize=3,
            label=plain(backend if len(kinds) == 1 else f"{backend}, {kind}"),
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [name(place) for place in places])
    axes.minorticks_off()
    # Room above, so that the legend need not cover the highest point.
    axes.margins(x=0.12, y=0.3)
    axes.set_ylim(bottom=0)
    if axes.get_ylim()[1] > 1000:
        amount_ticks(axes.yaxis)
    axes.set_xlabel(label)
    axes.set_ylabel(unit)
    legend_of_runs(axes)


def _color(backend: str) -> str:
    return _COLORS.get(backend.split(":")[0], CURVES[5])


def _costs(measurements: Sequence[Measurement], where: str) -> list[Panel]:
    columns: tuple[tuple[str, str, Callable[[Measurement], float | None]], ...] = (
        ("Exposed communication", "% of a step", lambda m: _share(m.exposed_seconds, m)),
        ("Waiting for data", "% of a step", lambda m: _share(m.data_seconds, m)),
        ("Memory", "GB of the fullest device", lambda m: m.memory_gb),
        ("Model FLOPs utilisation", "% of the device's peak", lambda m: None if m.mfu is None else 100 * m.mfu),
    )
    found = []
    for title, unit, value in columns:
        bars = [(m, amount) for m in measurements if (amount := value(m)) is not None]
        if bars:
            values = _format_values((m, f"{amount:.3g}") for m, amount in bars)
            draw = partial(_draw_bars, bars, unit)
            if len(bars) > _MOST_BARS:
                lines = _by_devices([(m, Spread(amount, amount, amount, 1)) for m, amount in bars])
                draw = partial(_draw_lines, lines, "devices", str, unit)
            found.append(Panel(f"{title} ({where})", f"{title}, {unit}: {values}.", draw))
    return found


def _share(seconds: float | None, measurement: Measurement) -> float | None:
    return None if seconds is None else 100 * seconds / measurement.step_seconds


def _draw_bars(bars: Sequence[tuple[Measurement, float]], unit: str, axes: Axes) -> None:
    amounts = [amount for _, amount in bars]
    drawn = axes.barh(range(len(bars)), amounts, color=[_color(m.layout.backend) for m, _ in bars])
    axes.bar_label(drawn, [f"{amount:.3g}" for amount in amounts], padding=3, fontsize=8)
    # A run by its name, a benchmark's row by its layout; both where one of them is not enough.
    labels = [_short(m.name) for m, _ in bars]
    if len(set(labels)) < len(labels):
        labels = [_label(m) for m, _ in bars]
    axes.set_yticks(range(len(bars)), [plain(label) for label in labels], fontsize=8)
    axes.set_ylim(max(len(bars), 3) - 0.5, -0.5)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel(unit)


def _colors(family: Sequence[Run], measurements: Sequence[Measurement]) -> dict[str, str]:
    # By name of a run: its backend's colour, if all runs have different backends.
    names = {run.name for run in family}
    pairs = {(m.name, m.layout.backend) for m in measurements if m.name in names and m.source == "training"}
    told = len(pairs) == len({name for name, _ in pairs}) == len({backend for _, backend in pairs})
    return {name: _color(backend) for name, backend in pairs} if told else {}


def _loss(runs: Sequence[Run], colors: Mapping[str, str], *, are_apart: bool = False) -> Panel:
    names = ", ".join(run.name for run in runs)
    title = f"Loss ({names})" if len(runs) <= _MOST_NAMED else f"Loss of {len(runs)} runs"
    title = f"Not comparable, of different data: {title}" if are_apart else title
    return Panel(title, f"Training loss over tokens of {names}.", partial(_draw_losses, runs, colors))


def _losses(family: Sequence[Run], colors: Mapping[str, str]) -> list[Panel]:
    first = family[0]
    found = [_loss(family, colors)]
    others = [run for run in family[1:] if run.rows.keys() & first.rows.keys()]
    if others:
        text = f"How far the losses of {', '.join(run.name for run in others)} lie from those of {first.name}, by step."
        draw = partial(_draw_differences, [first, *others], colors)
        found.append(Panel(f"Difference of the losses from {first.name}", text, draw))
    return found


def _draw_losses(family: Sequence[Run], colors: Mapping[str, str], axes: Axes) -> None:
    draw_losses(axes, family, x="tokens", colors=colors)
    axes.set_xlabel("tokens")
    amount_ticks(axes.xaxis)


def _draw_differences(family: Sequence[Run], colors: Mapping[str, str], axes: Axes) -> None:
    draw_differences(axes, family, colors)
    axes.set_xlabel("step")
    legend_of_runs(axes)


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:23]}…"


def _finish(axes: Axes, title: str) -> None:
    # Long lists of runs would not fit.
    axes.set_title(plain(title if len(title) <= 80 else f"{title[:79]}…"), fontsize=10)
    finish_axes(axes, "x" if axes.patches else "both")
