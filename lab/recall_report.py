"""Recall across ranks by several models: table and picture of the accuracies by length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from zeco_train.compare import look
from zeco_train.system.figures import GREY, label_axes, new_figure, plain, save_figure
from zeco_train.system.terminal import markdown_table

PICTURE_FILE, TABLE_FILE = "recall_family.png", "recall_family.md"


@dataclass(frozen=True)
class Model:
    """A model of the table.

    Attributes:
        name: of the model.
        parameters: number of them.
        state_shape: heads, keys and values of a layer's state; zeros if it has none of constant size.
    """

    name: str
    parameters: int
    state_shape: tuple[int, int, int]

    @property
    def has_states(self) -> bool:
        """Whether states cross ranks, which the control sets to zero; those of softmax layers are not states."""
        return math.prod(self.state_shape) > 0


@dataclass(frozen=True)
class Result:
    """One evaluation.

    Attributes:
        model, seed: of the training.
        length: tokens of a sequence; `pairs` of them are asked for.
        whole: part of the answers that are right.
        zeroed: the same with zeros in place of the states from the rank before; None for models without states.
        chance: the same for a uniform guess.
        seconds: of training and evaluation since the length before.
    """

    model: str
    seed: int
    length: int
    pairs: int
    whole: float
    zeroed: float | None
    chance: float
    seconds: float


def recall_table(models: Sequence[Model], results: Sequence[Result]) -> str:
    """Mean (smallest to largest) over the seeds, in per cent, as Markdown; a row a model and one for its control."""
    columns = sorted({(each.length, each.pairs) for each in results})
    headings = ["model", "parameters", "state of a layer", "minutes a seed", "seeds", "states from rank 0"]
    headings += [f"{length} tokens, {pairs} pairs" for length, pairs in columns]
    rows: list[Sequence[object]] = []
    for model in models:
        own = [each for each in results if each.model == model.name]
        size = f"{' × '.join(map(str, model.state_shape))} = {math.prod(model.state_shape):,}"
        state = size if model.has_states else "keys and values of all tokens"
        seeds = len({each.seed for each in own})
        minutes = f"{sum(each.seconds for each in own) / 60 / seeds:.1f}" if seeds else "–"
        for column, name in (("whole", "as they are"), *([("zeroed", "zeroed")] if model.has_states else [])):
            cells = [_spread(getattr(each, column) for each in own if each.length == length) for length, _ in columns]
            first = [model.name, f"{model.parameters:,}", state, minutes, str(seeds), name]
            rows.append([*first, *cells])
    chances = [_spread(each.chance for each in results if each.length == length) for length, _ in columns]
    rows.append(["chance", *[""] * 5, *chances])
    return markdown_table(headings, rows, ["---", *["---:"] * 4, "---", *["---:"] * len(columns)])


def _spread(values: Iterable[float]) -> str:
    """Mean and range in per cent; the mean alone if all are equal, a dash without values."""
    if not (found := [100 * value for value in values]):
        return "–"
    low, high = f"{min(found):.1f}", f"{max(found):.1f}"
    return f"{mean(found):.1f}" + (f" ({low}–{high})" if low != high else "")


def draw_recall(models: Sequence[Model], results: Sequence[Result], ranks: str, path: Path) -> None:
    """Plot each model's mean accuracy and range by length, dotted with zeroed states; the file is replaced atomically.

    Args:
        models: in the order of the colours.
        results: of them.
        ranks: on which the sequences were spread, as in `2 ranks`.
        path: of the picture.

    Raises:
        DataError: it cannot be written.
    """
    figure = new_figure(f"Recall of one pair for each 8 tokens, on {ranks}", (9, 5), dpi=130, title_size=13)
    axes = figure.subplots()
    for index, model in enumerate(models):
        own = [each for each in results if each.model == model.name]
        lengths = sorted({each.length for each in own})
        if not lengths:
            continue
        whole = [[100 * each.whole for each in own if each.length == length] for length in lengths]
        means, color = [mean(values) for values in whole], look(index)["color"]
        # Bars beside each other.
        places = [length * 2 ** (0.03 * (index - (len(models) - 1) / 2)) for length in lengths]
        spread = [
            [middle - min(values) for middle, values in zip(means, whole, strict=True)],
            [max(values) - middle for middle, values in zip(means, whole, strict=True)],
        ]
        axes.errorbar(places, means, spread, label=plain(model.name), linewidth=1.8, marker="o", markersize=4,
                      capsize=2.5, color=color)  # fmt: skip
        if model.has_states:
            zeroed = [mean(100 * (each.zeroed or 0.0) for each in own if each.length == length) for length in lengths]
            axes.plot(lengths, zeroed, color=color, linewidth=1.0, linestyle=":")
    chance = 100 * results[0].chance
    axes.axhline(chance, color=GREY, linewidth=0.8)
    axes.annotate(f"chance {chance:.2g} %; dotted: states from the first rank zeroed", (1, chance), (-4, 5),
                  xycoords=("axes fraction", "data"), textcoords="offset points", ha="right", color=GREY,
                  fontsize=8)  # fmt: skip
    label_axes(axes, "mean and range over the seeds", "tokens of a sequence", "answers right (%)", log=False)
    save_figure(figure, path)
