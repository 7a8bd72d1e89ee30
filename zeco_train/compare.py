"""Compare the curves of several runs: `python -m zeco_train.compare RUN_DIR RUN_DIR … [--max-difference X]`.

Reads each run's metrics.jsonl and compares loss and gradient norm, step by step, with those of the first run. Prints a
table, and writes `compare.png` and `compare.json` beside the first run's folder, or to `--out`.
"""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    run_command("zeco_train.compare")

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from zeco_train.errors import ConfigError, DataError
from zeco_train.system.command import Parser, docstring, errors_in_a_line, user_path
from zeco_train.system.figures import CURVES, finish_axes, new_figure, plain, save_figure, step_ticks
from zeco_train.system.files import METRICS_FILE, write_json_result
from zeco_train.system.numbers import compact
from zeco_train.system.paths import check_outputs
from zeco_train.system.terminal import format_table, visible
from zeco_train.tracking.charts import smoothed
from zeco_train.tracking.metrics import read_metrics

if TYPE_CHECKING:
    from zeco_train.system.figures import Axes

PLOT_FILE, RESULTS_FILE = "compare.png", "compare.json"
COMPARED = ("loss", "grad_norm")
_STYLES = ("-", "--", "-.", ":")
_MOST_INSIDE, _MOST_IN_A_COLUMN = 8, 24


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m zeco_train.compare", description=docstring(sys.modules[__name__]))
    parser.add_argument(
        "runs", nargs="+", type=user_path, metavar="RUN_DIR", help="folders of runs; the first is the measure"
    )
    parser.add_argument("--max-difference", type=float, metavar="X", help="fail if a loss differs by more, relatively")
    parser.add_argument("--out", type=user_path, metavar="FOLDER", help="for compare.png and compare.json")
    parsed = parser.parse_args(arguments)
    if parsed.max_difference is not None and not parsed.max_difference >= 0:
        raise ConfigError("--max-difference", parsed.max_difference, "must be ≥ 0")
    return parsed


@errors_in_a_line
def main(arguments: Sequence[str]) -> int:
    """Compare; returns the process's exit code: 1 if a loss differs by more than `--max-difference`."""
    options = _parse(arguments)
    runs = read_runs(options.runs)
    out = options.out or runs[0].path.parent
    results = out / RESULTS_FILE
    check_outputs("--out", out, (RESULTS_FILE, PLOT_FILE))
    rows = describe(runs)
    print(visible(table(rows)))
    write_json_result(results, {"measure": runs[0].name, "runs": rows})
    draw(runs, out / PLOT_FILE)
    worst = max(rows[1:], key=lambda row: row["difference"]["loss"]["relative"], default=None)
    if worst is None:
        print(visible(f"one run; {results}, {out / PLOT_FILE}"))
        return 0
    relative, step = (worst["difference"]["loss"][key] for key in ("relative", "relative_step"))
    limit = options.max_difference
    # Not `relative > limit`: a NaN must fail.
    failed = limit is not None and not relative <= limit
    verdict = "" if limit is None else f", {'MORE than' if failed else 'within'} {limit:g}"
    largest = f"largest relative difference of loss from {runs[0].name}: {relative:.2e}, {worst['name']} at step {step}"
    print(visible(f"{largest}{verdict}; {results}, {out / PLOT_FILE}"))
    return 1 if failed else 0


@dataclass(frozen=True)
class Difference:
    """The largest differences of a column from the first run's, over their common steps, and the first step of each.

    Infinite if exactly one has a finite value; `relative` to the first run's value.
    """

    absolute: float
    absolute_step: int
    relative: float
    relative_step: int


