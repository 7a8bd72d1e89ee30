"""Case `model` with several mixers or patterns of hybrids: their throughput by backend, as a table and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zeco_train.bench.samples import Row
from zeco_train.bench.session import Session
from zeco_train.bench.variants import PRODUCTS
from zeco_train.sp.registry import BACKENDS
from zeco_train.system.figures import GREY, finish_axes, new_figure, plain
from zeco_train.system.files import write_result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE_FILE = "mixers.md"
# Height of a bar, of 1 for all bars of a model.
_BARS = 0.8


def mixer_rows(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The measured rows of each model, if there are several; of two rows alike the later one counts."""
    measured = [row for row in rows if row.get("median_ms") and row.get("mixer")]
    if len({row["model"] for row in measured}) < 2:
        return {}
    found: dict[str, dict[tuple[str, int, int], Row]] = {}
    for row in measured:
        place = row["variant"], row["tokens"], row.get("gpus", 1)
        found.setdefault(f"{row['model']}, H {row['heads']}", {})[place] = row
    return {model: list(own.values()) for model, own in found.items()}


def mixer_table(models: dict[str, list[Row]]) -> str:
    """Tokens/s of a rank by model and variant, and relative to `dp`, as Markdown: a line per model and length."""
    variants = _variants(models)
    heads = ["mixer", "model", "tokens a rank", *(f"{name}, tokens/s" for name in variants)]
    heads += [f"{name} / dp" for name in variants if name != "dp"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for model, rows in models.items():
        for tokens in sorted({row["tokens"] for row in rows}):
            here = {row["variant"]: row for row in rows if row["tokens"] == tokens}
            rates = [_cell(here.get(name), "tokens_per_second_per_gpu", ",.0f") for name in variants]
            ratios = [_cell(here.get(name), "ratio", ".3f") for name in variants if name != "dp"]
            cells = [rows[0]["mixer"], model, f"{tokens:,}", *rates, *ratios]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write_mixers(models: dict[str, list[Row]], folder: Path, session: Session) -> None:
    """Print the table, and write it into the report's folder.

    Raises:
        DataError: it cannot be written, on all ranks.
    """
    text = mixer_table(models)
    session.say(text)
    session.agree(lambda: write_result(folder / TABLE_FILE, text) if session.mesh.is_main else None)


def draw_mixers(models: dict[str, list[Row]], machine: str) -> Figure:
    """Throughput by model, and relative to `dp`, with the most tokens and GPUs of each variant."""
    variants, names = _variants(models), list(models)
    figure = new_figure(f"Training step by model ({machine})", (13.0, 1.6 + 0.75 * len(names)), dpi=120, title_size=11)
    left, right = figure.subplots(1, 2, sharey=True)
    height = _BARS / len(variants)
    for index, variant in enumerate(variants):
        colour = BACKENDS[name].color if (name := variant.partition(":")[0]) in BACKENDS else GREY
        for place, rows in enumerate(models.values()):
            own = [row for row in rows if row["variant"] == variant]
            if not own:
                continue
            row, y = max(own, key=lambda each: (each["tokens"], each.get("gpus", 1))), place + index * height
            label = plain(variant) if variant not in left.get_legend_handles_labels()[1] else None
            left.barh(y, row["tokens_per_second_per_gpu"], height, color=colour, label=label)
            # The upper bound's ratio would push those of the scans together.
            if row.get("ratio") and variant not in ("dp", PRODUCTS):
                right.plot([row["ratio"]], [y], "o", color=colour, markersize=6)
                right.annotate(
                    f"{row['ratio']:.3f}", (row["ratio"], y), (8, 0), textcoords="offset points", va="center"
                )
    left.set_yticks([place + (_BARS - height) / 2 for place in range(len(names))], [plain(name) for name in names])
    left.invert_yaxis()
    left.set_xlabel("tokens/s of a GPU")
    right.axvline(1.0, color=BACKENDS["dp"].color, linewidth=0.8)
    right.set_xlabel("tokens/s over that of dp")
    finish_axes(left, "x")
    finish_axes(right, "x")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return figure


def _variants(models: dict[str, list[Row]]) -> list[str]:
    return list(dict.fromkeys(row["variant"] for rows in models.values() for row in rows))


def _cell(row: Row | None, column: str, style: str) -> str:
    value = None if row is None else row.get(column)
    return "" if value is None else format(value, style)
