"""Colours, figures, axes and ticks of all plots; imports matplotlib with the Agg backend."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from zeco_train.system.files import whole_file, write_errors
from zeco_train.system.numbers import length_name
from zeco_train.system.terminal import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#2a6fbb", "#d9720f", "#5f6b76"
# For curves other than backends, which have their own colours.
CURVES = (BLUE, ORANGE, "#3b8f4f", "#a23b72", GREY, "#8c6d1f", "#3aa6a6", "#7a5cc0")


def import_matplotlib() -> None:
    """Import matplotlib with the Agg backend; call before its first import.

    A notebook sets MPLBACKEND for its children to a backend that may not be installed in their environment, and
    matplotlib then fails on import.
    """
    if "matplotlib" in sys.modules:
        return
    named = os.environ.get("MPLBACKEND")
    # Only then: other threads may read the environment meanwhile.
    if named is not None:
        os.environ["MPLBACKEND"] = "agg"
    try:
        import matplotlib  # noqa: F401
    finally:
        if named is not None:
            os.environ["MPLBACKEND"] = named


def new_figure(title: str, size: tuple[float, float], dpi: int, title_size: float) -> Figure:
    """An empty figure; `size` in inches."""
    import_matplotlib()
    # Not pyplot: its backend would look for a display, and its figures stay in memory until closed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(plain(title), fontsize=title_size, fontweight="bold")
    return figure


def plain(text: str) -> str:
    """Escape dollar signs, between which matplotlib would typeset a formula, and control characters."""
    return visible(text).replace("$", r"\$")


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a PNG atomically. Raises DataError if it cannot be written."""
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            render(figure, partial)
    return path


def render(figure: Figure, target: Path | BinaryIO, kind: str = "png") -> None:
    """Draw into a file of this kind, with control characters of texts escaped; ticks need `plain`.

    Names may come from a stranger's file, and matplotlib warns of a character without a glyph by printing it.
    """
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_text(visible(text.get_text()))
    figure.savefig(target, format=kind)


def finish_axes(axes: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
    """Draw a faint grid behind the data, and hide the top and right spines."""
    axes.grid(alpha=0.25, which="major", axis=grid)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def label_axes(axes: Axes, title: str, x: str, y: str, log: bool = True) -> None:
    """Title, labels and scales: x logarithmic to base 2, y logarithmic with `log`; a legend beside the axes, if any."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    finish_axes(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def length_ticks(axis: Axis) -> None:
    """Ticks as lengths, with binary units."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: length_name(round(value))))


def amount_ticks(axis: Axis) -> None:
    """Ticks with decimal prefixes."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))


def step_ticks(axis: Axis) -> None:
    """Ticks at whole steps."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
