"""Plots of the loss by position: of one evaluation, or of a run's successive validations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeco_train.errors import DataError
from zeco_train.system.amounts import length_name
from zeco_train.system.figures import CURVES, GREY, finish_axes, new_figure, plain, save_figure
from zeco_train.tracking.metrics import read_lines, step_of_row
from zeco_train.tracking.positions import PositionLosses

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VALIDATION_FILE, POSITIONS_PLOT_FILE = "validation.jsonl", "loss_by_position.png"
# More curves would overlap.
_MOST_CURVES = 8


def position_figure(title: str, by_length: Mapping[int, PositionLosses], train_len: int | None = None) -> Figure:
    """Plot an evaluation, one curve per sequence length.

    Args:
        title: of the plot.
        by_length: losses, keyed by sequence length in tokens.
        train_len: sequence length in training, if known.
    """
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
    curves = _some(read_validations(path))
    if not curves:
        return None
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


def _some(curves: list[tuple[int, PositionLosses]]) -> list[tuple[int, PositionLosses]]:
    """At most _MOST_CURVES curves, evenly spaced, including the first and the last."""
    if len(curves) <= _MOST_CURVES:
        return curves
    return [curves[round(index * (len(curves) - 1) / (_MOST_CURVES - 1))] for index in range(_MOST_CURVES)]


def _draw_curve(axes: Axes, losses: PositionLosses, *, color: Any, label: str, with_errors: bool = True) -> None:
    # Geometric centres, with positions counted from 1: the axis is logarithmic.
    centres = [math.sqrt((a + 1) * b) for a, b in zip(losses.edges, losses.edges[1:], strict=False)]
    axes.plot(centres, losses.losses, color=color, linewidth=1.6, marker="o", markersize=3.5, label=plain(label))
    if with_errors:
        pairs = list(zip(losses.losses, losses.errors, strict=True))
        below, above = [loss - error for loss, error in pairs], [loss + error for loss, error in pairs]
        axes.fill_between(centres, below, above, color=color, alpha=0.2, linewidth=0)


def _finish(axes: Axes, seq_len: int) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_xscale("log", base=2)
    axes.set_xlim(0.9, seq_len * 1.1)
    axes.xaxis.set_major_locator(LogLocator(base=4, numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: length_name(round(value))))
    axes.set_xlabel("position in the sequence (log-spaced buckets; shaded: ± a standard error over sequences)")
    axes.set_ylabel("loss (nats per token)")
    finish_axes(axes)
