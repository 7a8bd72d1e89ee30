"""Case `attention` drawn: time by method, the part of it that waits for others, and how even the work is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeco_train.bench.samples import Row
from zeco_train.sp.registry import BACKENDS
from zeco_train.system.figures import GREY, finish_axes, new_figure, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SOFTMAX, _ALONE = "#2563a8", GREY


def draw_attention(rows: Sequence[Row], machine: str) -> Figure | None:
    """Forward + backward by variant: a row of panels for each number of tokens; None without such rows.

    Panels: milliseconds, of which exposed communication is hatched; and the slowest rank's work over the mean, where
    it was profiled.
    """
    rows = [row for row in rows if row["pass"] == "forward_backward"]
    counts = sorted({row["tokens"] for row in rows})
    if not counts:
        return None
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    size = 13.0, 1.4 + len(counts) * (0.6 + 0.27 * len(variants))
    figure = new_figure(f"Attention of one layer, {_shape(rows[0])} ({machine})", size, dpi=120, title_size=11)
    profiled = any(row.get("slowest") for row in rows)
    panels = figure.subplots(len(counts), 1 + profiled, squeeze=False, sharey="row")
    for count, (left, *rest) in zip(counts, panels, strict=True):
        own = {row["variant"]: row for row in rows if row["tokens"] == count}
        for place, name in enumerate(variants):
            if name not in own:
                continue
            row, colour = own[name], _colour(name)
            left.barh(place, row["median_ms"], 0.7, color=colour)
            if exposed := row.get("exposed_us"):
                left.barh(place, exposed / 1e3, 0.7, color="none", edgecolor="white", hatch="////", linewidth=0)
            left.annotate(f"{row['median_ms']:.2f}", (row["median_ms"], place), (4, 0), textcoords="offset points",
                          va="center", fontsize=8)  # fmt: skip
            if rest and (slowest := row.get("slowest")):
                rest[0].plot([slowest], [place], "o", color=colour, markersize=6)
        left.set_yticks(range(len(variants)), [plain(name) for name in variants])
        left.invert_yaxis()
        left.set_xlabel(f"ms, {count:,} tokens a rank; hatched: exposed communication")
        finish_axes(left, "x")
        for right in rest:
            right.axvline(1.0, color=GREY, linewidth=0.8)
            right.set_xlabel("work of the slowest rank over the mean")
            finish_axes(right, "x")
    return figure


def _shape(row: Row) -> str:
    window = "" if row.get("window") is None else f", window {row['window']:,}"
    return f"H {row['heads']}, G {row['key_heads']}, D {row['head_dim']}{window}, {row.get('gpus', 1)} ranks"


def _colour(variant: str) -> str:
    name = variant.rpartition(":")[2]
    if name in BACKENDS and ":" in variant:
        return BACKENDS[name].color
    return _ALONE if variant.partition(":")[0] == "dp" else _SOFTMAX
