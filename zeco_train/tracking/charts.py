"""Plots of a run: loss and throughput over its steps, and the loss by position of evaluations and validations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from zeco_train.errors import DataError
from zeco_train.system.figures import (
    BLUE,
    CURVES,
    GREY,
    ORANGE,
    amount_ticks,
    finish_axes,
    length_ticks,
    new_figure,
    plain,
    save_figure,
    step_ticks,
)
from zeco_train.system.files import METRICS_FILE
from zeco_train.system.numbers import compact
from zeco_train.tracking.metrics import read_lines, read_metrics, step_of_row
from zeco_train.tracking.positions import PositionLosses

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PLOT_FILE = "loss.png"

# From this many rows on, a running mean over about a 50th of them is drawn over the raw rows.
_ROWS_TO_SMOOTH = 200


def plot_run(run_dir: str | Path) -> Path | None:
    """Draw `run_dir/metrics.jsonl` into `run_dir/loss.png`: losses above, tokens/s below; None if there are no rows.

    Raises:
        DataError: metrics.jsonl cannot be read, or the plot cannot be written.
    """
    run_dir = Path(run_dir)
    rows = read_metrics(run_dir / METRICS_FILE)
    if not rows:
        return None
    figure = new_figure(run_dir.resolve().name, (9, 6.5), dpi=130, title_size=14)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_loss(upper, rows)
    _draw_throughput(lower, rows)
    figure.align_ylabels()
    return save_figure(figure, run_dir / PLOT_FILE)


def _draw_loss(axes: Axes, rows: list[dict[str, Any]]) -> None:
    steps, losses = _series(rows, "loss")
    if len(steps) < _ROWS_TO_SMOOTH:
        axes.plot(steps, losses, color=BLUE, linewidth=1.8, marker=_marker(steps), label="training")
    else:
        axes.plot(steps, losses, color=BLUE, linewidth=0.8, alpha=0.35, label="training")
        means, window = smoothed(losses)
        axes.plot(steps, means, color=BLUE, label=f"training, mean of {window} rows")
    val_steps, val_losses = _series(rows, "val_loss")
    if val_steps:
        axes.plot(val_steps, val_losses, color=ORANGE, linewidth=1.8, marker="o", markersize=5, label="validation")
    if len(axes.lines) > 1:
        axes.legend(frameon=False)
    axes.set_ylabel("loss (nats per token)")
    finish_axes(axes)
    last = rows[-1]
    if last["step"] > 0 and last.get("tokens"):
        # The global batch is the same for the whole run, so tokens are a multiple of steps.
        per_step = last["tokens"] / last["step"]
        top = axes.secondary_xaxis("top", functions=(lambda step: step * per_step, lambda tokens: tokens / per_step))
        top.set_xlabel("tokens", color=GREY)
        top.tick_params(colors=GREY)
        amount_ticks(top.xaxis)


def _draw_throughput(axes: Axes, rows: list[dict[str, Any]]) -> None:
    steps, rates = _series(rows, "tokens_per_second")
    axes.plot(steps, rates, color=BLUE, linewidth=1.5, marker=_marker(steps), label="throughput")
    if len(rates) > 1:
        middle = median(rates)
        axes.axhline(middle, color=GREY, linewidth=1, linestyle="--", label=f"median {compact(middle)}")
        axes.legend(frameon=False, loc="lower right")
    axes.set_xlim(0, 1.02 * max(rows[-1]["step"], 1))
    axes.set_ylim(0, 1.15 * max(rates, default=1.0) or 1.0)
    step_ticks(axes.xaxis)
    amount_ticks(axes.yaxis)
    axes.set_xlabel("step")
    axes.set_ylabel("tokens per second")
    finish_axes(axes)


def _series(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    # Of the rows that have this column.
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _marker(steps: list[int]) -> str:
    # A line alone would be hard to see with few points, or empty for one.
    return "o" if len(steps) == 1 else "." if len(steps) <= 30 else ""


def smoothed(values: list[float]) -> tuple[list[float], int]:
    """Centred running means of many values, which do not lag, and the window size; few values stay as they are."""
    count, sums = len(values), [0.0, *accumulate(values)]
    half = count // 100 if count >= _ROWS_TO_SMOOTH else 0
    bounds = [(max(0, index - half), min(count, index + half + 1)) for index in range(count)]
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in bounds], 2 * half + 1


VALIDATION_FILE, POSITIONS_PLOT_FILE = "validation.jsonl", "loss_by_position.png"
# More curves would overlap.
_MOST_CURVES = 8


def position_figure(title: str, by_length: Mapping[int, PositionLosses], train_len: int | None = None) -> Figure:
    """Plot an evaluation, one curve per sequence length in tokens; `train_len` is that in training, if known."""
    figure = new_figure(title, (8, 5), dpi=130, title_size=13)
    axes = figure.subplots()
    longest = max(by_length)
    for index, (length, losses) in enumerate(by_length.items()):
        _draw_curve(axes, losses, color=CURVES[index % len(CURVES)], label=f"sequences of {length:,} tokens")
    if train_len is not None and train_len < longest:
        axes.axvline(train_len, color=GREY, linewidth=1, linestyle="--", label=f"trained on {train_len:,} tokens")
    if len(axes.lines) > 1:
        axes.legend(frameon=False)
    _finish(axes, longest)
    return figure


def plot_validations(run_dir: Path) -> Path | None:
    """Draw a run's validation.jsonl into loss_by_position.png, one curve per validation; None if there are none.

    Raises:
        DataError: validation.jsonl cannot be read, or the plot cannot be written.
    """
    path = run_dir / VALIDATION_FILE
    curves = read_validations(path)
    if not curves:
        return None
    if len(curves) > _MOST_CURVES:  # evenly spaced, with the first and the last
        curves = [curves[round(index * (len(curves) - 1) / (_MOST_CURVES - 1))] for index in range(_MOST_CURVES)]
    figure = new_figure(f"{run_dir.resolve().name}: validation loss by position", (8, 5), dpi=130, title_size=13)
    axes = figure.subplots()
    from matplotlib import colormaps

    for index, (step, losses) in enumerate(curves):
        is_last = index == len(curves) - 1
        shade = colormaps["Blues"](0.3 + 0.65 * (index + 1) / len(curves))
        _draw_curve(axes, losses, color=shade, label=f"step {step}", with_errors=is_last)
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize=9)
    _finish(axes, curves[-1][1].edges[-1])
    return save_figure(figure, run_dir / POSITIONS_PLOT_FILE)


def read_validations(path: Path) -> list[tuple[int, PositionLosses]]:
    """Steps and losses by position of a validation.jsonl, sorted by step; the last of several rows of a step counts.

    Raises:
        DataError: a line is not a validation, or the file cannot be read; names the line and the field.
    """
    found = {}
    for number, row in read_lines(path):
        step, record = step_of_row(path, number, row), row.get("by_position")
        try:
            if not isinstance(record, dict):
                raise ValueError("not an object")
            found[step] = PositionLosses.from_dict(record)
        except ValueError as error:
            raise DataError(path, f"line {number}: by_position: {error}", "correct or remove the line") from error
    return sorted(found.items())


def _draw_curve(axes: Axes, losses: PositionLosses, *, color: Any, label: str, with_errors: bool = True) -> None:
    # Geometric centres, with positions counted from 1: the axis is logarithmic.
    centres = [math.sqrt((a + 1) * b) for a, b in zip(losses.edges, losses.edges[1:], strict=False)]
    axes.plot(centres, losses.losses, color=color, linewidth=1.6, marker="o", markersize=3.5, label=plain(label))
    if with_errors:
        pairs = list(zip(losses.losses, losses.errors, strict=True))
        below, above = [loss - error for loss, error in pairs], [loss + error for loss, error in pairs]
        axes.fill_between(centres, below, above, color=color, alpha=0.2, linewidth=0)


def _finish(axes: Axes, seq_len: int) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log", base=2)
    axes.set_xlim(0.9, seq_len * 1.1)
    axes.xaxis.set_major_locator(LogLocator(base=4, numticks=20))
    length_ticks(axes.xaxis)
    axes.set_xlabel("position in the sequence (log-spaced buckets; shaded: ± a standard error over sequences)")
    axes.set_ylabel("loss (nats per token)")
    finish_axes(axes)