@dataclass(frozen=True)
class Run:
    """A run's rows, by step."""

    name: str
    path: Path
    rows: dict[int, dict[str, Any]]

    @classmethod
    def read(cls, path: Path, name: str) -> Run:
        """Read a run's metrics; `DataError` if there are none."""
        rows = read_metrics(path / METRICS_FILE)
        if not rows:
            raise DataError(path / METRICS_FILE, "has no rows", "give the folders of runs that have trained")
        return cls(name, path, {row["step"]: row for row in rows})

    def column(self, name: str) -> list[float]:
        """The values of all steps, NaN if missing."""
        return [math.nan if row.get(name) is None else float(row[name]) for row in self.rows.values()]

    @property
    def tokens_per_second(self) -> float:
        """Median over the rows, without the first one if there are more: it includes kernel compilation."""
        rates = self.column("tokens_per_second")
        return median(rates[1:] or rates)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the runs, named by the distinguishing parts of their folders.

    Raises:
        DataError: a folder has no metrics.
        ConfigError: a duplicate folder.
    """
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise ConfigError("RUN_DIR", " ".join(map(str, folders)), "names a folder twice")
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return [Run.read(path, name) for path, name in zip(paths, names, strict=True)]


def difference(run: Run, first: Run, column: str) -> Difference:
    """Compare a column with that of the first run; `DataError` if they have no step in common."""
    steps = sorted(run.rows.keys() & first.rows.keys())
    if not steps:
        raise DataError(run.path / METRICS_FILE, f"has no step in common with {first.path}", "use one train.log_every")
    absolute, relative = [], []
    for step in steps:
        value, expected = run.rows[step].get(column), first.rows[step].get(column)
        absolute.append(gap := _gap(value, expected))
        # Nothing is relative to 0 or to a missing value: the absolute difference stands for it.
        relative.append(gap / abs(expected) if gap and expected else gap)
    largest, worst = max(absolute), max(relative)
    return Difference(largest, steps[absolute.index(largest)], worst, steps[relative.index(worst)])


def _gap(value: float | None, expected: float | None) -> float:
    if value is None or expected is None:
        return 0.0 if value is expected else math.inf
    return abs(value - expected)


def describe(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One table row per run; differences are None for the first."""
    first = runs[0]
    rows = []
    for run in runs:
        losses = run.column("loss")
        differences = {column: None if run is first else asdict(difference(run, first, column)) for column in COMPARED}
        rows.append(
            {
                "name": run.name,
                "path": str(run.path),
                "steps": max(run.rows),
                "compared": len(run.rows.keys() & first.rows.keys()),
                "first_loss": losses[0],
                "last_loss": losses[-1],
                "tokens_per_second": run.tokens_per_second,
                "difference": differences,
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text: each difference is absolute, then relative, followed by the step of the relative one."""
    columns = {
        "name": ("run", f"<{max(8, *(len(row['name']) for row in rows))}"),
        "steps": ("steps", ">7"),
        "first_loss": ("first loss", ">12:.5f"),
        "last_loss": ("last loss", ">11:.5f"),
        "rate": ("tokens/s", ">10"),
        "loss": ("  largest difference of loss", "<40"),
        "grad_norm": ("of gradient norm", "<"),
    }
    cells = []
    for row in rows:
        loss, grad_norm = (show_difference(row["difference"][column]) or "-" for column in COMPARED)
        rate = compact(row["tokens_per_second"])
        cells.append({**row, "rate": rate, "loss": f"  {loss}", "grad_norm": grad_norm})
    return format_table(cells, columns, gap="")


def show_difference(found: dict[str, Any] | None) -> str:
    """A difference of `describe` as text; empty for the first run, which has none."""
    if found is None:
        return ""
    if math.isinf(found["absolute"]):
        return f"not finite in one of them (step {found['absolute_step']})"
    return f"{found['absolute']:.1e}, relative {found['relative']:.1e} at step {found['relative_step']}"


def draw(runs: Sequence[Run], path: Path) -> None:
    """Plot losses above their differences from the first run; `DataError` if the file cannot be written."""
    figure = new_figure(" · ".join(run.name for run in runs), (9, 6.5), dpi=130, title_size=14)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    draw_losses(upper, runs)
    draw_differences(lower, runs)
    lower.set_xlabel("step")
    step_ticks(lower.xaxis)
    finish_axes(upper)
    finish_axes(lower)
    figure.align_ylabels()
    save_figure(figure, path)


def draw_losses(axes: Axes, runs: Sequence[Run], x: str = "step", colors: Mapping[str, str] | None = None) -> None:
    """Each run's losses over a column of its rows, with a cross where they stop being finite; running means if long.

    `colors` by name of the run replace those by place.
    """
    for index, run in enumerate(runs):
        # Earlier lines are wider, so that coinciding curves stay visible.
        width = 1.4 + min(0.9, 3.6 / len(runs)) * (len(runs) - 1 - index)
        drawn = [pair for pair in zip(run.column(x), run.column("loss"), strict=True) if not math.isnan(sum(pair))]
        losses, _ = smoothed([loss for _, loss in drawn])
        (line,) = axes.plot(
            [place for place, _ in drawn], losses, label=plain(run.name), linewidth=width, **look(index, run, colors)
        )
        if drawn and math.isnan(run.column("loss")[-1]):
            axes.plot(drawn[-1][0], losses[-1], "x", color=line.get_color(), markersize=9, markeredgewidth=2)
    axes.set_ylabel("loss (nats per token)")
    legend_of_runs(axes)


def draw_differences(axes: Axes, runs: Sequence[Run], colors: Mapping[str, str] | None = None) -> None:
    """Difference of each run's losses from the first run's, over steps."""
    first, differ = runs[0], False
    for index, run in enumerate(runs[1:], start=1):
        steps = sorted(run.rows.keys() & first.rows.keys())
        gaps = [_gap(run.rows[step].get("loss"), first.rows[step].get("loss")) for step in steps]
        differ |= any(0 < gap < math.inf for gap in gaps)
        # Zeros cannot be drawn on a logarithmic axis.
        shown = look(index, run, colors)
        axes.plot(steps, [gap or math.nan for gap in gaps], label=plain(run.name), linewidth=1.6, **shown)
    if differ:
        axes.set_yscale("log")
    elif len(runs) > 1:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "the losses are the same at every step", ha="center", transform=axes.transAxes)
    axes.set_ylabel(f"|loss − that of {plain(first.name)}|")


def look(index: int, run: Run | None = None, colors: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Colour and style of a run's curves, by its place; the colour by its name if `colors` has one."""
    color = CURVES[index % len(CURVES)]
    if run is not None and colors:
        color = colors.get(run.name, color)
    return {"color": color, "linestyle": _STYLES[index % len(_STYLES)]}


def legend_of_runs(axes: Axes) -> None:
    """A legend that leaves room for the curves: beside them from 9 runs on, in two columns from 25 on."""
    count = len(axes.get_legend_handles_labels()[1])
    if count <= _MOST_INSIDE:
        axes.legend(frameon=False, fontsize=9)
    else:
        size, columns = (6, 1) if count <= _MOST_IN_A_COLUMN else (5, 2)
        place: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "labelspacing": 0.3}
        axes.legend(frameon=False, fontsize=size, ncols=columns, **place)
