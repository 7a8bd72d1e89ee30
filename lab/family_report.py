"""The family of models: loss curves of each, trained on one rank and on several, and how far the two are apart."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from zeco_train.compare import Run, difference, draw_losses, look
from zeco_train.system.figures import GREY, finish_axes, new_figure, plain, save_figure, step_ticks
from zeco_train.system.terminal import markdown_table

PICTURE_FILE, TABLE_FILE, CSV_FILE = "family.png", "family.md", "family.csv"
_HEADINGS = ("model", "parameters", "steps", "last loss", "validation loss", "largest difference", "at step", "verdict")


@dataclass(frozen=True)
class Pair:
    """A model's two runs on the same data.

    Attributes:
        model: name: its mixer, and the pattern of a hybrid.
        parameters: number of them.
        alone: on one rank.
        shared: each sequence spread over several ranks.
    """

    model: str
    parameters: int
    alone: Run
    shared: Run


@dataclass(frozen=True)
class Verdict:
    """One row of the table.

    Attributes:
        last_loss, val_loss: of the run on one rank; NaN if there was no validation.
        difference: the largest of the losses of the two runs, relative to the run on one rank; `at_step` is its step.
        limit: what is allowed.
    """

    model: str
    parameters: int
    steps: int
    last_loss: float
    val_loss: float
    difference: float
    at_step: int
    limit: float

    @classmethod
    def of(cls, pair: Pair, limit: float) -> Verdict:
        """Compare a pair's losses.

        Raises:
            DataError: the runs have no step in common.
        """
        alone, found = pair.alone, difference(pair.shared, pair.alone, "loss")
        measured = [value for value in alone.column("val_loss") if not math.isnan(value)]
        val_loss = measured[-1] if measured else math.nan
        gap = found.relative, found.relative_step
        return cls(pair.model, pair.parameters, max(alone.rows), alone.column("loss")[-1], val_loss, *gap, limit)

    @property
    def same(self) -> bool:
        """Whether the losses are the same within the limit; not if one is NaN."""
        return self.difference <= self.limit and math.isfinite(self.last_loss)


def family_table(verdicts: Sequence[Verdict]) -> str:
    """The rows as Markdown."""
    rows = []
    for each in verdicts:
        val_loss = "" if math.isnan(each.val_loss) else f"{each.val_loss:.4f}"
        verdict = f"{'within' if each.same else 'MORE than'} {each.limit:g}"
        losses = f"{each.last_loss:.4f}", val_loss, f"{each.difference:.1e}"
        rows.append([each.model, f"{each.parameters:,}", each.steps, *losses, each.at_step, verdict])
    return markdown_table(_HEADINGS, rows, ["---", *["---:"] * 6, "---"])


def family_csv(verdicts: Sequence[Verdict]) -> str:
    """The rows with all digits, as CSV."""
    text = io.StringIO()
    names = [each.name for each in fields(Verdict)]
    writer = csv.DictWriter(text, [*names, "same"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({**asdict(each), "same": each.same} for each in verdicts)
    return text.getvalue()


def draw_family(pairs: Sequence[Pair], limit: float, shared: str, path: Path) -> None:
    """Plot the losses on one rank above their differences from those on several; the file is replaced atomically.

    Args:
        pairs: of each model.
        limit: of the differences.
        shared: how the sequences were spread, as in `sp=zeco on 2 ranks`.
        path: of the picture.

    Raises:
        DataError: it cannot be written.
    """
    figure = new_figure("Models on the same data", (9, 7), dpi=130, title_size=14)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    draw_losses(upper, [Run(pair.model, pair.alone.path, pair.alone.rows) for pair in pairs])
    upper.legend(frameon=False, fontsize=8, ncols=2)
    drawn: list[float] = []
    for index, pair in enumerate(pairs):
        steps = sorted(pair.alone.rows.keys() & pair.shared.rows.keys())
        gaps = [_relative(pair.shared.rows[step].get("loss"), pair.alone.rows[step].get("loss")) for step in steps]
        # Zeros cannot be drawn on a logarithmic axis.
        # Markers, since a point between two zeros has no line.
        lower.plot(steps, [gap or math.nan for gap in gaps], linewidth=1.2, marker=".", markersize=4, **look(index))
        drawn += [gap for gap in gaps if 0 < gap < math.inf]
    if drawn:
        lower.set_yscale("log")
    lower.axhline(limit, color=GREY, linewidth=0.8, linestyle=":")
    lower.annotate(f"allowed: {limit:g}", (1, limit), (-4, -10), xycoords=("axes fraction", "data"),
                   textcoords="offset points", ha="right", color=GREY, fontsize=8)  # fmt: skip
    lower.set_ylabel(plain(f"|difference| of {shared},\nrelative to one rank"))
    lower.set_xlabel("step")
    step_ticks(lower.xaxis)
    finish_axes(upper)
    finish_axes(lower)
    figure.align_ylabels()
    save_figure(figure, path)


def _relative(value: Any, expected: Any) -> float:
    if not value or not expected:
        return math.nan
    return abs(value - expected) / abs(expected)
