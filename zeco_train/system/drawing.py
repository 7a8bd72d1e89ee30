"""What all pictures share: colours, figures and axes; and matplotlib with the Agg backend, whatever is configured."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zeco_train.system.files import whole_file, write_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#2a6fbb", "#d9720f", "#5f6b76"
# Of curves that are not backends, which have colours of their own.
CURVES = (BLUE, ORANGE, "#3b8f4f", "#a23b72", GREY, "#8c6d1f", "#3aa6a6", "#7a5cc0")


def import_matplotlib() -> None:
    """To be called before the first import of matplotlib or a part of it.

    A notebook sets MPLBACKEND for its children to a backend that may not be installed where they run, and matplotlib
    then fails on import. The variable keeps its value, and a matplotlib that is already there its backend.
    """
    if "matplotlib" in sys.modules:
        return
    named = os.environ.get("MPLBACKEND")
    os.environ["MPLBACKEND"] = "agg"
    try:
        import matplotlib  # noqa: F401
    finally:
        if named is None:
            del os.environ["MPLBACKEND"]
        else:
            os.environ["MPLBACKEND"] = named


def new_figure(title: str, size: tuple[float, float], dpi: int, title_size: float) -> Figure:
    """A figure without contents; `size` in inches."""
    import_matplotlib()
    # Not pyplot: its backend would look for a display, and its figures stay in memory until closed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(plain(title), fontsize=title_size, fontweight="bold")
    return figure


def plain(text: str) -> str:
    """Text that is drawn as it is: between dollar signs there would be a formula."""
    return text.replace("$", r"\$")


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a PNG in one go, so that a reader never sees half of one; returns its path.

    Raises:
        DataError: it cannot be written.
    """
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            figure.savefig(partial, format="png")
    return path


def finish_axes(axes: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
    """A faint grid behind what is drawn, and no frame but the two axes."""
    axes.grid(alpha=0.25, which="major", axis=grid)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
