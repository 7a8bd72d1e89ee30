"""Plot of a run: loss and throughput over its steps."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from zeco_train.system.amounts import compact
from zeco_train.system.figures import BLUE, GREY, ORANGE, finish_axes, new_figure, save_figure
from zeco_train.system.run_files import METRICS_FILE
from zeco_train.tracking.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_FILE = "loss.png"

# From this many rows on, a running mean over about a 50th of them is drawn over the raw rows.
_ROWS_TO_SMOOTH = 200


def plot_run(run_dir: str | Path) -> Path | None:
    """Draw `run_dir/metrics.jsonl` into `run_dir/loss.png`: losses above, tokens/s below.

    Returns:
        The plot's path; None if there are no rows.

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
    from matplotlib.ticker import EngFormatter

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
        top.xaxis.set_major_formatter(EngFormatter(sep=""))


def _draw_throughput(axes: Axes, rows: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    steps, rates = _series(rows, "tokens_per_second")
    axes.plot(steps, rates, color=BLUE, linewidth=1.5, marker=_marker(steps), label="throughput")
    if len(rates) > 1:
        middle = median(rates)
        axes.axhline(middle, color=GREY, linewidth=1, linestyle="--", label=f"median {compact(middle)}")
        axes.legend(frameon=False, loc="lower right")
    axes.set_xlim(0, 1.02 * max(rows[-1]["step"], 1))
    axes.set_ylim(0, 1.15 * max(rates, default=1.0) or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("step")
    axes.set_ylabel("tokens per second")
    finish_axes(axes)


def _series(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of the rows that have this column."""
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _marker(steps: list[int]) -> str:
    """Markers if the series has few points: a line alone would be hard to see, or empty for one point."""
    return "o" if len(steps) == 1 else "." if len(steps) <= 30 else ""


def smoothed(values: list[float]) -> tuple[list[float], int]:
    """Running means of many values (few are returned unchanged), and the window size.

    The window is centred, so that the means do not lag, and shorter at the ends.
    """
    count, sums = len(values), [0.0, *accumulate(values)]
    half = count // 100 if count >= _ROWS_TO_SMOOTH else 0
    bounds = [(max(0, index - half), min(count, index + half + 1)) for index in range(count)]
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in bounds], 2 * half + 1
