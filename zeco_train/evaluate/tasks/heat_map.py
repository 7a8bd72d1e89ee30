"""Heat map of recall accuracy: depth × length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeco_train.system.figures import GREY, ORANGE, new_figure
from zeco_train.system.numbers import length_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def heat_map(
    title: str,
    lengths: Sequence[int],
    depths: Sequence[float | None],
    accuracies: Sequence[Sequence[float]],
    *,
    train_len: int | None,
    chance: float,
    caption: str,
) -> Figure:
    """Draw accuracies from 0 to 1, indexed by depth, then length.

    Args:
        title: of the figure.
        lengths: of the sequences, one column each.
        depths: one row each; None: random depths.
        accuracies: [depths][lengths].
        train_len: sequence length in training, marked if it is among the lengths.
        chance: accuracy of a uniform guess.
        caption: describes the samples behind a cell.
    """
    width = max(5.5, 2.6 + 0.75 * len(lengths))
    figure = new_figure(title, (width, max(2.9, 1.9 + 0.38 * len(depths))), dpi=130, title_size=12)
    from matplotlib.patches import Rectangle

    axes = figure.subplots()
    image = axes.imshow(accuracies, vmin=0.0, vmax=1.0, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(lengths)), [length_name(length) for length in lengths])
    axes.set_yticks(range(len(depths)), ["random" if depth is None else f"{depth:.0%}" for depth in depths])
    axes.set_xlabel("tokens of the sequence")
    axes.set_ylabel("depth")
    for row, of_depth in enumerate(accuracies):
        for column, accuracy in enumerate(of_depth):
            color = "black" if accuracy > 0.6 else "white"
            axes.text(column, row, f"{100 * accuracy:.0f}", ha="center", va="center", color=color, fontsize=9)
    if train_len in lengths:
        box = Rectangle((lengths.index(train_len) - 0.5, -0.5), 1, len(depths), fill=False, clip_on=False)
        box.set(edgecolor=ORANGE, linewidth=2.5)
        axes.add_patch(box)
        caption = f"{caption}; framed: the length of the training"
    bar = figure.colorbar(image, ax=axes, label="answers right")
    bar.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0 %", "25 %", "50 %", "75 %", "100 %"])
    bar.ax.axhline(chance, color=ORANGE, linewidth=2)
    figure.supxlabel(f"{caption}; orange on the scale: chance, {100 * chance:.2g} %", fontsize=8, color=GREY)
    return figure
