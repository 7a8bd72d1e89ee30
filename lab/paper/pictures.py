"""The papers' figures drawn anew. Three kinds of marks: crosses from the paper, discs measured here, lines computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.paper.machine import NODE, Machine, Row, fit_lasp2
from lab.paper.ours import ALPHA, ALPHAS, ASSUMED, DEVICES, GPUS, TOKENS, Measured, Predicted
from zeco_train.collectives.scan_registry import ALL_SCANS
from zeco_train.sp.backend_registry import BACKENDS
from zeco_train.system.figures import CURVES, GREY, finish_axes, label_axes, length_ticks, new_figure
from zeco_train.system.numbers import length_name

if TYPE_CHECKING:
    from zeco_train.system.figures import Axes, Figure

_COLOURS = {
    **{name: spec.color for name, spec in BACKENDS.items()},
    "all_scan": BACKENDS["zeco"].color,
    "all_gather": BACKENDS["lasp2"].color,
}
_PAPER_GPUS = (8, 16, 32, 64, 128, 256)
_MARKS = "× paper, ● measured here, lines and bars computed"
# ZeCO, section 4.1, and the chunks of its operator.
_COLLECTIVE_TOKENS, _CHUNK = 8_192, 64


def figure_1(rows: Sequence[Row], machine: Machine, predicted: Sequence[Predicted]) -> Figure:
    """ZeCO's Figure 1: throughput of all GPUs as the sequence grows with them; and three costs at the most GPUs."""
    figure = new_figure(f"ZeCO, Figure 1 ({_MARKS})", (14, 5.4), dpi=110, title_size=12)
    left, *bars = figure.subplots(1, 4, width_ratios=(2.2, 1, 1, 1))
    for method in ("dp", "zeco", "lasp2", "lasp1"):
        points = [(row.gpus, row.gpus * row.paper) for row in _of(rows, "ZeCO 6", method)]
        _paper(left, points, method, f"{method}, paper")
        line = [(gpus, gpus * 1e3 * 32_768 / machine.step(method, gpus, 32_768)) for gpus in _PAPER_GPUS]
        if method in ("dp", "zeco"):
            left.plot(*_xy(line), color=_COLOURS[method], linewidth=1, label=f"{method}, its machine fitted")
    for device, style in zip(DEVICES, ("--", ":"), strict=True):
        ours = [(row.gpus, row.gpus * row.rate) for row in _zeco(predicted, device, 32_768)]
        left.plot(*_xy(ours), style, color=_COLOURS["zeco"], label=f"zeco here, {device}, predicted")
    label_axes(left, "32k tokens a GPU", "GPUs", "tokens/s of all GPUs")
    for axes, title, table, methods, gpus in (
        (bars[0], "collective, 256 GPUs, ms", "ZeCO 2", ("all_gather", "all_scan"), 256),
        (bars[1], "operator above dp,\n128 GPUs × 32k, ms", "ZeCO 4", ("lasp1", "lasp2", "zeco"), 128),
        (bars[2], "tokens/s of a GPU,\n256 GPUs × 32k", "ZeCO 6", ("lasp2", "zeco", "dp"), 256),
    ):
        _bars(axes, title, [row for name in methods for row in _of(rows, table, name) if row.gpus == gpus])
    figure.supxlabel(ASSUMED, fontsize=7)
    return figure


def figure_3(rows: Sequence[Row], measured: Sequence[Measured]) -> Figure:
    """ZeCO's Figure 3: volume and computation of a rank in theory (its Table 1), and the time of a collective."""
    figure = new_figure(f"ZeCO, Figure 3 ({_MARKS})", (15, 4.8), dpi=110, title_size=12)
    left, middle, right = figure.subplots(1, 3)
    # ZeCO, Table 1: volumes in states, D·e elements; costs in L·D·e, with chunks of 64 tokens.
    for method, volume, style in (("lasp1", 1, "-"), ("lasp2", 1, "--"), ("zeco", 0, "-")):
        states = [float(n) if volume else 1.0 for n in GPUS]
        left.plot(GPUS, states, style, color=_COLOURS[method], label=f"{method} (theory)")
    lane = [_lane_states(n) for n in GPUS[1:]]
    left.plot(GPUS[1:], lane, ":", color=_COLOURS["zeco"], label="lane, between nodes")
    label_axes(left, "communication volume of a rank", "GPUs", "states")
    of_states = 1 / _CHUNK
    for method, costs in (
        ("lasp1", [float(n) for n in GPUS]),
        ("lasp2", [1 + of_states + math.log2(n) / _COLLECTIVE_TOKENS for n in GPUS]),
        ("zeco", [1 + of_states for _ in GPUS]),
    ):
        style = "--" if method == "lasp2" else "-"
        middle.plot(GPUS, costs, style, color=_COLOURS[method], label=f"{method} (theory)")
    label_axes(middle, "computation of a rank, dp = 1", "GPUs", "times dp")
    for method in ("all_gather", "all_scan"):
        _paper(right, [(row.gpus, row.paper) for row in _of(rows, "ZeCO 2", method)], method, f"{method}, paper")
        points = [(row.gpus, row.model) for row in _of(rows, "ZeCO 2", method)]
        right.plot(*_xy(points), color=_COLOURS[method], linewidth=1, label=f"{method}, its machine")
        _measured(right, measured, "ZeCO 2", method)
    label_axes(right, "state of 32 × 128 × 128", "GPUs", "ms")
    return figure


def figure_4(
    rows: Sequence[Row], measured: Sequence[Measured], machine: Machine, predicted: Sequence[Predicted]
) -> Figure:
    """ZeCO's Figure 4: operator (top) and training throughput (bottom), 16k and 32k tokens a GPU."""
    figure = new_figure(f"ZeCO, Figure 4 ({_MARKS})", (15, 10), dpi=110, title_size=12)
    upper, lower = figure.subplots(2, 2)
    for tokens, top, bottom, number in zip(TOKENS, upper, lower, (0, 1), strict=True):
        for method in ("dp", "zeco", "lasp2", "lasp1"):
            table = f"ZeCO {3 + number}"
            if method == "dp":
                # Not a row of its own: the model takes it from the paper.
                _paper(top, [(row.gpus, row.dp) for row in _of(rows, table, "zeco")], method, "dp, paper")
            _paper(top, [(row.gpus, row.paper) for row in _of(rows, table, method)], method, f"{method}, paper")
            _line(top, [(row.gpus, row.model) for row in _of(rows, table, method)], method)
            _measured(top, measured, table, method)
            table = f"ZeCO {5 + number}"
            _paper(bottom, [(row.gpus, row.paper) for row in _of(rows, table, method)], method, f"{method}, paper")
            points = [(gpus, 1e3 * tokens / machine.step(method, gpus, tokens)) for gpus in _PAPER_GPUS]
            _line(bottom, points, method)
            _measured(bottom, measured, table, method)
        for device, style in zip(DEVICES, ("--", ":"), strict=True):
            for method in ("zeco", "lasp2"):
                points = [(row.gpus, row.rate) for row in _backend(predicted, device, tokens, method)]
                bottom.plot(*_xy(points), style, color=_COLOURS[method], label=f"{method} here, {device}, predicted")
        label_axes(top, f"operator, {length_name(tokens)} tokens a GPU, H 16", "GPUs", "ms")
        label_axes(
            bottom, f"training, gla_1b, {length_name(tokens)} tokens a GPU", "GPUs", "tokens/s of a GPU", log=False
        )
    figure.supxlabel(f"{ASSUMED}; the paper's training has H 32, ours H 16", fontsize=8)
    return figure


def lasp2_figure_4(rows: Sequence[Row]) -> Figure:
    """LASP-2's Figure 4 and Table 6: throughput by length of the sequence."""
    figure = new_figure("LASP-2, Figure 4 and Table 6 (× paper, line computed)", (8, 5), dpi=110, title_size=12)
    axes = figure.subplots()
    fixed, per_16k = fit_lasp2()
    own = [row for row in rows if row.table == "LASP-2 6"]
    for gpus, colour in zip(sorted({row.gpus for row in own}), CURVES, strict=False):
        points = [(row.tokens, row.paper) for row in own if row.gpus == gpus]
        axes.plot(*_xy(points), "x", color=colour, label=f"{gpus} GPUs, paper")
    lengths = sorted({row.tokens for row in own})
    axes.plot(lengths, [n / (fixed + per_16k * n / 16_384) for n in lengths], color=GREY, label="computed, any GPUs")
    label_axes(axes, f"a step takes {fixed:.3f} s + {1e3 * per_16k:.2f} ms a 16,384 tokens", "tokens", "tokens/s")
    length_ticks(axes.xaxis)
    return figure


def scaling(predicted: Sequence[Predicted]) -> Figure:
    """Our own predictions: efficiency by algorithm, of `auto` by the latency between nodes; and dp's own throughput."""
    figure = new_figure("Predicted throughput, one sequence over all GPUs", (19, 9), 110, 12)
    for tokens, row in zip(TOKENS, figure.subplots(2, 3), strict=True):
        for device, style in zip(DEVICES, ("-", "--"), strict=True):
            for scan, colour in zip(ALL_SCANS, CURVES, strict=False):
                found = _backend(predicted, device, tokens, f"zeco:{scan.name}")
                points = [(one.gpus, one.efficiency) for one in found]
                row[0].plot(*_xy(points), style, color=colour, label=f"{scan.name}, {device}")
            for alpha, colour in zip(ALPHAS, CURVES, strict=False):
                found = _zeco(predicted, device, tokens, alpha)
                points = [(one.gpus, one.efficiency) for one in found]
                row[1].plot(*_xy(points), style, color=colour, label=f"{alpha:g} µs, {device}")
            for name, colour, label in (("dp", CURVES[0], "the fastest number of"), ("dp:all", CURVES[1], "all")):
                points = [(one.gpus, one.rate) for one in _backend(predicted, device, tokens, name)]
                row[2].plot(*_xy(points), style, color=colour, label=f"shards over {label} GPUs, {device}")
        label_axes(
            row[0], f"{length_name(tokens)} tokens a GPU, {ALPHA:g} µs between nodes", "GPUs", "of dp", log=False
        )
        label_axes(row[1], f"{length_name(tokens)} tokens a GPU, fastest scan", "GPUs", "of dp", log=False)
        label_axes(row[2], f"dp, {length_name(tokens)} tokens a GPU", "GPUs", "tokens/s of a GPU", log=False)
        row[2].set_ylim(bottom=0)
        row[1].set_ylim(0.9, 1.005)
        row[1].axhline(0.97, color=GREY, linewidth=0.8)
    figure.supxlabel(ASSUMED, fontsize=8)
    return figure


def _bars(axes: Axes, title: str, rows: Sequence[Row]) -> None:
    """The paper's value as a cross, the model's as a bar; the operator's above that of dp."""
    for place, row in enumerate(rows):
        axes.bar(place, row.model - row.dp, color=_COLOURS[row.method], alpha=0.4)
        axes.plot(place, row.paper - row.dp, "x", color=_COLOURS[row.method], markersize=9)
    axes.set_xticks(range(len(rows)), [row.method for row in rows], fontsize=8)
    axes.set_title(title, fontsize=9)
    finish_axes(axes, "y")


def _lane_states(gpus: int) -> float:
    """States that a rank of `lane` receives from other nodes, without transitions."""
    return (gpus // NODE - 1).bit_length() / NODE


def _of(rows: Sequence[Row], table: str, method: str) -> list[Row]:
    return [row for row in rows if (row.table, row.method) == (table, method)]


def _backend(
    predicted: Sequence[Predicted], device: str, tokens: int, backend: str, alpha: float = ALPHA
) -> list[Predicted]:
    wanted = device, tokens, backend, alpha
    return [row for row in predicted if (row.device, row.tokens, row.backend, row.alpha) == wanted]


def _zeco(predicted: Sequence[Predicted], device: str, tokens: int, alpha: float = ALPHA) -> list[Predicted]:
    return _backend(predicted, device, tokens, "zeco", alpha)


def _paper(axes: Axes, points: Sequence[tuple[float, float]], method: str, label: str) -> None:
    if points:
        axes.plot(*_xy(points), "x", color=_COLOURS[method], markersize=7, label=label)


def _line(axes: Axes, points: Sequence[tuple[float, float]], method: str) -> None:
    if points:
        axes.plot(*_xy(points), color=_COLOURS[method], linewidth=1, label=f"{method}, the paper's machine computed")


def _measured(axes: Axes, measured: Sequence[Measured], table: str, method: str) -> None:
    for row in measured:
        if (row.table, row.method) == (table, method):
            label = f"{method} here, {row.gpus} × {row.device}, measured"
            axes.plot(row.gpus, row.value, "o", color=_COLOURS[method], markersize=6, label=label)


def _xy(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
